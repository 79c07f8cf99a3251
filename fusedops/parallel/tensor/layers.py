"""Tensor parallelism: the communications as autograd nodes, and the layers that use them.

Between a column-parallel and a row-parallel product the features are sharded over the ranks.
``to_tensor_parallel`` (f in Megatron-LM) leads into that region, ``from_tensor_parallel`` (g) out
of it. Outside, activations are replicated, or, with sequence parallelism, sharded along the
sequence:

    node                     forward          backward         used by
    copy_to                  nothing          all-reduce       to_tensor_parallel
    reduce_from              all-reduce       nothing          from_tensor_parallel
    gather_from_sequence     all-gather       reduce-scatter   to_tensor_parallel, sequence parallel
    scatter_to_sequence      reduce-scatter   all-gather       from_tensor_parallel, seq. parallel
    gather_tokens            all-gather       own chunk        tokens of experts
    scatter_tokens           own chunk        all-gather       tokens of experts

A layer is made from a plain one by ``of``: names and ``state_dict`` keys stay, parameters become
DTensors on the mesh, and the forward uses their local shards. Nothing here knows a model.

Shape suffixes: B batch, S sequence, s the sequence of this rank, H hidden size, F hidden features,
f those of this rank.

Reference: Shoeybi et al.: Megatron-LM, arXiv:1909.08053; Korthikanti et al.: Reducing Activation
Recomputation in Large Transformer Models, arXiv:2205.05198 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fusedops._core import checks, exchange_kernels
from fusedops.nn import MLP, GatedMLP, LinearAct
from fusedops.ops import linear_act, linear_glu, mlp
from fusedops.ops.mlp_tiled import mlp_tiled
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import Pending
from fusedops.parallel.tensor.async_linear import all_gather_product, linear_reduce_scatter


def communicate(
    name: str, input: torch.Tensor, group: dist.ProcessGroup, dim: int = -2
) -> torch.Tensor:
    """Communicate ``input`` as the node of this name does, and its gradient in the backward."""
    return _Communicate.apply(name, input, group, dim) if group.size() > 1 else input


def reduce_in_place(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return what ``reduce_from`` does, in place where autograd allows it."""
    # A view or a leaf may be the caller's; an operator and a compiler take no written arguments.
    is_free = not partial._is_view() and not partial.is_leaf and partial.is_contiguous()
    if not is_free or _is_intercepted() or torch.compiler.is_compiling():
        return communicate("reduce_from", partial, group)
    return _ReduceInPlace.apply(partial, group) if group.size() > 1 else partial


def _is_intercepted() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0


class _ReduceInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(partial)
        return collectives.all_reduce(partial, group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Communicate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, input: torch.Tensor, group: dist.ProcessGroup, dim: int
    ) -> torch.Tensor:
        ctx.name, ctx.group, ctx.dim = name, group, dim
        if name in _SENDING and _is_intercepted():
            return _OPERATOR(name, input, group.group_name, dim)
        return start(name, input, group, dim).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, communicate(TRANSPOSES[ctx.name], grads[0], ctx.group, ctx.dim), None, None


def start(name: str, input: torch.Tensor, group: dist.ProcessGroup, dim: int = -2) -> Pending:
    """Start what ``communicate`` does, without a gradient."""
    if name == "copy_to":
        return Pending(lambda: input.view_as(input))
    if name == "reduce_from":
        return collectives.all_reduce(input.clone(memory_format=torch.contiguous_format), group)
    if name in ("gather_from_sequence", "gather_tokens"):
        return collectives.all_gather(input, group, dim=dim)
    if name == "scatter_to_sequence":
        return collectives.reduce_scatter(input, group, dim=dim)
    return Pending(lambda: input.chunk(group.size(), dim)[group.rank()].contiguous())


# A communication as one operator that returns what it received: a policy of recomputation sees it
# and may keep its result (``mp_comm_recompute=False``). Those of torch write into an argument.
_SENDING = ("reduce_from", "gather_from_sequence", "scatter_to_sequence", "gather_tokens")
_LIBRARY = torch.library.Library("fusedops_parallel", "DEF")
_LIBRARY.define("communicate(str name, Tensor input, str group, int dim) -> Tensor")
_OPERATOR: Any = torch.ops.fusedops_parallel.communicate.default


def _communicated(name: str, input: torch.Tensor, group: str, dim: int) -> torch.Tensor:
    return start(name, input, collectives.group_of(group), dim).wait()


_LIBRARY.impl(
    "communicate", exchange_kernels.replaceable(_communicated), "CompositeExplicitAutograd"
)

TRANSPOSES = {
    "copy_to": "reduce_from",
    "reduce_from": "copy_to",
    "gather_from_sequence": "scatter_to_sequence",
    "scatter_to_sequence": "gather_from_sequence",
    "gather_tokens": "scatter_tokens",
    "scatter_tokens": "gather_tokens",
}


def to_tensor_parallel(
    input: torch.Tensor, group: dist.ProcessGroup, *, sequence: bool
) -> torch.Tensor:
    """Return ``[B, S, H]`` for sharded features, of ``[B, S, H]``, or of ``[B, s, H]`` gathered.

    Layers that read one input (query, key and value) share one call and its communication.
    """
    return communicate("gather_from_sequence" if sequence else "copy_to", input, group)


def from_tensor_parallel(
    partial: torch.Tensor, group: dist.ProcessGroup, *, sequence: bool
) -> torch.Tensor:
    """Return the sum of the ranks' ``[B, S, H]``: ``[B, S, H]``, or scattered ``[B, s, H]``."""
    return communicate("scatter_to_sequence" if sequence else "reduce_from", partial, group)


def distribute(
    op: str, name: str, parameter: Any, mesh: DeviceMesh, dim: int | None, *, uneven: bool = False
) -> Any:
    """Return a replicated parameter as a DTensor on ``mesh``, ``None`` for ``None``.

    It is the same on every rank, or on the meta device. ``dim`` is sharded over the ranks;
    ``None``: it stays replicated. With ``uneven`` the last rank may have less, but not nothing.

    Raises:
        ValueError: the ranks do not divide the dim.
        TypeError: it is a DTensor already.
    """
    if parameter is None:
        return None
    if isinstance(parameter, DTensor):
        expected = "a plain parameter: split features before fully_shard"
        raise TypeError(f"{op}: {name} must be {expected}, got a DTensor")
    part, placement = parameter.detach(), Replicate()
    if dim is not None:
        ranks, size = mesh.size(), parameter.shape[dim]
        parts = part.chunk(ranks, dim)
        if len(parts) < ranks or (size % ranks and not uneven):
            expected = "enough for" if uneven else "a multiple of"
            checks.fail(op, f"size of dim {dim} of {name}", f"{expected} the {ranks} ranks", size)
        part = parts[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
        placement = Shard(dim)  # type: ignore[assignment]
    shards = DTensor.from_local(
        part,
        mesh,
        [placement],
        run_check=False,
        shape=parameter.shape,
        stride=torch.empty(parameter.shape, device="meta").stride(),
    )
    return nn.Parameter(shards, requires_grad=parameter.requires_grad)


def local(parameter: Any) -> Any:
    """Return what this rank has of a parameter (or ``None`` of none); differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def replicated(
    parameter: torch.Tensor, group: dist.ProcessGroup, *, partial_grad: bool
) -> torch.Tensor:
    """Return a replicated parameter for the forward.

    With ``partial_grad`` each rank applies it to other tokens or features, so that gradients are
    summed. Otherwise all ranks have the sum.
    """
    parameter = local(parameter)
    return communicate("copy_to", parameter, group) if partial_grad else parameter


class ParallelLayer(nn.Module):
    """What layers on a mesh have in common.

    ``of`` of each layer makes it from a plain module that has the same parameters on every rank;
    hooks of the module are not carried over.

    Args:
        mesh: the ranks; one dim.
        sequence: whether activations around the layer are sharded along the sequence.
        overlap: whether communication runs in blocks that overlap the products: the same bits.

    Raises:
        ValueError: the mesh has more dims, or there is ``overlap`` without ``sequence``.
        TypeError: it is no mesh, or ``sequence`` or ``overlap`` no bool.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    activation: str
    _bias_name = "bias"  # of the bias that is added after a reduction
    _cache: dict[str, Any] | None = None

    def __init__(self, mesh: DeviceMesh, *, sequence: bool = False, overlap: bool = False) -> None:
        super().__init__()
        op = type(self).__name__
        if not isinstance(mesh, DeviceMesh):
            checks.fail_type(op, "mesh", "a torch.distributed.DeviceMesh", mesh)
        if mesh.ndim != 1:
            checks.fail(op, "mesh", "of one dim: pass mesh['tp']", f"{mesh.ndim} dims")
        checks.flag(op, "sequence", sequence)
        checks.flag(op, "overlap", overlap)
        if overlap and not sequence:
            checks.fail(op, "overlap", "False without sequence: an all-reduce has no blocks", True)
        self.mesh = mesh
        self.sequence = sequence
        self.overlap = overlap

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the mesh."""
        return self.mesh.get_group()

    @contextmanager
    def reuse_parameters(self) -> Iterator[None]:
        """Compute ``cached`` values once for all calls inside: their gradients are reduced once."""
        self._cache = {}
        try:
            yield
        finally:
            self._cache = None

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """Return ``make()``; inside of ``reuse_parameters`` the result of its first call."""
        if self._cache is None:
            return make()
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Reduce the partial sums of a row-parallel product, which may be overwritten."""
        if not self.sequence:
            return reduce_in_place(partial, self.group)
        return from_tensor_parallel(partial, self.group, sequence=True)

    def biased(self, reduced: torch.Tensor) -> torch.Tensor:
        """Add the replicated bias; with a sharded sequence each rank adds it to its own tokens."""
        bias = getattr(self, self._bias_name)
        if bias is None:
            return reduced
        added = self.cached(
            "bias", lambda: replicated(bias, self.group, partial_grad=self.sequence)
        )
        return reduced + added.to(reduced.dtype)

    def extra_repr(self) -> str:
        """Return the number of ranks, and whether the sequence is sharded."""
        return f"ranks={self.mesh.size()}, sequence={self.sequence}, overlap={self.overlap}"


class ColumnLinear(ParallelLayer):
    """A linear layer whose outputs are sharded over the ranks: ``[B, S, H] -> [B, S, f]``.

    Made by ``ColumnLinear.of``. ``weight`` ``[F, H]`` and ``bias`` ``[F]`` are ``Shard(0)``, and an
    activation runs in the product as in ``fusedops.linear_act``.
    """

    communicate: bool
    repeats: int  # ranks that have the same head

    @classmethod
    def of(
        cls,
        module: nn.Linear | LinearAct,
        mesh: DeviceMesh,
        *,
        sequence: bool = False,
        overlap: bool = False,
        communicate: bool = True,
        heads: int | None = None,
    ) -> ColumnLinear:
        """Return ``module`` with its outputs sharded.

        Args:
            module: the plain layer.
            mesh: the ranks.
            sequence: whether the input is sharded along the sequence.
            overlap: whether it is gathered in blocks that overlap the product.
            communicate: ``False`` if the input is a ``to_tensor_parallel`` that layers share.
            heads: number of blocks of outputs that must not be divided (key and value heads). If
                there are fewer than ranks, several ranks have the same head: the parameters stay
                replicated and their gradients are summed.

        Raises:
            ValueError: ranks and outputs, or ranks and heads, do not divide.
            TypeError: ``module`` is no linear layer.
        """
        self = cls(mesh, sequence=sequence, overlap=overlap)
        op, ranks = cls.__name__, mesh.size()
        self.activation = _activation_of(op, module)
        self.communicate = communicate
        self.repeats = 1
        dim: int | None = 0
        if heads is not None and heads % ranks:
            if heads < 1 or ranks % heads or module.weight.shape[0] % heads:
                expected = f"a multiple or a divisor of the {ranks} ranks of the mesh"
                checks.fail(op, "heads", expected, heads)
            self.repeats, dim = ranks // heads, None
        self.weight = distribute(op, "weight", module.weight, mesh, dim)
        self.bias = distribute(op, "bias", module.bias, mesh, dim)
        return self.train(module.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs ``[B, S, f]`` of the full sequence."""
        weight, bias = self.cached("rows", lambda: [self._rows(self.weight), self._rows(self.bias)])
        if self.overlap and self.communicate:
            return all_gather_product(
                "linear_act", input, self.group, weight, bias, activation=self.activation
            )
        if self.communicate:
            input = to_tensor_parallel(input, self.group, sequence=self.sequence)
        return linear_act(input, weight, bias, activation=self.activation)

    def _rows(self, parameter: Any) -> Any:
        """Return the rows of a parameter that make this rank's outputs."""
        if parameter is None or self.repeats == 1:
            return local(parameter)
        all_rows = replicated(parameter, self.group, partial_grad=True)
        heads = self.mesh.size() // self.repeats
        return all_rows.chunk(heads)[self.mesh.get_local_rank() // self.repeats]


class RowLinear(ParallelLayer):
    """A linear layer whose inputs are sharded over the ranks: ``[B, S, f] -> [B, S, H]``.

    Made by ``RowLinear.of``. ``weight`` ``[H, F]`` is ``Shard(1)``; ``bias`` is replicated and
    added once, after the reduction.
    """

    @classmethod
    def of(
        cls,
        module: nn.Linear | LinearAct,
        mesh: DeviceMesh,
        *,
        sequence: bool = False,
        overlap: bool = False,
    ) -> RowLinear:
        """Return ``module`` with its inputs sharded.

        Raises:
            ValueError: ranks do not divide the inputs, or there is an activation.
            TypeError: ``module`` is no linear layer.
        """
        self = cls(mesh, sequence=sequence, overlap=overlap)
        op = cls.__name__
        if _activation_of(op, module) != "identity":
            expected = "without an activation: it would act on parts of a sum"
            checks.fail(op, "module", expected, module)
        self.weight = distribute(op, "weight", module.weight, mesh, 1)
        self.bias = distribute(op, "bias", module.bias, mesh, None)
        return self.train(module.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the outputs ``[B, S, H]``, or ``[B, s, H]`` with a sharded sequence."""
        if self.overlap:
            return self.biased(linear_reduce_scatter(input, local(self.weight), self.group))
        return self.biased(self.reduce(self.product(input)))

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum that ``forward`` reduces."""
        return linear_act(input, local(self.weight), activation="identity")


class ParallelMLP(ParallelLayer):
    """A feed-forward layer whose hidden features are sharded over the ranks.

    Made by ``ParallelMLP.of``; one ``fusedops.mlp`` per rank, or two products if ``module`` saves
    what is between them. ``w1`` ``[F, H]`` and ``b1`` are ``Shard(0)``, ``w2`` ``[H, F]`` is
    ``Shard(1)``, ``b2`` is replicated.
    """

    w1: nn.Parameter
    b1: nn.Parameter | None
    w2: nn.Parameter
    b2: nn.Parameter | None
    recompute: bool
    keep_hidden: bool
    tile_tokens: int | None = None
    _bias_name = "b2"

    @classmethod
    def of(
        cls, module: MLP, mesh: DeviceMesh, *, sequence: bool = False, overlap: bool = False
    ) -> ParallelMLP:
        """Return ``module`` with its hidden features sharded.

        ``overlap`` replaces one ``fusedops.mlp`` by two products: the hidden features are saved as
        well, the gathered input is not.

        Raises:
            ValueError: ranks do not divide the hidden features, or ``module`` recomputes or has
            ``tile_tokens`` with ``overlap``.
            TypeError: ``module`` is no ``fusedops.nn.MLP``.
        """
        self = cls(mesh, sequence=sequence, overlap=overlap)
        op = cls.__name__
        check_type(op, module, MLP)
        if overlap and module.recompute:
            checks.fail(op, "overlap", "False where the module recomputes", overlap)
        self.activation, self.recompute = module.activation, module.recompute
        self.keep_hidden = module.keep_hidden
        self.tile_tokens = module.tile_tokens
        check_tiles(self)
        for name, dim in (("w1", 0), ("b1", 0), ("w2", 1), ("b2", None)):
            setattr(self, name, distribute(op, name, getattr(module, name), mesh, dim))
        return self.train(module.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape and sharding of ``input``."""
        check_tiles(self)
        if self.overlap:
            first = local(self.w1), local(self.b1)
            hidden = all_gather_product(
                "linear_act", input, self.group, *first, activation=self.activation
            )
            return self.biased(linear_reduce_scatter(hidden, local(self.w2), self.group))
        x = to_tensor_parallel(input, self.group, sequence=self.sequence)
        return self.biased(self.reduce(self.product(self.inner(x))))

    def inner(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input of ``product``: hidden features, if they are saved, else ``input``."""
        if not self._in_two:
            return input
        return linear_act(input, local(self.w1), local(self.b1), activation=self.activation)

    def product(self, inner: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum that ``forward`` reduces."""
        w2 = local(self.w2)
        if self._in_two:
            return linear_act(inner, w2, activation="identity")
        w1, b1 = local(self.w1), local(self.b1)
        options: Any = {"recompute": self.recompute, "tile_tokens": self.tile_tokens}
        return mlp(inner, w1, b1, w2, None, activation=self.activation, **options)

    @property
    def _in_two(self) -> bool:
        return self.keep_hidden and not self.recompute and self.tile_tokens is None


class ParallelGatedMLP(ParallelLayer):
    """A gated feed-forward layer whose hidden features are sharded over the ranks.

    Made by ``ParallelGatedMLP.of``. The children ``gate_proj``, ``up_proj`` and ``down_proj`` hold
    the parameters; gate and up are one ``fusedops.linear_glu`` per rank, and with ``tile_tokens``
    all three projections are one op.
    """

    gate_proj: ColumnLinear
    up_proj: ColumnLinear
    down_proj: RowLinear
    tile_tokens: int | None = None

    @classmethod
    def of(
        cls, module: GatedMLP, mesh: DeviceMesh, *, sequence: bool = False, overlap: bool = False
    ) -> ParallelGatedMLP:
        """Return ``module`` with its hidden features sharded.

        Raises:
            ValueError: ranks do not divide the hidden features, or the gate has a bias or
            ``module`` has ``tile_tokens`` with ``overlap``.
            TypeError: ``module`` is no ``fusedops.nn.GatedMLP``.
        """
        self = cls(mesh, sequence=sequence, overlap=overlap)
        check_type(cls.__name__, module, GatedMLP)
        self.tile_tokens = module.tile_tokens
        check_tiles(self)
        if overlap and module.gate_proj.bias is not None:
            checks.fail(cls.__name__, "overlap", "False where the gate has a bias", overlap)
        self.activation = module.activation
        column = partial(ColumnLinear.of, mesh=mesh, sequence=sequence, communicate=False)
        self.gate_proj, self.up_proj = column(module.gate_proj), column(module.up_proj)
        self.down_proj = RowLinear.of(module.down_proj, mesh, sequence=sequence, overlap=overlap)
        return self.train(module.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape and sharding of ``input``."""
        check_tiles(self)
        if self.overlap:
            weights = local(self.gate_proj.weight), local(self.up_proj.weight)
            hidden = all_gather_product(
                "linear_glu", input, self.group, *weights, activation=self.activation
            )
            return self.down_proj(hidden)
        x = to_tensor_parallel(input, self.group, sequence=self.sequence)
        return self.biased(self.reduce(self.product(self.inner(x))))

    def inner(self, input: torch.Tensor) -> torch.Tensor:
        """Return the hidden features of this rank, of the full input; in tiles, ``input``."""
        if self.tile_tokens is not None:
            return input
        gate, up = self.gate_proj, self.up_proj
        if gate.bias is None:
            weights = local(gate.weight), local(up.weight)
            return linear_glu(input, *weights, activation=self.activation)
        return gate(input) * up(input)

    def product(self, inner: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum that ``forward`` reduces."""
        if self.tile_tokens is None:
            return self.down_proj.product(inner)
        layers = self.gate_proj, self.up_proj, self.down_proj
        gate, up, down = (local(layer.weight) for layer in layers)
        options: Any = {"activation": self.activation, "tile_tokens": self.tile_tokens}
        return mlp_tiled(inner, gate, None, down, None, up_weight=up, **options)

    def biased(self, reduced: torch.Tensor) -> torch.Tensor:
        """Add the bias of ``down_proj``."""
        return self.down_proj.biased(reduced)


def check_tiles(layer: ParallelMLP | ParallelGatedMLP) -> None:
    """Raise where ``tile_tokens``, which may be set later, and ``overlap`` come together.

    Blocks of communication alternate with products of all their tokens.
    """
    if layer.tile_tokens is not None and layer.overlap:
        expected = "None with overlap: parallelize without overlapped communication"
        checks.fail(type(layer).__name__, "tile_tokens", expected, layer.tile_tokens)


def _activation_of(op: str, module: Any) -> str:
    if isinstance(module, LinearAct):
        return module.activation
    check_type(op, module, nn.Linear)
    return "identity"


def check_type(op: str, module: Any, expected: type) -> None:
    """Raise unless ``module`` is an instance of ``expected``."""
    if not isinstance(module, expected):
        name = f"{expected.__module__}.{expected.__qualname__}"
        raise TypeError(f"{op}: module must be a {name}, got {checks.type_name(module)}")

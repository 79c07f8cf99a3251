"""Tensor parallelism: the four communications as autograd nodes, and the layers that use them.

Between a column-parallel and a row-parallel product the features are split over the ranks. Into
that region leads ``enter``, out of it ``leave``; around it activations are whole on every rank, or,
with sequence parallelism, each rank has its part of the sequence:

    node                     forward          backward         used by
    copy_to                  nothing          all-reduce       enter
    reduce_from              all-reduce       nothing          leave
    gather_from_sequence     all-gather       reduce-scatter   enter, sequence parallel
    scatter_to_sequence      reduce-scatter   all-gather       leave, sequence parallel

A layer is made from a plain one by ``of``: names and ``state_dict`` keys stay, parameters become
DTensors on the mesh, and the forward works on their local parts. Nothing here knows a model.

Shape suffixes: B batch, S sequence, s its part here, H hidden size, F hidden features, f those
here.

Reference: Shoeybi et al.: Megatron-LM, arXiv:1909.08053; Korthikanti et al.: Reducing Activation
Recomputation in Large Transformer Models, arXiv:2205.05198 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fusedops._core import checks
from fusedops.nn import MLP, GatedMLP, LinearAct
from fusedops.ops import linear_act, linear_glu, mlp
from fusedops.parallel.comm import collectives
from fusedops.parallel.tensor.async_linear import (
    all_gather_glu,
    all_gather_linear,
    linear_reduce_scatter,
)


def copy_to(input: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return ``input``, whole on every rank, for ranks that use it each in its own way.

    Its gradient is the sum of theirs. For an activation that enters the split features, and for a
    parameter that is whole on every rank while what it meets is not.
    """
    return _CopyTo.apply(input, group) if group.size() > 1 else input


def reduce_from(input: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of the ranks' ``input``; the gradient of each is the sum's."""
    return _ReduceFrom.apply(input, group) if group.size() > 1 else input


def gather_from_sequence(
    input: torch.Tensor, group: dist.ProcessGroup, dim: int = -2
) -> torch.Tensor:
    """Return the ranks' parts of a sequence joined; the gradient of a part is summed over ranks."""
    return _GatherFromSequence.apply(input, group, dim) if group.size() > 1 else input


def scatter_to_sequence(
    input: torch.Tensor, group: dist.ProcessGroup, dim: int = -2
) -> torch.Tensor:
    """Return this rank's part of the sum of the ranks' ``input``; gradients are joined."""
    return _ScatterToSequence.apply(input, group, dim) if group.size() > 1 else input


def enter(input: torch.Tensor, group: dist.ProcessGroup, *, sequence: bool) -> torch.Tensor:
    """Lead ``input`` into the region of split features: ``[B, S, H]``, or ``[B, s, H]`` gathered.

    Layers that read one input (query, key and value) share one ``enter``, and its communication.
    """
    return gather_from_sequence(input, group) if sequence else copy_to(input, group)


def leave(partial: torch.Tensor, group: dist.ProcessGroup, *, sequence: bool) -> torch.Tensor:
    """Lead the ranks' partial sums ``[B, S, H]`` out of it: ``[B, S, H]``, or ``[B, s, H]``."""
    return scatter_to_sequence(partial, group) if sequence else reduce_from(partial, group)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return reduce_from(grads[0], ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        summed = input.clone(memory_format=torch.contiguous_format)
        return collectives.all_reduce(summed, group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return copy_to(grads[0], ctx.group), None


class _GatherFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return collectives.all_gather(input, group, dim=dim).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return scatter_to_sequence(grads[0], ctx.group, ctx.dim), None, None


class _ScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return collectives.reduce_scatter(input, group, dim=dim).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gather_from_sequence(grads[0], ctx.group, ctx.dim), None, None


def distribute(
    op: str,
    name: str,
    parameter: Any,
    mesh: DeviceMesh,
    dim: int | None,
    *,
    uneven: bool = False,
) -> Any:
    """Return a parameter that every rank has whole as a DTensor on ``mesh``.

    Args:
        op: who asks, for messages.
        name: of the parameter, for messages.
        parameter: the same on every rank (or on the meta device), or ``None``.
        mesh: of one dim.
        dim: what is split over the ranks; ``None``: it stays whole on each.
        uneven: whether the last rank may have less, but not nothing.

    Raises:
        ValueError: the ranks do not divide the dim.
        TypeError: it is a DTensor already.
    """
    if parameter is None:
        return None
    if isinstance(parameter, DTensor):
        wanted = "a plain parameter: split features before fully_shard"
        raise TypeError(f"{op}: {name} must be {wanted}, got a DTensor")
    part, placement = parameter.detach(), Replicate()
    if dim is not None:
        ranks, size = mesh.size(), parameter.shape[dim]
        parts = part.chunk(ranks, dim)
        if len(parts) < ranks or (size % ranks and not uneven):
            wanted = "enough for" if uneven else "a multiple of"
            checks.fail(op, f"size of dim {dim} of {name}", f"{wanted} the {ranks} ranks", size)
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


def shared(parameter: torch.Tensor, group: dist.ProcessGroup, *, partial: bool) -> torch.Tensor:
    """Return a parameter that is whole on every rank, for the forward.

    Args:
        parameter: the parameter.
        group: the process group.
        partial: whether the ranks' gradients are parts of a sum, because each meets other tokens
            or other features with it; they are added up then. Otherwise all have the whole one.
    """
    return copy_to(local(parameter), group) if partial else local(parameter)


class ParallelLayer(nn.Module):
    """What layers on a mesh have in common.

    Args:
        mesh: the ranks; one dim.
        sequence: whether activations around the layer are split along the sequence.
        overlap: whether the layer communicates block by block beside its products: the same bits.

    Raises:
        ValueError: the mesh has more dims, or there is ``overlap`` without ``sequence``.
        TypeError: it is no mesh, or ``sequence`` or ``overlap`` no bool.
    """

    _once: dict[str, Any] | None = None

    def __init__(self, mesh: DeviceMesh, *, sequence: bool = False, overlap: bool = False) -> None:
        super().__init__()
        op = type(self).__name__
        if not isinstance(mesh, DeviceMesh):
            got = checks.type_name(mesh)
            raise TypeError(f"{op}: mesh must be a torch.distributed.DeviceMesh, got {got}")
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
    def held(self) -> Iterator[None]:
        """Share parameters once for all calls inside: one communication of their gradients."""
        self._once = {}
        try:
            yield
        finally:
            self._once = None

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns; inside of ``held`` what it returned the first time."""
        if self._once is None:
            return make()
        if name not in self._once:
            self._once[name] = make()
        return self._once[name]

    def extra_repr(self) -> str:
        """Return the number of ranks, and whether the sequence is split."""
        return f"ranks={self.mesh.size()}, sequence={self.sequence}, overlap={self.overlap}"


class ColumnLinear(ParallelLayer):
    """A linear layer whose outputs are split over the ranks: ``[B, S, H] -> [B, S, f]``.

    Made by ``ColumnLinear.of``. ``weight`` ``[F, H]`` and ``bias`` ``[F]`` are ``Shard(0)``, and an
    activation runs in the product as in ``fusedops.linear_act``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    activation: str
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
        """Return ``module`` with its outputs split.

        Args:
            module: has the same parameters on every rank. Hooks stay behind.
            mesh: the ranks.
            sequence: whether the input is split along the sequence.
            overlap: whether it is gathered block by block beside the product.
            communicate: ``False`` where the input comes from an ``enter`` that layers share.
            heads: how many blocks the outputs fall into that must stay whole (key and value heads).
                Fewer than ranks: several ranks have the same head, the parameters stay whole on
                each and their gradients are added up.

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
                wanted = f"a multiple or a divisor of the {ranks} ranks of the mesh"
                checks.fail(op, "heads", wanted, heads)
            self.repeats, dim = ranks // heads, None
        self.weight = distribute(op, "weight", module.weight, mesh, dim)
        self.bias = distribute(op, "bias", module.bias, mesh, dim)
        return self.train(module.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs ``[B, S, f]`` of the whole sequence."""
        weight, bias = self.once("parts", lambda: [self._part(self.weight), self._part(self.bias)])
        if self.overlap and self.communicate:
            return all_gather_linear(input, weight, self.group, bias, activation=self.activation)
        if self.communicate:
            input = enter(input, self.group, sequence=self.sequence)
        return linear_act(input, weight, bias, activation=self.activation)

    def _part(self, parameter: Any) -> Any:
        """Return the rows of a parameter that make this rank's outputs."""
        if parameter is None:
            return None
        if self.repeats == 1:
            return local(parameter)
        whole = shared(parameter, self.group, partial=True)
        heads = self.mesh.size() // self.repeats
        return whole.chunk(heads)[self.mesh.get_local_rank() // self.repeats]


class RowLinear(ParallelLayer):
    """A linear layer whose inputs are split over the ranks: ``[B, S, f] -> [B, S, H]``.

    Made by ``RowLinear.of``. ``weight`` ``[H, F]`` is ``Shard(1)``; ``bias`` is whole and added
    once, after the reduction.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    @classmethod
    def of(
        cls,
        module: nn.Linear | LinearAct,
        mesh: DeviceMesh,
        *,
        sequence: bool = False,
        overlap: bool = False,
    ) -> RowLinear:
        """Return ``module`` with its inputs split.

        Args:
            module: has the same parameters on every rank. Hooks stay behind.
            mesh: the ranks.
            sequence: whether the output is split along the sequence.
            overlap: whether it is reduced block by block beside the product.

        Raises:
            ValueError: ranks do not divide the inputs, or there is an activation.
            TypeError: ``module`` is no linear layer.
        """
        self = cls(mesh, sequence=sequence, overlap=overlap)
        op = cls.__name__
        if _activation_of(op, module) != "identity":
            wanted = "without an activation: it would act on parts of a sum"
            checks.fail(op, "module", wanted, module)
        self.weight = distribute(op, "weight", module.weight, mesh, 1)
        self.bias = distribute(op, "bias", module.bias, mesh, None)
        return self.train(module.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the outputs ``[B, S, H]``, or ``[B, s, H]`` with a split sequence."""
        return _row_product(input, self.weight, self.bias, self)

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum that ``forward`` reduces."""
        return linear_act(input, local(self.weight), activation="identity")

    def biased(self, reduced: torch.Tensor) -> torch.Tensor:
        """Return the output, of the reduced sum."""
        return _biased(reduced, self.bias, self)


class ParallelMLP(ParallelLayer):
    """A feed-forward layer whose hidden features are split over the ranks.

    Made by ``ParallelMLP.of``; runs as one ``fusedops.mlp`` per rank, or as
    two products where ``module`` keeps what is between them. ``w1`` ``[F, H]`` and ``b1``
    are ``Shard(0)``, ``w2`` ``[H, F]`` is ``Shard(1)``, ``b2`` is whole.
    """

    w1: nn.Parameter
    b1: nn.Parameter | None
    w2: nn.Parameter
    b2: nn.Parameter | None
    activation: str
    recompute: bool
    keep_hidden: bool

    @classmethod
    def of(
        cls, module: MLP, mesh: DeviceMesh, *, sequence: bool = False, overlap: bool = False
    ) -> ParallelMLP:
        """Return ``module`` with its hidden features split.

        Args:
            module: has the same parameters on every rank. Hooks stay behind.
            mesh: the ranks.
            sequence: whether input and output are split along the sequence.
            overlap: whether they are communicated block by block, beside two products instead of
                one ``fusedops.mlp``: the hidden layer is kept as well, the whole input is not.

        Raises:
            ValueError: ranks do not divide the hidden features, or ``module`` recomputes and
                ``overlap`` is asked for.
            TypeError: ``module`` is no ``fusedops.nn.MLP``.
        """
        self = cls(mesh, sequence=sequence, overlap=overlap)
        op = cls.__name__
        check_type(op, module, MLP)
        if overlap and module.recompute:
            checks.fail(op, "overlap", "False where the module recomputes", overlap)
        self.activation, self.recompute = module.activation, module.recompute
        self.keep_hidden = module.keep_hidden
        self.w1 = distribute(op, "w1", module.w1, mesh, 0)
        self.b1 = distribute(op, "b1", module.b1, mesh, 0)
        self.w2 = distribute(op, "w2", module.w2, mesh, 1)
        self.b2 = distribute(op, "b2", module.b2, mesh, None)
        return self.train(module.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``input``, split likewise."""
        if self.overlap:
            w1, b1 = local(self.w1), local(self.b1)
            hidden = all_gather_linear(input, w1, self.group, b1, activation=self.activation)
            return _row_product(hidden, self.w2, self.b2, self)
        x = enter(input, self.group, sequence=self.sequence)
        return _finish(self.product(self.inner(x)), self.b2, self)

    def inner(self, input: torch.Tensor) -> torch.Tensor:
        """Return what ``product`` takes: the hidden layer, if it is kept, of the whole input."""
        if not self._in_two:
            return input
        return linear_act(input, local(self.w1), local(self.b1), activation=self.activation)

    def product(self, inner: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum that ``forward`` reduces."""
        w2 = local(self.w2)
        if self._in_two:
            return linear_act(inner, w2, activation="identity")
        w1, b1 = local(self.w1), local(self.b1)
        return mlp(inner, w1, b1, w2, None, activation=self.activation, recompute=self.recompute)

    def biased(self, reduced: torch.Tensor) -> torch.Tensor:
        """Return the output, of the reduced sum."""
        return _biased(reduced, self.b2, self)

    @property
    def _in_two(self) -> bool:
        return self.keep_hidden and not self.recompute


class ParallelGatedMLP(ParallelLayer):
    """A gated feed-forward layer whose hidden features are split over the ranks.

    Made by ``ParallelGatedMLP.of``. The children ``gate_proj``, ``up_proj`` and ``down_proj`` hold
    the parameters; gate and up are one ``fusedops.linear_glu`` per rank.
    """

    gate_proj: ColumnLinear
    up_proj: ColumnLinear
    down_proj: RowLinear
    activation: str

    @classmethod
    def of(
        cls, module: GatedMLP, mesh: DeviceMesh, *, sequence: bool = False, overlap: bool = False
    ) -> ParallelGatedMLP:
        """Return ``module`` with its hidden features split; arguments as of ``ParallelMLP.of``."""
        self = cls(mesh, sequence=sequence, overlap=overlap)
        check_type(cls.__name__, module, GatedMLP)
        if overlap and module.gate_proj.bias is not None:
            checks.fail(cls.__name__, "overlap", "False where the gate has a bias", overlap)
        self.activation = module.activation

        def column(projection: LinearAct) -> ColumnLinear:
            return ColumnLinear.of(projection, mesh, sequence=sequence, communicate=False)

        self.gate_proj, self.up_proj = column(module.gate_proj), column(module.up_proj)
        self.down_proj = RowLinear.of(module.down_proj, mesh, sequence=sequence, overlap=overlap)
        return self.train(module.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``input``, split likewise."""
        if self.overlap:
            weights = local(self.gate_proj.weight), local(self.up_proj.weight)
            hidden = all_gather_glu(input, *weights, self.group, activation=self.activation)
            return self.down_proj(hidden)
        return self.down_proj(self.inner(enter(input, self.group, sequence=self.sequence)))

    def inner(self, input: torch.Tensor) -> torch.Tensor:
        """Return the hidden features here, of the whole input."""
        gate, up = self.gate_proj, self.up_proj
        if gate.bias is None:
            weights = local(gate.weight), local(up.weight)
            return linear_glu(input, *weights, activation=self.activation)
        return gate(input) * up(input)

    def product(self, inner: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum that ``forward`` reduces."""
        return self.down_proj.product(inner)

    def biased(self, reduced: torch.Tensor) -> torch.Tensor:
        """Return the output, of the reduced sum."""
        return self.down_proj.biased(reduced)


def _row_product(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: ParallelLayer
) -> torch.Tensor:
    """Multiply by rows that are split, reduce, and add the bias."""
    if layer.overlap:
        return _biased(linear_reduce_scatter(input, local(weight), layer.group), bias, layer)
    return _finish(linear_act(input, local(weight), activation="identity"), bias, layer)


def _finish(partial: torch.Tensor, bias: torch.Tensor | None, layer: ParallelLayer) -> torch.Tensor:
    """Reduce a row-parallel product and add its bias."""
    return _biased(leave(partial, layer.group, sequence=layer.sequence), bias, layer)


def _biased(output: torch.Tensor, bias: torch.Tensor | None, layer: ParallelLayer) -> torch.Tensor:
    """Add a bias, once: where the sequence is split each rank adds it to its own tokens."""
    if bias is None:
        return output
    whole = layer.once("bias", lambda: shared(bias, layer.group, partial=layer.sequence))
    return output + whole.to(output.dtype)


def _activation_of(op: str, module: Any) -> str:
    if isinstance(module, LinearAct):
        return module.activation
    check_type(op, module, nn.Linear)
    return "identity"


def check_type(op: str, module: Any, wanted: type) -> None:
    """Raise unless ``module``, of which a layer is to be made, is a ``wanted``."""
    if not isinstance(module, wanted):
        name = f"{wanted.__module__}.{wanted.__qualname__}"
        raise TypeError(f"{op}: module must be a {name}, got {checks.type_name(module)}")

"""Products beside communication: a gather before one, or a reduce-scatter after, block by block.

With a split sequence a column-parallel product waits for an all-gather and a reduce-scatter waits
for a row-parallel product. Here each is cut into the blocks of the ranks: while a block is
multiplied the next one comes, or the one before leaves.

    all_gather_linear     own block first; block k comes while block k - 1 is multiplied
    linear_reduce_scatter the others' blocks first; each leaves while the next is multiplied

Backward each is the other, for the gradient of the input; the gradient of a weight is one product
over all tokens, for which the blocks have come by then (``all_gather_linear`` keeps its own block
only, and gathers again). Rows of a product do not depend on other rows and sums over ranks are
those of ``ordered_sum``, so that results are the bits of ``gather_from_sequence`` and
``scatter_to_sequence`` with a whole product, and so are the bytes sent.

Reference: Wang et al.: Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models, ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fusedops._core import checks, dtypes
from fusedops._core.activation import ACTIVATIONS
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import Pending, computing

_DIM = -2  # the sequence


def all_gather_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "identity",
) -> torch.Tensor:
    """Compute ``fusedops.linear_act`` of the ranks' parts of a sequence, joined.

    Args:
        input: ``[..., s, H]``, this rank's part.
        weight: ``[f, H]``, local.
        group: the process group.
        bias: ``[f]``, local.
        activation: as there.

    Returns:
        ``[..., S, f]``, all tokens.

    Raises:
        ValueError: a shape does not fit, or ``activation`` is unknown.
    """
    checks.choice("all_gather_linear", "activation", activation, ACTIVATIONS)
    return _GatherProduct.apply("linear_act", group, activation, *_lower(input, weight, bias))


def all_gather_glu(
    input: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    activation: str = "silu",
) -> torch.Tensor:
    """Compute ``fusedops.linear_glu`` of the ranks' parts of a sequence, joined.

    Args:
        input: ``[..., s, H]``, this rank's part.
        gate_weight: ``[f, H]``, local.
        up_weight: ``[f, H]``, local.
        group: the process group.
        activation: as there.

    Returns:
        ``[..., S, f]``, all tokens.

    Raises:
        ValueError: a shape does not fit, or ``activation`` is unknown.
    """
    checks.choice("all_gather_glu", "activation", activation, ACTIVATIONS)
    given = _lower(input, gate_weight, up_weight)
    return _GatherProduct.apply("linear_glu", group, activation, *given)


def linear_reduce_scatter(
    input: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Compute this rank's part of the sum over the ranks of ``input @ weight.T``.

    Args:
        input: ``[..., S, f]``, all tokens.
        weight: ``[H, f]``, local.
        group: the process group.

    Returns:
        ``[..., s, H]``, this rank's part of the sequence.

    Raises:
        ValueError: a shape does not fit, or the group does not divide the sequence.
    """
    collectives.check_divides("linear_reduce_scatter", input, _DIM, group.size())
    return _ProductScatter.apply(group, *_lower(input, weight))


class _GatherProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: str, group: dist.ProcessGroup, activation: str, *tensors: Any
    ) -> torch.Tensor:
        part, *parameters = tensors
        keep = any(ctx.needs_input_grad)
        ranks = group.size()
        results: list[Any] = [None] * ranks
        for rank, block in _arriving(part, group):
            with computing(f"block {rank}"):
                results[rank] = _op(op)(block, *parameters, activation, keep)
        output, *kept = (_joined(each) for each in zip(*results, strict=True))
        ctx.op, ctx.group, ctx.activation, ctx.keep = op, group, activation, keep
        ctx.save_for_backward(part, *parameters, *kept)
        ctx.parameters = len(parameters)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, group = grads[0], ctx.group
        part, *saved = ctx.saved_tensors
        parameters, kept = saved[: ctx.parameters], saved[ctx.parameters :]
        numbers = (ctx.activation, ctx.keep)
        _, _, _, wants_input, *wanted = ctx.needs_input_grad
        none = [False] * len(wanted)
        backward = _op(f"{ctx.op}_backward")
        again = None
        if any(wanted):
            again = collectives.all_gather(part, group, dim=_DIM, label="input comes again")
        grad_parameters: list[Any] = [None] * len(wanted)
        leaving = None
        if wants_input:
            leaving = _Leaving(group)
            for rank in leaving.order:
                block, z = _block(grad, rank, group), [_block(each, rank, group) for each in kept]
                with computing(f"gradient of block {rank}"):
                    result = backward(block, part, *parameters, *z, *numbers, [True, *none])[0]
                leaving.send(rank, result)
        if again is not None:
            whole = again.wait()
            with computing("gradients of the parameters"):
                _, *grad_parameters = backward(
                    grad, whole, *parameters, *kept, *numbers, [False, *wanted]
                )
        grad_input = leaving.total() if leaving is not None else None
        return None, None, None, grad_input, *grad_parameters


class _ProductScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, input: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(input, weight)
        leaving = _Leaving(group)
        for rank in leaving.order:
            block = _block(input, rank, group)
            with computing(f"block {rank}"):
                result = _op("linear_act")(block, weight, None, "identity", False)[0]
            leaving.send(rank, result)
        return leaving.total()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        input, weight = ctx.saved_tensors
        group, (_, wants_input, wants_weight) = ctx.group, ctx.needs_input_grad
        backward, none = _op("linear_act_backward"), input.new_empty(0)
        results: list[Any] = [None] * group.size()
        blocks: list[Any] = [None] * group.size()
        for rank, grad in _arriving(grads[0], group):
            blocks[rank] = grad
            if wants_input:
                with computing(f"gradient of block {rank}"):
                    here = (grad, _block(input, rank, group), weight, None, none, "identity", False)
                    results[rank] = backward(*here, [True, False, False])[0]
        grad_weight = None
        if wants_weight:
            with computing("gradient of the weight"):
                here = (_joined(blocks), input, weight, None, none, "identity", False)
                grad_weight = backward(*here, [False, True, False])[1]
        return None, _joined(results) if wants_input else None, grad_weight


class _Gather:
    """The ranks' blocks on their way here, one message under way at a time.

    Step k receives the block of the rank k behind, and sends ours to the rank k ahead.
    """

    def __init__(self, part: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._part, self._group = part.contiguous(), group
        self._step = 0
        self._next = self._start()

    def _start(self) -> tuple[int, Pending] | None:
        self._step += 1
        rank, ranks = self._group.rank(), self._group.size()
        if self._step >= ranks:
            return None
        source = (rank - self._step) % ranks
        label = f"block {source} comes"
        return source, collectives.shift(self._part, self._group, by=self._step, label=label)

    def others(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield rank and block of each other rank; the next is under way meanwhile."""
        while self._next is not None:
            rank, pending = self._next
            block = pending.wait()
            self._next = self._start()
            yield rank, block


def _arriving(part: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield rank and block of every rank, our own first."""
    gather = _Gather(part, group)
    yield group.rank(), part
    yield from gather.others()


class _Leaving:
    """Blocks of partial sums on their way to their ranks, and those that come here."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: dict[int, Pending] = {}
        self._own: torch.Tensor | None = None
        rank, ranks = group.rank(), group.size()
        self.order = [(rank + step) % ranks for step in (*range(1, ranks), 0)]

    def send(self, rank: int, block: torch.Tensor) -> None:
        """Send the block of a rank; to be called in ``order``, our own last."""
        here, ranks = self._group.rank(), self._group.size()
        if rank == here:
            self._own = block
            return
        source = (2 * here - rank) % ranks  # as far behind as `rank` is ahead
        self._pending[source] = collectives.shift(
            block, self._group, by=(rank - here) % ranks, label=f"block {rank} leaves"
        )

    def total(self) -> torch.Tensor:
        """Return the ordered sum of what came and our own, rounded once."""
        assert self._own is not None
        blocks = {rank: pending.wait() for rank, pending in self._pending.items()}
        blocks[self._group.rank()] = self._own
        return collectives.ordered_sum([blocks[rank] for rank in sorted(blocks)])


def _block(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tokens of a rank; what was not kept (one dim, empty) as it is."""
    return tensor if tensor.dim() == 1 else tensor.chunk(group.size(), _DIM)[rank]


def _joined(blocks: Any) -> torch.Tensor:
    """Return blocks joined along the sequence; of what was not kept, one."""
    return blocks[0] if blocks[0].dim() == 1 else torch.cat(tuple(blocks), _DIM)


def _op(name: str) -> Any:
    return getattr(torch.ops.fusedops, name)


def _lower(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return the tensors as autocast would hand them to a linear layer."""
    first = tensors[0]
    assert first is not None
    lower = dtypes.autocast_dtype(first.device)
    if lower is None or first.dtype == torch.float64:
        return list(tensors)
    return [None if each is None else each.to(lower) for each in tensors]

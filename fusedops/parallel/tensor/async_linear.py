"""Products that overlap communication: a gather before one, or a reduce-scatter after, by blocks.

With a sharded sequence a column-parallel product waits for an all-gather and a reduce-scatter waits
for a row-parallel product. Here each is cut into the blocks of the ranks: while a block is
multiplied the next one arrives, or the previous one is sent.

    all_gather_product    own block first; block k arrives while block k - 1 is multiplied
    linear_reduce_scatter the others' blocks first; each is sent while the next is multiplied

The backward of each is the other, for the gradient of the input; the gradient of a weight is one
product over all tokens, for which the blocks have arrived by then (``all_gather_product`` saves its
own block only, and gathers again). Rows of a product do not depend on other rows and sums over
ranks are those of ``ordered_sum``, so bits and bytes sent are those of ``gather_from_sequence`` and
``scatter_to_sequence`` with an undivided product.

Reference: Wang et al.: Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models, ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fusedops._core import checks, dtypes
from fusedops._core.activation import ACTIVATIONS
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import Pending, computing

_DIM = -2  # the sequence


def all_gather_product(
    op: str,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    *parameters: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """Compute a product of the ranks' parts ``[..., s, H]`` of a sequence, joined.

    ``op`` is ``"linear_act"``, of a weight ``[f, H]`` and a bias ``[f]`` or ``None``, or
    ``"linear_glu"``, of two weights. Parameters are local. Returns ``[..., S, f]``, all tokens.

    Raises:
        ValueError: a shape does not fit, or ``activation`` is unknown.
    """
    checks.choice("all_gather_product", "activation", activation, ACTIVATIONS)
    return _GatherProduct.apply(op, group, activation, *lowered(input, *parameters))


def linear_reduce_scatter(
    input: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Compute this rank's tokens of the sum over the ranks of ``input @ weight.T``.

    ``input`` is ``[..., S, f]``, all tokens, and ``weight`` ``[H, f]`` local. Returns ``[..., s,
    H]``.

    Raises:
        ValueError: a shape does not fit, or the group does not divide the sequence.
    """
    collectives.check_divides("linear_reduce_scatter", input, _DIM, group.size())
    return _ProductScatter.apply(group, *lowered(input, weight))


class _GatherProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: str, group: dist.ProcessGroup, activation: str, *tensors: Any
    ) -> torch.Tensor:
        part, *parameters = tensors
        keep = any(ctx.needs_input_grad)
        limit = (0.0,) if op == "linear_glu" else ()
        options = (activation, *limit, keep)

        def product(rank: int, block: torch.Tensor) -> Any:
            return _op(op)(block, *parameters, *options)

        results = _arriving(part, group, "block", product)
        output, *saved = (_joined(blocks) for blocks in zip(*results, strict=True))
        ctx.op, ctx.group, ctx.options = op, group, options
        ctx.save_for_backward(part, *parameters, *saved)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _, _, _, needs_input, *needed = ctx.needs_input_grad
        group, (part, *tensors) = ctx.group, ctx.saved_tensors
        parameters, saved = tensors[: len(needed)], tensors[len(needed) :]
        backward = _op(f"{ctx.op}_backward")
        again = leaving = None
        if any(needed):
            again = collectives.all_gather(part, group, dim=_DIM, label="input comes again")
        if needs_input:

            def product(rank: int) -> torch.Tensor:
                block, *z = (_block(tensor, rank, group) for tensor in (grad, *saved))
                mask = [True, *(False for _ in needed)]
                return backward(block, part, *parameters, *z, *ctx.options, mask)[0]

            leaving = _leaving(group, "gradient of block", product)
        grads: list[Any] = [None] * len(needed)
        if again is not None:
            input = again.wait()
            with computing("gradients of the parameters"):
                mask = [False, *needed]
                _, *grads = backward(grad, input, *parameters, *saved, *ctx.options, mask)
        return None, None, None, None if leaving is None else leaving.wait(), *grads


class _ProductScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, input: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(input, weight)

        def product(rank: int) -> torch.Tensor:
            block = _block(input, rank, group)
            return _op("linear_act")(block, weight, None, "identity", False)[0]

        return _leaving(group, "block", product).wait()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        group, (_, needs_input, needs_weight) = ctx.group, ctx.needs_input_grad
        options = (weight, None, input.new_empty(0), "identity", False)
        backward = _op("linear_act_backward")

        def product(rank: int, block: torch.Tensor) -> Any:
            if not needs_input:
                return block, None
            mask = [True, False, False]
            return block, backward(block, _block(input, rank, group), *options, mask)[0]

        results = _arriving(grad, group, "gradient of block", product)
        blocks, grads = zip(*results, strict=True)
        grad_weight = None
        if needs_weight:
            with computing("gradient of the weight"):
                mask = [False, True, False]
                grad_weight = backward(_joined(blocks), input, *options, mask)[1]
        return None, _joined(grads) if needs_input else None, grad_weight


def _arriving(
    part: torch.Tensor,
    group: dist.ProcessGroup,
    label: str,
    compute: Callable[[int, torch.Tensor], Any],
) -> list[Any]:
    """Compute with rank and block of every rank, our own first; the next one is under way.

    Step k receives the block of the rank k behind, and sends ours to the rank k ahead.
    """
    sent, block, own, ranks = part.contiguous(), part, group.rank(), group.size()
    results: list[Any] = [None] * ranks
    for step in range(ranks):
        rank, following = (own - step) % ranks, (own - step - 1) % ranks
        if step + 1 < ranks:
            arriving = f"block {following} comes"
            pending = collectives.shift(sent, group, by=step + 1, label=arriving)
        with computing(f"{label} {rank}"):
            results[rank] = compute(rank, block)
        if step + 1 < ranks:
            block = pending.wait()
    return results


def _leaving(
    group: dist.ProcessGroup, label: str, product: Callable[[int], torch.Tensor]
) -> Pending:
    """Send each rank its block, a partial sum that ``product`` computes, our own last.

    The result is the ordered sum of the blocks that arrive here and of our own, rounded once.
    """
    own, ranks = group.rank(), group.size()
    arriving: dict[int, Pending] = {}
    for step in range(1, ranks + 1):
        rank = (own + step) % ranks
        with computing(f"{label} {rank}"):
            block = product(rank)
        if step < ranks:
            leaving = f"block {rank} leaves"
            pending = collectives.shift(block, group, by=step, label=leaving)
            arriving[(own - step) % ranks] = pending

    def finish() -> torch.Tensor:
        blocks = {source: pending.wait() for source, pending in arriving.items()} | {own: block}
        return collectives.ordered_sum([blocks[source] for source in sorted(blocks)])

    return Pending(finish)


def _block(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tokens of a rank; a tensor that was not saved (one dim, empty) unchanged."""
    return tensor if tensor.dim() == 1 else tensor.chunk(group.size(), _DIM)[rank]


def _joined(blocks: Any) -> torch.Tensor:
    """Return blocks joined along the sequence; the first of tensors that were not saved."""
    return blocks[0] if blocks[0].dim() == 1 else torch.cat(tuple(blocks), _DIM)


def _op(name: str) -> Any:
    return getattr(torch.ops.fusedops, name)


def lowered(input: torch.Tensor, *others: torch.Tensor | None) -> list[Any]:
    """Return the tensors as autocast passes them to a linear layer."""
    lower = dtypes.autocast_dtype(input.device)
    if lower is None or input.dtype == torch.float64:
        return [input, *others]
    return [None if tensor is None else tensor.to(lower) for tensor in (input, *others)]

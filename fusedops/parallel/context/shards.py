"""Sequences sharded over a context-parallel group, and gathered."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fusedops._core import checks
from fusedops.parallel.context._checks import check_group, ends_of
from fusedops.parallel.context.layout import SequenceLayout, layout_of, order, order_back


def shard_sequence(
    tensor: Tensor,
    group: dist.ProcessGroup,
    dim: int = 1,
    *,
    balance: str = "zigzag",
    cu_seqlens: Any = None,
) -> Tensor:
    """Return this rank's tokens of a replicated tensor.

    Everything that belongs to a token is sharded alike: ids, labels, positions
    (``shard_sequence(torch.arange(S), group, 0)`` are the positions of this rank's tokens).

    Args:
        tensor: of any dtype. Dim 0 is the batch, unless ``dim`` is 0.
        group: of the ``n`` ranks.
        dim: that of the sequence, of ``S`` tokens; ``n`` divides ``S``.
        balance: which tokens a rank has. ``"zigzag"``: of ``2 n`` parts of each row that of the
            rank's number and its mirror image, so that causal attention costs all ranks the same;
            ``"document"``: the same of each document; ``"contiguous"``: one part in ``n``.
        cu_seqlens: ``[documents + 1]``, where documents end, counted through the batch, from 0 on;
            only ``"document"`` reads it.

    Returns:
        ``tensor`` with ``S / n`` tokens in ``dim``, in rising order. Differentiable.

    Raises:
        ValueError: the sequence cannot be sharded so.
        TypeError: an argument is no tensor, or no group.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from fusedops.parallel import shard_sequence
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shard_sequence(torch.tensor([[3, 1, 4, 1]]), dist.group.WORLD)
        tensor([[3, 1, 4, 1]])
        >>> dist.destroy_process_group()
    """
    layout, dim = _layout("shard_sequence", tensor, dim, group, balance, cu_seqlens)
    share = layout.ends[-1] // layout.ranks
    mine = order(layout, tensor.device)[group.rank() * share :][:share]
    return _parted(_joined(tensor, dim).index_select(0, mine), tensor, dim)


def unshard_sequence(
    tensor: Tensor,
    group: dist.ProcessGroup,
    dim: int = 1,
    *,
    balance: str = "zigzag",
    cu_seqlens: Any = None,
) -> Tensor:
    """Return the tensor of which every rank has a shard: the inverse of ``shard_sequence``.

    Args:
        tensor: the shard, as ``shard_sequence`` returns it.
        group: as there.
        dim: as there.
        balance: as there.
        cu_seqlens: as there.

    Returns:
        ``tensor`` with all ``S`` tokens, the same on every rank. Its gradient is the sum of what
        the ranks do with it.

    Raises:
        ValueError: the layout does not fit.
        TypeError: an argument is no tensor, or no group.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from fusedops.parallel import unshard_sequence
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> unshard_sequence(torch.tensor([[3, 1, 4, 1]]), dist.group.WORLD)
        tensor([[3, 1, 4, 1]])
        >>> dist.destroy_process_group()
    """
    op = "unshard_sequence"
    layout, dim = _layout(op, tensor, dim, group, balance, cu_seqlens, is_shard=True)
    from fusedops.parallel.tensor.layers import communicate  # DTensor: a second to import

    by_rank = communicate("gather_from_sequence", _joined(tensor, dim), group, 0)
    return _parted(by_rank.index_select(0, order_back(layout, tensor.device)), tensor, dim)


def _layout(
    op: str,
    tensor: Any,
    dim: Any,
    group: Any,
    balance: Any,
    cu_seqlens: Any,
    *,
    is_shard: bool = False,
) -> tuple[SequenceLayout, int]:
    """Check the arguments; return the layout of complete sequences and their dim, from 0 on."""
    check_group(op, group)
    checks.tensor(op, "tensor", tensor, floating=False)
    checks.integer(op, "dim", dim)
    if not -tensor.dim() <= dim < tensor.dim():
        checks.fail(op, "dim", f"one of the {tensor.dim()} dims of tensor", dim)
    dim %= tensor.dim()
    rows = 1 if dim == 0 else tensor.shape[0]
    length = tensor.shape[dim] * (group.size() if is_shard else 1)
    ends = ends_of(op, cu_seqlens)
    return layout_of(op, length, group.size(), balance, ends, rows), dim


def _joined(tensor: Tensor, dim: int) -> Tensor:
    """Return the tokens of the batch one after another, in dim 0."""
    return tensor if dim == 0 else tensor.movedim(dim, 1).flatten(0, 1)


def _parted(tokens: Tensor, like: Tensor, dim: int) -> Tensor:
    """Undo ``_joined``."""
    return tokens if dim == 0 else tokens.unflatten(0, (like.shape[0], -1)).movedim(1, dim)

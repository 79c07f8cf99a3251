"""Operators of hybrid models over sequences that are sharded over a group of ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedops._core import checks
from fusedops.kernels._arguments import StateSpaceArguments
from fusedops.ops import causal_conv1d
from fusedops.ops.causal_conv1d import check_arguments as check_convolution
from fusedops.ops.gated_delta_rule import check_arguments as check_delta_rule
from fusedops.ops.selective_state_space import check_arguments as check_state_space
from fusedops.ops.selective_state_space import check_limits
from fusedops.parallel.context import _states
from fusedops.parallel.context._checks import check_group

_DELTA_RULE = _states.define(_states.Operator("gated_delta_rule", 5, 2, 0, (0, 2)))
_STATE_SPACE = _states.define(_states.Operator("selective_state_space", 8, 0, 3, (0, 3)))


def context_causal_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    balance: str = "zigzag",
    activation: str | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Any = None,
    return_state: bool = False,
) -> Any:
    """Apply ``causal_conv1d`` to sequences that are sharded over a group of ``n`` ranks.

    Each part of a sequence gets the last ``width - 1`` inputs of the part before.

    Args:
        input: ``[batch, channels, S / n]``, the tokens of this rank.
        weight: ``[channels, width]``, the same on all ranks.
        bias: ``[channels]``, the same on all ranks.
        group: of the ``n`` ranks.
        balance: as ``shard_sequence`` had it, ``"zigzag"`` or ``"contiguous"``.
        activation: ``None`` or ``"silu"``.
        initial_state: ``[batch, channels, width - 1]``, read on the first rank alone.
        cu_seqlens: ``None``; packed sequences are not supported.
        return_state: also return the last ``width - 1`` inputs of the sequence.

    Returns:
        The output of this rank's tokens; with ``return_state`` also the state, which is ``None``
        except on the rank with the last token: the last rank, with ``"zigzag"`` the first.

    Raises:
        ValueError: as ``causal_conv1d``, or a part has fewer than ``width - 1`` tokens.
        TypeError: as ``causal_conv1d``, or ``group`` is no process group.
        UnsupportedError: ``cu_seqlens`` is given.

    Note:
        Values are those of ``causal_conv1d``. Gradients of ``weight`` and ``bias`` are those of
        this rank's tokens: parts of a sum over ranks. All ranks call it, and its backward.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from fusedops.parallel import context_causal_conv1d
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> input, weight = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[1.0, 10.0]])
        >>> context_causal_conv1d(input, weight, group=dist.group.WORLD)
        tensor([[[10., 21., 32.]]])
        >>> dist.destroy_process_group()
    """
    op = "context_causal_conv1d"
    _check(op, group, balance, cu_seqlens, return_state)
    check_convolution(input, weight, bias, initial_state, None)
    parts, count = _states.parts_of(group, balance, input.shape[2]), weight.shape[1] - 1
    pieces = [input[:, :, rows] for rows in parts.rows]
    if pieces[-1].shape[2] < count:
        expected = f"of {count} or more tokens in each part of the sequence"
        checks.fail(op, "input", expected, pieces[-1].shape[2])
    edges = torch.stack([piece[:, :, piece.shape[2] - count :] for piece in pieces])
    states = list(_states.SHIFT(edges, balance, group.group_name, 1))
    if parts.own[0] == 0 and initial_state is not None:
        # A sum with what arrived, which is 0: the backward of the exchange needs every rank.
        states[0] = states[0] + initial_state
    options = {"activation": activation, "return_state": True}
    results = [
        causal_conv1d(piece, weight, bias, initial_state=state, **options)
        for piece, state in zip(pieces, states, strict=True)
    ]
    # Joined along tokens in the order of memory, so that channels remain contiguous.
    output = torch.cat([result.mT for result, _ in results], 1).mT if results[1:] else results[0][0]
    return _result(output, results[-1][1], parts, return_state)


def context_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    group: dist.ProcessGroup,
    balance: str = "zigzag",
    scale: float | None = None,
    qk_norm: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Any = None,
    return_state: bool = False,
) -> Any:
    """Apply ``gated_delta_rule`` to sequences that are sharded over a group of ``n`` ranks.

    The state after each part of a sequence is the initial state of the next. It is sent in slices
    of the heads, so that the ranks compute different slices at the same time.

    Args:
        query: ``[batch, S / n, key_heads, key_dim]``, the tokens of this rank.
        key: ``[batch, S / n, key_heads, key_dim]``.
        value: ``[batch, S / n, heads, value_dim]``.
        gate: ``[batch, S / n, heads]`` or ``[batch, S / n, heads, key_dim]``.
        beta: ``[batch, S / n, heads]``.
        group: of the ``n`` ranks.
        balance: as ``shard_sequence`` had it, ``"zigzag"`` or ``"contiguous"``.
        scale: as ``gated_delta_rule``.
        qk_norm: as ``gated_delta_rule``.
        initial_state: ``[batch, heads, key_dim, value_dim]``, read on the first rank alone.
        cu_seqlens: ``None``; packed sequences are not supported.
        return_state: also return the state after the last token of the sequence.

    Returns:
        The output of this rank's tokens; with ``return_state`` also the state, which is ``None``
        except on the rank with the last token: the last rank, with ``"zigzag"`` the first.

    Raises:
        ValueError: as ``gated_delta_rule``, or ``balance`` is none of these.
        TypeError: as ``gated_delta_rule``, or ``group`` is no process group.
        UnsupportedError: ``cu_seqlens`` is given, or a second derivative is asked for.

    Note:
        The bits are those of ``gated_delta_rule`` on one process where parts of the sequence are
        whole chunks of it, else the values up to rounding. Saves the arguments and the initial
        states of the parts. All ranks call it, and its backward.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from fusedops.parallel import context_gated_delta_rule
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> key, gate = torch.ones(1, 3, 1, 1), torch.zeros(1, 3, 1)
        >>> context_gated_delta_rule(key, key, key, gate, gate + 0.5, group=dist.group.WORLD)[0, :, 0]
        tensor([[0.5000],
                [0.7500],
                [0.8750]])
        >>> dist.destroy_process_group()
    """
    op = "context_gated_delta_rule"
    _check(op, group, balance, cu_seqlens, return_state)
    checks.flag(op, "qk_norm", qk_norm)
    check_delta_rule(query, key, value, gate, beta, initial_state, None)
    if scale is None:
        scale = max(1, query.shape[3]) ** -0.5
    checks.finite(op, "scale", scale)
    args = query, key, value, gate, beta, initial_state, float(scale), qk_norm
    return _apply(_DELTA_RULE, args, group, balance, return_state)


def context_selective_state_space(
    input: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    group: dist.ProcessGroup,
    balance: str = "zigzag",
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Tensor | None = None,
    cu_seqlens: Any = None,
    return_state: bool = False,
) -> Any:
    """Apply ``selective_state_space`` to sequences that are sharded over a group of ``n`` ranks.

    States are sent as ``context_gated_delta_rule`` sends them.

    Args:
        input: ``[batch, S / n, heads, head_dim]``, the tokens of this rank.
        dt: ``[batch, S / n, heads]``.
        A: ``[heads]``, the same on all ranks.
        B: ``[batch, S / n, groups, state_dim]``.
        C: ``[batch, S / n, groups, state_dim]``.
        group: of the ``n`` ranks.
        balance: as ``shard_sequence`` had it, ``"zigzag"`` or ``"contiguous"``.
        D: ``[heads]``, the same on all ranks.
        z: ``[batch, S / n, heads, head_dim]``.
        dt_bias: ``[heads]``, the same on all ranks.
        dt_softplus: as ``selective_state_space``.
        dt_limit: as ``selective_state_space``.
        initial_state: ``[batch, heads, head_dim, state_dim]``, read on the first rank alone.
        cu_seqlens: ``None``; packed sequences are not supported.
        return_state: also return the state after the last token of the sequence.

    Returns:
        The output of this rank's tokens; with ``return_state`` also the state, which is ``None``
        except on the rank with the last token: the last rank, with ``"zigzag"`` the first.

    Raises:
        ValueError: as ``selective_state_space``, or ``balance`` is none of these.
        TypeError: as ``selective_state_space``, or ``group`` is no process group.
        UnsupportedError: ``cu_seqlens`` is given, or a second derivative is asked for.

    Note:
        The values are those of ``selective_state_space`` on one process up to rounding. Gradients
        of ``A``, ``D`` and ``dt_bias`` are those of this rank's tokens: parts of a sum over ranks.
        All ranks call it, and its backward.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from fusedops.parallel import context_selective_state_space
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x, A = torch.ones(1, 3, 1, 1), torch.zeros(1)
        >>> context_selective_state_space(x, x[..., 0], A, x, x, group=dist.group.WORLD).flatten()
        tensor([1., 2., 3.])
        >>> dist.destroy_process_group()
    """
    op = "context_selective_state_space"
    _check(op, group, balance, cu_seqlens, return_state)
    tensors = input, dt, A, B, C, D, z, dt_bias, initial_state
    checks.flag(op, "dt_softplus", dt_softplus)
    low, high = check_limits(dt_limit)
    check_state_space(StateSpaceArguments(*tensors, None, dt_softplus, low, high))
    args = *tensors, dt_softplus, low, high
    return _apply(_STATE_SPACE, args, group, balance, return_state)


def _check(op: str, group: Any, balance: Any, cu_seqlens: Any, return_state: Any) -> None:
    check_group(op, group)
    checks.choice(op, "balance", balance, ("zigzag", "contiguous"))
    checks.flag(op, "return_state", return_state)
    if cu_seqlens is not None:
        raise checks.UnsupportedError(
            f"{op}: cu_seqlens must be None: packed sequences over several ranks are not supported"
        )


def _apply(
    op: Any, args: tuple[Any, ...], group: dist.ProcessGroup, balance: str, return_state: bool
) -> Any:
    output, state, _ = op(*args, balance, group.group_name)
    return _result(output, state, _states.parts_of(group, balance, 0), return_state)


def _result(output: Tensor, state: Tensor, parts: _states.Parts, return_state: bool) -> Any:
    if not return_state:
        return output
    return output, state if parts.own[-1] == parts.last else None

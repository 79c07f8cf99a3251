"""Operators of hybrid models over sequences that are sharded over a group of ranks.

A sequence has ``n`` parts (contiguous shards) or ``2 n`` (zigzag), and the state after a part is
the initial state of the next. It is linear in the state before the part. Each rank computes its
parts from a state of zeros, and the factor (``transition``) of the state before. The ranks gather
both once; then each knows the states before its parts, and adds what its outputs lack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from fusedops._core import checks, dtypes
from fusedops._core.library import define_exchange
from fusedops.kernels._arguments import StateSpaceArguments
from fusedops.ops import causal_conv1d, gated_delta_rule, selective_state_space
from fusedops.ops.causal_conv1d import check_arguments as check_convolution
from fusedops.ops.gated_delta_rule import check_arguments as check_delta_rule
from fusedops.ops.selective_state_space import check_arguments as check_state_space
from fusedops.ops.selective_state_space import check_limits
from fusedops.parallel.comm import collectives
from fusedops.parallel.context._checks import check_group


class _Part(NamedTuple):
    number: int  # in the sequence
    rows: slice  # its tokens among those of this rank


def _check(op: str, group: Any, balance: Any, cu_seqlens: Any, return_state: Any) -> None:
    check_group(op, group)
    checks.choice(op, "balance", balance, ("zigzag", "contiguous"))
    checks.flag(op, "return_state", return_state)
    if cu_seqlens is not None:
        raise checks.UnsupportedError(
            f"{op}: cu_seqlens must be None: packed sequences over several ranks are not supported"
        )


def _parts(group: dist.ProcessGroup, balance: str, tokens: int) -> list[_Part]:
    """Return the parts of this rank."""
    ranks, rank, middle = group.size(), group.rank(), (tokens + 1) // 2
    if balance == "contiguous" or ranks == 1:
        return [_Part(rank, slice(0, tokens))]
    return [_Part(rank, slice(0, middle)), _Part(2 * ranks - 1 - rank, slice(middle, tokens))]


def _gather(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all parts, ``[parts, ...]``, from those of the parts of this rank."""
    gathered = torch.stack(list(tensors))
    if group.size() > 1:
        gathered = _GATHER(gathered, group.size(), group.group_name, False)
    by_rank = gathered.unflatten(0, (-1, len(tensors)))
    return torch.cat([by_rank[:, 0], *(half.flip(0) for half in by_rank[:, 1:].unbind(1))])


def _exchange(tensor: Tensor, ranks: int, group: str, back: bool) -> Tensor:
    """Join the ranks' tensors along dim 0; ``back``: return this rank's part of their sum."""
    communicate = collectives.reduce_scatter if back else collectives.all_gather
    return communicate(tensor.contiguous(), collectives.group_of(group), label="states").wait()


def _fake(tensor: Tensor, ranks: int, group: str, back: bool) -> Tensor:
    rows = tensor.shape[0] // ranks if back else tensor.shape[0] * ranks
    return tensor.new_empty((rows, *tensor.shape[1:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.names, ctx.back = inputs


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _GATHER(grad, *ctx.names, not ctx.back), None, None, None


_GATHER = define_exchange(
    "context_gather",
    "(Tensor tensor, SymInt ranks, str group, bool back) -> (Tensor received)",
    kernel=_exchange,
    fake=_fake,
    setup_context=_save,
    backward=_gradient,
)


def _before(gathered: Tensor) -> Tensor:
    """Return the state before the first part: zeros, by a sum over no part.

    It depends on what was gathered, so that every rank runs the backward of ``_gather``.
    """
    return gathered[:0].sum(0)


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
        The output of this rank's tokens; with ``return_state`` also the state, on every rank. Its
        gradient is the sum of what the ranks do with it.

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
    parts, count = _parts(group, balance, input.shape[2]), weight.shape[1] - 1
    pieces = [input[:, :, part.rows] for part in parts]
    if pieces[-1].shape[2] < count:
        expected = f"of {count} or more tokens in each part of the sequence"
        checks.fail(op, "input", expected, pieces[-1].shape[2])
    edges = _gather([piece[:, :, piece.shape[2] - count :] for piece in pieces], group)
    outputs = []
    for part, piece in zip(parts, pieces, strict=True):
        state = edges[part.number - 1] if part.number else _before(edges)
        if part.number == 0 and initial_state is not None:
            state = state + initial_state
        outputs.append(
            causal_conv1d(piece, weight, bias, activation=activation, initial_state=state)
        )
    # Joined along tokens in the order of memory, so that channels remain contiguous.
    output = torch.cat([part.mT for part in outputs], 1).mT if outputs[1:] else outputs[0]
    return (output, edges[-1]) if return_state else output


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

    All ranks compute at the same time: the states of their tokens from zeros, together with the
    matrix that multiplies the state of the tokens before. One exchange has both of all ranks.

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
        The output of this rank's tokens; with ``return_state`` also the state, on every rank. Its
        gradient is the sum of what the ranks do with it.

    Raises:
        ValueError: as ``gated_delta_rule``, or ``balance`` is none of these.
        TypeError: as ``gated_delta_rule``, or ``group`` is no process group.
        UnsupportedError: ``cu_seqlens`` is given.

    Note:
        Values are those of ``gated_delta_rule`` on one process up to rounding. The matrices cost as
        much as ``key_dim`` more columns of ``value``; they are gathered and saved in float32
        (float64 for float64). All ranks call it, and its backward.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from fusedops.parallel import context_gated_delta_rule
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> key, gate = torch.ones(1, 3, 1, 1), torch.zeros(1, 3, 1)
        >>> context_gated_delta_rule(*[key] * 3, gate, gate + 0.5, group=dist.group.WORLD).flatten()
        tensor([0.5000, 0.7500, 0.8750])
        >>> dist.destroy_process_group()
    """
    op = "context_gated_delta_rule"
    _check(op, group, balance, cu_seqlens, return_state)
    check_delta_rule(query, key, value, gate, beta, initial_state, None)
    (batch, tokens, heads, width), key_dim = value.shape, key.shape[3]
    parts, wide = _parts(group, balance, tokens), dtypes.statistics_dtype(value.dtype)
    # Columns whose values are 0, from a state that is the identity, are the transition.
    unit = torch.eye(key_dim, dtype=wide, device=value.device).expand(batch, heads, -1, -1)
    zeros = unit.new_zeros(batch, heads, key_dim, width)
    inputs = query, key, functional.pad(value, (0, key_dim)), gate, beta
    options: dict[str, Any] = {"scale": scale, "qk_norm": qk_norm}
    results = []
    for part in parts:
        first = zeros if part.number or initial_state is None else initial_state
        tensors = [tensor[:, part.rows] for tensor in inputs]
        options["initial_state"] = torch.cat([first, unit], 3)
        results.append(gated_delta_rule(*tensors, **options, return_state=True))
    gathered = _gather([state for _, state in results], group)
    states = [_before(gathered[..., :width])]
    for state in gathered:
        states.append(state[..., :width] + state[..., width:] @ states[-1])
    outputs = []
    for part, (result, _) in zip(parts, results, strict=True):
        own, factor = result.to(wide).split([width, key_dim], -1)
        outputs.append(own + torch.einsum("bthk,bhkv->bthv", factor, states[part.number]))
    output = torch.cat(outputs, 1).to(value.dtype)
    return (output, states[-1]) if return_state else output


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

    All ranks compute at the same time: the states of their tokens from zeros, and the decay of the
    state of the tokens before. One exchange each has those of all ranks.

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
        The output of this rank's tokens; with ``return_state`` also the state, on every rank. Its
        gradient is the sum of what the ranks do with it.

    Raises:
        ValueError: as ``selective_state_space``, or ``balance`` is none of these.
        TypeError: as ``selective_state_space``, or ``group`` is no process group.
        UnsupportedError: ``cu_seqlens`` is given.

    Note:
        The values are those of ``selective_state_space`` on one process up to rounding. Gradients
        of ``A``, ``D`` and ``dt_bias`` are those of this rank's tokens: parts of a sum over ranks.
        All ranks call it, and its backward.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from fusedops.parallel import context_selective_state_space
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x, A = torch.ones(1, 3, 1, 1), torch.zeros(1)
        >>> output = context_selective_state_space(x, x[..., 0], A, x, x, group=dist.group.WORLD)
        >>> output.flatten().round(decimals=4)
        tensor([1., 2., 3.])
        >>> dist.destroy_process_group()
    """
    op = "context_selective_state_space"
    _check(op, group, balance, cu_seqlens, return_state)
    tensors = input, dt, A, B, C, D, z, dt_bias, initial_state
    checks.flag(op, "dt_softplus", dt_softplus)
    low, high = check_limits(dt_limit)
    check_state_space(StateSpaceArguments(*tensors, None, dt_softplus, low, high))
    parts, wide = _parts(group, balance, input.shape[1]), dtypes.statistics_dtype(input.dtype)
    step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias
    step = (functional.softplus(step) if dt_softplus else step).clamp(low, high)
    exponents = [step[:, part.rows] * A.to(wide) for part in parts]
    options: dict[str, Any] = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    options["dt_limit"] = dt_limit
    results = []
    for part in parts:
        x, dt_part, *shared = (tensor[:, part.rows] for tensor in (input, dt, B, C))
        options["initial_state"] = None if part.number else initial_state
        results.append(selective_state_space(x, dt_part, A, *shared, **options, return_state=True))
    gathered = _gather([state for _, state in results], group)
    decays = _gather([exponent.sum(1)[..., None, None].exp() for exponent in exponents], group)
    states = [_before(gathered) + _before(decays)]
    for state, decay in zip(gathered, decays, strict=True):
        states.append(state + decay * states[-1])
    outputs = []
    for part, (result, _), exponent in zip(parts, results, exponents, strict=True):
        state = states[part.number].unflatten(1, (B.shape[2], -1))
        rest = torch.einsum("btgn,bghpn->btghp", C[:, part.rows].to(wide), state).flatten(2, 3)
        outputs.append(result.to(wide) + rest * exponent.cumsum(1).exp()[..., None])
    output = torch.cat(outputs, 1)
    if z is not None:
        output = output * functional.silu(z.to(wide))
    output = output.to(input.dtype)
    return (output, states[-1]) if return_state else output

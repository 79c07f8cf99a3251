"""causal_conv1d in Triton: forward, backward, launchers.

A program has a tile of tokens and channels and reads the input once for each weight; all but the
first read meet L1. The backward computes the gradient of the sums for each weight, too, so that it
needs no buffer of the input's size: traffic is x and dy once, dx once. Each program adds up its
part of the gradients of weight and bias, and a second kernel adds the parts in order. Of packed
sequences the launcher makes a table: token -> sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch
from fusedops.kernels._arguments import CausalConv1dArguments, of_backward
from fusedops.kernels._device import act_slope, act_value

_TOKENS, _CHANNELS = 32, 64
_BACKWARD_TOKENS = 16


@triton.jit
def _sequence(row, ends_ptr, tokens, PACKED: tl.constexpr):
    """Return batch entry, first token and end of the sequences ``row``."""
    if PACKED:
        return row * 0, tl.load(ends_ptr + row), tl.load(ends_ptr + row + 1)
    else:
        return row, row * 0, row * 0 + tokens


@triton.jit
def _input(
    x_ptr,
    state_ptr,
    row,
    batch,
    first,
    at,
    col,
    mask,
    num_channels,
    stride_xb,
    stride_xt,
    HAS_STATE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the inputs at tokens ``at``; those before the first one are of the initial state."""
    source = x_ptr + batch * stride_xb + at * stride_xt
    if HAS_STATE:
        kept = state_ptr + (row * (WIDTH - 1) + at - first + WIDTH - 1) * num_channels
        source = tl.where(at < first, kept, source)
    else:
        mask = mask & (at >= first)[:, None]
    return tl.load(source[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _sums(
    x_ptr,
    state_ptr,
    w_ptr,
    bias_ptr,
    row,
    batch,
    first,
    token,
    col,
    mask,
    num_channels,
    stride_xb,
    stride_xt,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    total = tl.zeros(mask.shape, tl.float32)
    inside = col < num_channels
    if HAS_BIAS:
        total += tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(WIDTH):
        x = _input(
            x_ptr,
            state_ptr,
            row,
            batch,
            first,
            token - (WIDTH - 1) + k,
            col,
            mask,
            num_channels,
            stride_xb,
            stride_xt,
            HAS_STATE,
            WIDTH,
        )
        w = tl.load(w_ptr + col * WIDTH + k, mask=inside, other=0.0).to(tl.float32)
        total += x * w[None, :]
    return total


@triton.jit
def _forward_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    state_ptr,
    rows_ptr,
    ends_ptr,
    y_ptr,
    num_tokens,
    tokens,
    num_channels,
    stride_xb,
    stride_xt,
    stride_yb,
    stride_yc,
    stride_yt,
    ACTIVATION: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    here = place < num_tokens
    mask = here[:, None] & (col < num_channels)[None, :]
    row = tl.load(rows_ptr + place, mask=here, other=0) if PACKED else place // tokens
    token = place % tokens
    batch, first, _ = _sequence(row, ends_ptr, tokens, PACKED)
    total = _sums(
        x_ptr,
        state_ptr,
        w_ptr,
        bias_ptr,
        row,
        batch,
        first,
        token,
        col,
        mask,
        num_channels,
        stride_xb,
        stride_xt,
        HAS_BIAS,
        HAS_STATE,
        WIDTH,
    )
    y = act_value(total, ACTIVATION, y_ptr.dtype.element_ty)
    offset = (batch * stride_yb + token * stride_yt)[:, None] + (col.to(tl.int64) * stride_yc)[
        None, :
    ]
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr,
    dstate_ptr,
    x_ptr,
    w_ptr,
    bias_ptr,
    state_ptr,
    rows_ptr,
    ends_ptr,
    dx_ptr,
    dinitial_ptr,
    parts_ptr,
    num_tokens,
    tokens,
    num_channels,
    stride_yb,
    stride_yc,
    stride_yt,
    stride_xb,
    stride_xt,
    stride_dxb,
    stride_dxc,
    stride_dxt,
    ACTIVATION: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    ADDS_STATE: tl.constexpr,
    INITIAL: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Tiles of tokens; with ``INITIAL`` the places before the first token of each sequence."""
    program = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = col < num_channels
    number = tl.arange(0, BLOCK_W)
    sums = tl.zeros((BLOCK_W, BLOCK_C), tl.float32)
    for start in range(program * BLOCK_T, num_tokens, tl.num_programs(1) * BLOCK_T):
        place = start + tl.arange(0, BLOCK_T)
        here = place < num_tokens
        if INITIAL:
            row = place // (WIDTH - 1)
            batch, first, end = _sequence(tl.where(here, row, 0), ends_ptr, tokens, PACKED)
            token = first + place % (WIDTH - 1) - (WIDTH - 1)
        else:
            row = tl.load(rows_ptr + place, mask=here, other=0) if PACKED else place // tokens
            batch, first, end = _sequence(row, ends_ptr, tokens, PACKED)
            token = place % tokens
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        if HAS_OUTPUT:
            for j in range(WIDTH):  # not unrolled: registers would spill
                later = token + j
                valid = (here & (later >= first) & (later < end))[:, None] & inside[None, :]
                offset = (batch * stride_yb + later * stride_yt)[:, None]
                offset += (col.to(tl.int64) * stride_yc)[None, :]
                grad = tl.load(dy_ptr + offset, mask=valid, other=0.0).to(tl.float32)
                if ACTIVATION != "identity":
                    value = _sums(
                        x_ptr,
                        state_ptr,
                        w_ptr,
                        bias_ptr,
                        row,
                        batch,
                        first,
                        later,
                        col,
                        valid,
                        num_channels,
                        stride_xb,
                        stride_xt,
                        HAS_BIAS,
                        HAS_STATE,
                        WIDTH,
                    )
                    grad *= act_slope(value, ACTIVATION, x_ptr.dtype.element_ty)
                w = tl.load(w_ptr + col * WIDTH + WIDTH - 1 - j, mask=inside, other=0.0)
                # What is no token has no gradient, whatever the weight is.
                total += tl.where(valid, grad * w.to(tl.float32)[None, :], 0.0)
                if not INITIAL:  # noqa: SIM102, as one of them is known to the compiler
                    if j == 0:
                        grad = tl.where(valid, grad, 0.0)
                        for k in tl.static_range(WIDTH):
                            x = _input(
                                x_ptr,
                                state_ptr,
                                row,
                                batch,
                                first,
                                token - (WIDTH - 1) + k,
                                col,
                                valid,
                                num_channels,
                                stride_xb,
                                stride_xt,
                                HAS_STATE,
                                WIDTH,
                            )
                            part = tl.sum(tl.where(valid, grad * x, 0.0), axis=0)
                            sums += tl.where((number == k)[:, None], part[None, :], 0.0)
                        part = tl.sum(grad, axis=0)
                        sums += tl.where((number == WIDTH)[:, None], part[None, :], 0.0)
        mask = here[:, None] & inside[None, :]
        if ADDS_STATE:
            kept = token - (end - (WIDTH - 1))
            source = dstate_ptr + (row * (WIDTH - 1) + kept) * num_channels
            source = source[:, None] + col[None, :]
            added = tl.load(source, mask=(kept >= 0)[:, None] & mask, other=0.0)
            total += added.to(tl.float32)
        if INITIAL:
            target = (dinitial_ptr + place * num_channels)[:, None] + col[None, :]
            tl.store(target, total.to(dinitial_ptr.dtype.element_ty), mask=mask)
        else:
            offset = (batch * stride_dxb + token * stride_dxt)[:, None]
            offset += (col.to(tl.int64) * stride_dxc)[None, :]
            tl.store(dx_ptr + offset, total.to(dx_ptr.dtype.element_ty), mask=mask)
    if not INITIAL:
        offset = (program * BLOCK_W + number)[:, None] * num_channels + col[None, :]
        tl.store(parts_ptr + offset, sums, mask=(number >= 0)[:, None] & inside[None, :])


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = CausalConv1dArguments(*args)
    x = call.input
    output = _empty(x)
    if x.numel():
        tensors, sizes, form = _arguments(call)
        grid = (triton.cdiv(sizes[0], _TOKENS), triton.cdiv(sizes[2], _CHANNELS))
        strides = (*tensors[0].stride()[:2], *output.stride())
        with _launch.device_of(x):
            _forward_kernel[grid](*tensors, output, *sizes, *strides, **form, **_launch.FOUR_WARPS)
    return output, _last_inputs(call)


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    (dy, dstate), call, _, mask = of_backward(CausalConv1dArguments, args, incoming=2)
    x, weight = call.input, call.weight
    width = weight.shape[1]
    tensors, sizes, form = _arguments(call)
    dx = _empty(x)
    rows = x.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    dinitial = x.new_empty(rows, width - 1, x.shape[1]) if mask[3] else None
    form |= {"HAS_OUTPUT": dy is not None, "ADDS_STATE": dstate is not None}
    form |= {"BLOCK_W": triton.next_power_of_2(width + 1), "BLOCK_T": _BACKWARD_TOKENS}
    dy = x if dy is None else dy.to(x.dtype)
    incoming = (dy, _launch.dense(None if dstate is None else dstate.to(x.dtype).mT, x))
    strides = (*dy.stride(), *tensors[0].stride()[:2], *dx.stride())
    columns = form["BLOCK_W"] * x.shape[1]
    sums = weight.new_zeros(columns, dtype=torch.float32)
    with _launch.device_of(x):
        if x.numel():
            tiles = triton.cdiv(x.shape[1], _CHANNELS)
            most = triton.cdiv(4 * _launch.num_programs(x.device), tiles)
            programs = min(triton.cdiv(sizes[0], _BACKWARD_TOKENS), most)
            parts = weight.new_empty((programs, columns), dtype=torch.float32)
            targets = (dx, _launch.dense(dinitial, dx), parts)
            _backward_kernel[(tiles, programs)](
                *incoming, *tensors, *targets, *sizes, *strides, INITIAL=False, **form,
                **_launch.FOUR_WARPS,
            )  # fmt: skip
            total = _launch.sum_rows(parts, torch.float32)
            assert total is not None
            sums = total
        if dinitial is not None and dinitial.numel():
            count = rows * (width - 1)
            grid = (triton.cdiv(x.shape[1], _CHANNELS), triton.cdiv(count, _BACKWARD_TOKENS))
            _backward_kernel[grid](
                *incoming, *tensors, dx, dinitial, sums, count, *sizes[1:], *strides, INITIAL=True,
                **form, **_launch.FOUR_WARPS,
            )  # fmt: skip
    table = sums.reshape(form["BLOCK_W"], x.shape[1])
    return (
        dx if mask[0] else None,
        table[:width].t().to(weight.dtype).contiguous() if mask[1] else None,
        table[width].to(call.bias.dtype) if mask[2] and call.bias is not None else None,
        None if dinitial is None else dinitial.mT.contiguous(),
    )


def _empty(input: torch.Tensor) -> torch.Tensor:
    """Return an empty result; the op's docstring says how it lies in memory."""
    if input.stride(1) == 1 and input.stride(2) != 1:
        return input.mT.new_empty(input.mT.shape).mT
    return input.new_empty(input.shape)


def _arguments(
    call: CausalConv1dArguments,
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Return what both kernels take: tensors, sizes, and constants.

    Of input and state the channels are neighbours, so that one load serves both.
    """
    x, ends = call.input, call.cu_seqlens
    batch, channels, tokens = x.shape
    rows = x
    if ends is not None:
        places = torch.arange(tokens, device=x.device)
        rows = torch.searchsorted(ends, places, right=True) - 1
    state = None if call.initial_state is None else call.initial_state.mT
    tensors = [x.mT if x.stride(1) == 1 else x.mT.contiguous(), call.weight.contiguous()]
    tensors += [_launch.dense(tensor, x) for tensor in (call.bias, state)]
    form = {"ACTIVATION": call.activation, "WIDTH": call.weight.shape[1]}
    form |= {"PACKED": ends is not None, "HAS_BIAS": call.bias is not None}
    form |= {"HAS_STATE": call.initial_state is not None}
    form |= {"BLOCK_T": _TOKENS, "BLOCK_C": _CHANNELS}
    sizes = (batch * tokens, tokens, channels)
    return (*tensors, rows, _launch.dense(ends, x)), sizes, form


def _last_inputs(call: CausalConv1dArguments) -> torch.Tensor:
    """Return the last ``width - 1`` inputs of each sequence."""
    x, state, history = call.input, call.initial_state, call.weight.shape[1] - 1
    if call.cu_seqlens is None:
        if state is None:
            state = x.new_zeros(*x.shape[:2], history)
        left = max(0, history - x.shape[2])
        kept = [state[:, :, history - left :], x[:, :, max(0, x.shape[2] - history) :]]
        return torch.cat(kept, 2).contiguous()
    starts, ends = call.cu_seqlens[:-1, None], call.cu_seqlens[1:, None]
    places = ends - history + torch.arange(history, device=x.device)
    # Of an empty tensor nothing can be read; its sequences have no token.
    padded = torch.nn.functional.pad(x[0], (0, 1))
    found = padded[:, places.clamp_min(0)].transpose(0, 1)
    before = torch.zeros_like(found)
    if state is not None:
        index = (places - starts + history).clamp_max(history - 1)
        before = state.gather(2, index[:, None].expand(state.shape))
    return torch.where((places >= starts)[:, None], found, before).contiguous()

"""selective_state_space in Triton: forward, backward, launchers.

A program has some channels of a head in one sequence, keeps their state in registers and goes
through the tokens in chunks (formulae: ``csrc/cpu/recurrence/state_space_chunk.h``): 4 products a
chunk. The backward first stores the states before all chunks, then goes from the last chunk to the
first with the gradient of the state: 10 products. Programs of a group leave their parts of the
gradients of B and C, which a second kernel adds in order. States and sums are float32; a float32
operand of a product in half precision is divided into two numbers, since states add up its errors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from fusedops.kernels import _launch, _scan_steps
from fusedops.kernels._arguments import StateSpaceArguments, of_backward
from fusedops.kernels._device import exp

_CHANNELS, _MOST_STATE = 32, 256


@triton.jit
def _load_rows(ptr, row, stride, col, here, num_cols):
    mask = here[:, None] & (col < num_cols)[None, :]
    return tl.load(ptr + (row * stride)[:, None] + col[None, :], mask=mask, other=0.0)


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr):
    """Return ``total + a @ b``, of which one operand is float32 and the other one of any dtype.

    In half precision the former is divided into two numbers: 16 or 22 of its binary digits count,
    and not 8 or 11.
    """
    if a.dtype == b.dtype:
        return tl.dot(a, b, total, input_precision=PRECISION)
    elif b.dtype == tl.float32:
        high = b.to(a.dtype)
        total = tl.dot(a, high, total, input_precision=PRECISION)
        return tl.dot(a, (b - high.to(tl.float32)).to(a.dtype), total, input_precision=PRECISION)
    else:
        high = a.to(b.dtype)
        total = tl.dot(high, b, total, input_precision=PRECISION)
        return tl.dot((a - high.to(tl.float32)).to(b.dtype), b, total, input_precision=PRECISION)


@triton.jit
def _decays(step, rate, here, BLOCK_T: tl.constexpr):
    """Return ``total``, its last element, and the decays between tokens, 0 for later ones."""
    total = tl.cumsum(tl.where(here, step * rate, 0.0), axis=0)
    number = tl.arange(0, BLOCK_T)
    last = tl.sum(tl.where(number == BLOCK_T - 1, total, 0.0), axis=0)
    lower = number[:, None] >= number[None, :]
    return total, last, tl.where(lower, exp(total[:, None] - total[None, :]), 0.0), lower


@triton.jit
def _forward_kernel(
    x_ptr,
    b_ptr,
    c_ptr,
    steps_ptr,
    a_ptr,
    d_ptr,
    initial_ptr,
    starts_ptr,
    chunks_ptr,
    y_ptr,
    state_ptr,
    stride_x,
    stride_b,
    stride_c,
    heads,
    groups,
    head_dim,
    state_dim,
    HAS_D: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    KEEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """With ``KEEPS`` the states before all chunks are written, and no output."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    number = tl.arange(0, BLOCK_T)
    group = head // (heads // groups)
    rate = tl.load(a_ptr + head).to(tl.float32)
    place = p[:, None].to(tl.int64) * state_dim + n[None, :]
    inside = (p < head_dim)[:, None] & (n < state_dim)[None, :]
    state_size = head_dim.to(tl.int64) * state_dim
    zeros = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if HAS_INITIAL:
        source = initial_ptr + (sequence * heads + head) * state_size + place
        state = tl.load(source, mask=inside, other=0.0)
    begin, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    chunk = tl.load(chunks_ptr + sequence)
    for first in range(begin, end, BLOCK_T):
        row = first + number
        here = row < end
        step = tl.load(steps_ptr + row * heads + head, mask=here, other=0.0)
        x = _load_rows(x_ptr + head * head_dim, row, stride_x, p, here, head_dim)
        b = _load_rows(b_ptr + group * state_dim, row, stride_b, n, here, state_dim)
        total, last, decays, lower = _decays(step, rate, here, BLOCK_T)
        if KEEPS:
            tl.store(state_ptr + (chunk * heads + head) * state_size + place, state, mask=inside)
            chunk += 1
        else:
            c = _load_rows(c_ptr + group * state_dim, row, stride_c, n, here, state_dim)
            scores = tl.dot(c, tl.trans(b), input_precision=PRECISION) * decays * step[None, :]
            scores = tl.where(lower, scores, 0.0)
            y = _dot(c, tl.trans(state), zeros, PRECISION) * exp(total)[:, None]
            y = _dot(scores, x, y, PRECISION)
            if HAS_D:
                y += tl.load(d_ptr + head).to(tl.float32) * x.to(tl.float32)
            target = y_ptr + (row * heads + head)[:, None] * head_dim + p[None, :]
            mask = here[:, None] & (p < head_dim)[None, :]
            tl.store(target, y.to(y_ptr.dtype.element_ty), mask=mask)
        left = x.to(tl.float32) * (exp(last - total) * step)[:, None]
        state = _dot(tl.trans(left), b, state * exp(last), PRECISION)
    if not KEEPS:
        target = state_ptr + (sequence * heads + head) * state_size + place
        tl.store(target, state, mask=inside)


@triton.jit
def _backward_kernel(
    dy_ptr,
    dstate_ptr,
    x_ptr,
    b_ptr,
    c_ptr,
    steps_ptr,
    a_ptr,
    d_ptr,
    kept_ptr,
    starts_ptr,
    chunks_ptr,
    dx_ptr,
    db_ptr,
    dc_ptr,
    dsteps_ptr,
    da_ptr,
    dd_ptr,
    dinitial_ptr,
    stride_dy,
    stride_x,
    stride_b,
    stride_c,
    num_tokens,
    heads,
    groups,
    head_dim,
    state_dim,
    HAS_D: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    block = tl.program_id(2)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    number = tl.arange(0, BLOCK_T)
    shares = heads // groups
    group = head // shares
    part = (head % shares) * tl.num_programs(2) + block
    rate = tl.load(a_ptr + head).to(tl.float32)
    place = p[:, None].to(tl.int64) * state_dim + n[None, :]
    inside = (p < head_dim)[:, None] & (n < state_dim)[None, :]
    state_size = head_dim.to(tl.int64) * state_dim
    own_state = (sequence * heads + head) * state_size + place
    zeros = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
    wide_zeros = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    dstate = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if HAS_STATE:
        dstate = tl.load(dstate_ptr + own_state, mask=inside, other=0.0).to(tl.float32)
    d = 0.0
    if HAS_D:
        d = tl.load(d_ptr + head).to(tl.float32)
    da, dd = 0.0, 0.0
    begin, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    chunks = tl.cdiv(end - begin, BLOCK_T)
    for back in range(chunks):
        chunk = chunks - 1 - back
        row = begin + chunk * BLOCK_T + number
        here = row < end
        step = tl.load(steps_ptr + row * heads + head, mask=here, other=0.0)
        x = _load_rows(x_ptr + head * head_dim, row, stride_x, p, here, head_dim)
        b = _load_rows(b_ptr + group * state_dim, row, stride_b, n, here, state_dim)
        c = _load_rows(c_ptr + group * state_dim, row, stride_c, n, here, state_dim)
        dy = tl.zeros_like(x)
        if HAS_OUTPUT:
            dy = _load_rows(dy_ptr + head * head_dim, row, stride_dy, p, here, head_dim)
        source = (tl.load(chunks_ptr + sequence) + chunk) * heads + head
        state = tl.load(kept_ptr + source * state_size + place, mask=inside, other=0.0)
        total, last, decays, lower = _decays(step, rate, here, BLOCK_T)
        rise, left = exp(total), exp(last - total)
        products = tl.dot(c, tl.trans(b), input_precision=PRECISION)
        dscores = _dot(dy, tl.trans(x), tl.zeros((BLOCK_T, BLOCK_T), tl.float32), PRECISION)
        dproducts = tl.where(lower, dscores * decays * step[None, :], 0.0)
        # Of the scores without the step; what is from a later token is 0.
        terms = tl.where(lower, dscores * products * decays, 0.0)
        columns = tl.sum(terms, axis=0)
        dtotal = tl.sum(terms * step[None, :], axis=1) - columns * step
        scores = tl.where(lower, products * decays * step[None, :], 0.0)
        from_state = _dot(b, tl.trans(dstate), zeros, PRECISION)
        wide_x, wide_dy = x.to(tl.float32), dy.to(tl.float32)
        of_left = tl.sum(wide_x * from_state, axis=1) * left
        dtotal -= of_left * step
        dx = from_state * (left * step)[:, None] + d * wide_dy
        dx = _dot(tl.trans(scores), dy, dx, PRECISION)
        dc = _dot(dy, state, wide_zeros, PRECISION) * rise[:, None]
        dtotal += tl.sum(c.to(tl.float32) * dc, axis=1)
        dc = _dot(dproducts, b, dc, PRECISION)
        db = _dot(x, dstate, wide_zeros, PRECISION) * (left * step)[:, None]
        db = _dot(tl.trans(dproducts), c, db, PRECISION)
        after = tl.sum(tl.sum(dstate * state, axis=1), axis=0) * exp(last)
        # The total of the last token, masked ones included, is that of the chunk.
        of_last = after + tl.sum(of_left * step, axis=0)
        dexponent = tl.sum(dtotal, axis=0) - tl.cumsum(dtotal, axis=0) + dtotal + of_last
        dy_rise = wide_dy * rise[:, None]
        dstate = _dot(tl.trans(dy_rise), c, dstate * exp(last), PRECISION)
        da += tl.sum(dexponent * step, axis=0)
        dd += tl.sum(tl.sum(wide_x * wide_dy, axis=1), axis=0)
        dstep = rate * dexponent + columns + of_left
        target = (tl.cast(block, tl.int64) * num_tokens + row) * heads + head
        tl.store(dsteps_ptr + target, dstep, mask=here)
        target = dx_ptr + (row * heads + head)[:, None] * head_dim + p[None, :]
        mask = here[:, None] & (p < head_dim)[None, :]
        tl.store(target, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        target = (((part.to(tl.int64) * num_tokens + row) * groups + group) * state_dim)[:, None]
        target += n[None, :]
        mask = here[:, None] & (n < state_dim)[None, :]
        tl.store(db_ptr + target, db, mask=mask)
        tl.store(dc_ptr + target, dc, mask=mask)
    target = (sequence * tl.num_programs(2) + block) * heads + head
    tl.store(da_ptr + target, da)
    tl.store(dd_ptr + target, dd)
    tl.store(dinitial_ptr + own_state, dstate, mask=inside)


def supports(*args: Any) -> str | None:
    call = StateSpaceArguments(*args)
    if call.B.shape[3] > _MOST_STATE:
        return f"state_dim {call.B.shape[3]} is above {_MOST_STATE}"
    return None


def supports_backward(*args: Any) -> str | None:
    return supports(*of_backward(StateSpaceArguments, args, incoming=2)[1])


class _Launch(NamedTuple):
    """What the kernels of a call take."""

    rows: tuple[torch.Tensor, ...]  # input, B and C as [tokens, columns]
    parameters: tuple[torch.Tensor, ...]  # steps, A and D
    bounds: tuple[torch.Tensor, ...]  # first rows of sequences, and their first chunks
    most_chunks: int
    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    form: dict[str, Any]

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(rows.stride(0) for rows in self.rows)


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = StateSpaceArguments(*args)
    launch = _prepare(call, _scan_steps.steps(call)[1])
    if call.z is None:
        output = call.input.new_empty(call.input.shape)
        return output, _run_forward(call, launch, output, keeps=False)
    output = call.input.new_empty(call.input.shape, dtype=torch.float32)
    state = _run_forward(call, launch, output, keeps=False)
    return (output * functional.silu(call.z.float())).to(call.input.dtype), state


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    (dy, dstate), call, _, mask = of_backward(StateSpaceArguments, args, incoming=2)
    raw, step = _scan_steps.steps(call)
    launch = _prepare(call, step)
    x, (heads, groups, head_dim, state_dim) = launch.rows[0], launch.sizes
    tokens, (sequences, _, blocks) = x.shape[0], launch.grid
    kept = _run_forward(call, launch, x, keeps=True)
    wide = {"dtype": torch.float32}
    dx = call.input.new_empty(call.input.shape)
    db, dc = (x.new_empty(heads // max(1, groups) * blocks, call.B.numel(), **wide) for _ in "bc")
    dsteps = x.new_empty(blocks, tokens * heads, **wide)
    da, dd = (x.new_empty(sequences * blocks, heads, **wide) for _ in "ad")
    dinitial = x.new_empty(sequences, heads, head_dim, state_dim, **wide)
    dz = None
    if call.z is not None:
        dz, dy = _through_gate(call, launch, dy)
    elif dy is not None:
        dy = dy.to(x.dtype)
    rows_dy = x if dy is None else _rows(dy)
    flags = {"HAS_OUTPUT": dy is not None, "HAS_STATE": dstate is not None}
    if dinitial.numel():
        with _launch.device_of(x):
            _backward_kernel[launch.grid](
                *(rows_dy, _launch.dense(dstate, dinitial), *launch.rows, *launch.parameters),
                *(kept, *launch.bounds, dx, db, dc, dsteps, da, dd, dinitial),
                *(rows_dy.stride(0), *launch.strides, tokens, *launch.sizes),
                **flags, **launch.form,
            )  # fmt: skip
    totals = [_total(parts) for parts in (dsteps, da, db, dc, dd)]
    grad_dt = _scan_steps.steps_backward(call, raw, totals[0].view(raw.shape))
    found = (dx, grad_dt, *totals[1:], dz, grad_dt.sum((0, 1)), dinitial)
    tensors: tuple[Any, ...] = call[:9]
    return tuple(
        grad.reshape(given.shape).to(given.dtype) if on and given is not None else None
        for grad, given, on in zip(found, tensors, mask, strict=True)
    )


def _through_gate(
    call: StateSpaceArguments, launch: _Launch, dy: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of ``z`` and of the output before it, which is computed once more."""
    assert call.z is not None
    z = call.z.float()
    if dy is None:
        return torch.zeros_like(z), None
    output = torch.empty_like(z, memory_format=torch.contiguous_format)
    _run_forward(call, launch, output, keeps=False)
    share = torch.sigmoid(z)
    return dy * output * share * (1 + z * (1 - share)), dy * z * share


def _total(parts: torch.Tensor) -> torch.Tensor:
    if parts.numel() == 0:
        return parts.new_zeros(parts.shape[1])
    total = _launch.sum_rows(parts, torch.float32)
    assert total is not None
    return total


def _run_forward(
    call: StateSpaceArguments, launch: _Launch, output: torch.Tensor, *, keeps: bool
) -> torch.Tensor:
    """Return the last states, or those before all chunks."""
    heads, _, head_dim, state_dim = launch.sizes
    count = launch.most_chunks if keeps else launch.grid[0]
    state = output.new_empty(count, heads, head_dim, state_dim, dtype=torch.float32)
    if state.numel():
        initial = call.initial_state
        flags = {"HAS_INITIAL": initial is not None, "KEEPS": keeps}
        tensors = (*launch.rows, *launch.parameters, _launch.dense(initial, state), *launch.bounds)
        with _launch.device_of(output):
            _forward_kernel[launch.grid](
                *tensors, output, state, *launch.strides, *launch.sizes, **flags, **launch.form
            )
    return state


def _prepare(call: StateSpaceArguments, step: torch.Tensor) -> _Launch:
    x, state_dim = call.input, call.B.shape[3]
    batch, tokens, heads, head_dim = x.shape
    blocks = _blocks(x.dtype, head_dim, state_dim)
    length = blocks["BLOCK_T"]
    if call.cu_seqlens is None:
        starts = torch.arange(batch + 1, device=x.device) * tokens
        most = batch * triton.cdiv(tokens, length)
    else:
        starts = call.cu_seqlens
        most = tokens // length + starts.shape[0] - 1
    lengths = (starts.diff() + length - 1) // length
    chunks = lengths.cumsum(0) - lengths
    a = call.A.contiguous()
    grid = (starts.shape[0] - 1, heads, triton.cdiv(head_dim, blocks["BLOCK_P"]))
    form: dict[str, Any] = {"HAS_D": call.D is not None, "PRECISION": _launch.precision(x.dtype)}
    return _Launch(
        rows=tuple(_rows(tensor) for tensor in (x, call.B, call.C)),
        parameters=(step.contiguous(), a, _launch.dense(call.D, a)),
        bounds=(starts, chunks),
        most_chunks=most,
        grid=grid,
        sizes=(heads, call.B.shape[2], head_dim, state_dim),
        form=form | blocks | {"num_warps": 8, "num_stages": 1},
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[batch, tokens, heads, size]`` as rows of tokens, a view where that is possible."""
    rows = tensor.reshape(tensor.shape[0] * tensor.shape[1], tensor.shape[2] * tensor.shape[3])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _blocks(dtype: torch.dtype, head_dim: int, state_dim: int) -> dict[str, int]:
    """Return tokens of a chunk, channels of a program, and the padded state."""
    block_n = max(16, triton.next_power_of_2(state_dim))
    few = dtype == torch.float32 or block_n > 128
    block_p = min(_CHANNELS, max(16, triton.next_power_of_2(head_dim)))
    return {"BLOCK_T": 32 if few else 64, "BLOCK_P": block_p, "BLOCK_N": block_n}

"""selective_state_space in Triton: forward, backward, launchers.

Tokens go in chunks (formulae: ``csrc/cpu/recurrence/state_space_chunk.h``). One kernel goes through
the chunks of a sequence with a part of the state of a head in registers, and stores the states
before all chunks; backwards it does the same with the gradients of the states after them. Of all
chunks at once the others then compute outputs (2 products and those of C and B) and gradients (9).
Programs of a group leave their parts of the gradients of B and C, which a last kernel adds in
order. States and sums are float32; a float32 operand of a product in half precision is divided into
two numbers, since states add up its errors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from fusedops._core.capability import compute_capability
from fusedops.kernels import _launch, _scan_steps
from fusedops.kernels._arguments import StateSpaceArguments, of_backward
from fusedops.kernels._device import exp

_STATE_CHANNELS = 64  # of a program that computes states


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
def _exponents(step, rate, here, BLOCK_T: tl.constexpr):
    """Return the exponents of decays, and their sums up to each token and after each.

    Decays are exponentials of sums of the exponents between two tokens, never of differences, which
    lose their bits after a strong decay. One of +inf is no decay, and makes its results NaN.
    """
    number = tl.arange(0, BLOCK_T)
    exponent = tl.where(here, step * rate, 0.0)
    exponent = tl.where(exponent == float("inf"), float("nan"), exponent)
    later = tl.where(number[:, None] > number[None, :], exponent[:, None], 0.0)
    return exponent, tl.cumsum(exponent, axis=0), tl.sum(later, axis=0)


@triton.jit
def _lower(values, exponent, BLOCK_T: tl.constexpr):
    """Return the values times the decays between tokens, 0 for those of a later token."""
    number = tl.arange(0, BLOCK_T)
    between = tl.where(number[:, None] > number[None, :], exponent[:, None], 0.0)
    decayed = values * exp(tl.cumsum(between, axis=0))
    return tl.where(number[:, None] >= number[None, :], decayed, 0.0)


@triton.jit
def _rows_of(chunk, starts_ptr, chunks_ptr, sequences_ptr, BLOCK_T: tl.constexpr):
    """Return the rows of the tokens of a chunk, and which of them its sequence has."""
    sequence = tl.load(sequences_ptr + chunk)
    first = (chunk - tl.load(chunks_ptr + sequence)) * BLOCK_T
    row = tl.load(starts_ptr + sequence) + first + tl.arange(0, BLOCK_T)
    return row, row < tl.load(starts_ptr + sequence + 1)


@triton.jit
def _store_rows(ptr, row, stride, col, here, num_cols, values):
    mask = here[:, None] & (col < num_cols)[None, :]
    target = ptr + (row * stride)[:, None] + col[None, :]
    tl.store(target, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _state_kernel(
    x_ptr,
    b_ptr,
    steps_ptr,
    a_ptr,
    initial_ptr,
    starts_ptr,
    chunks_ptr,
    kept_ptr,
    last_ptr,
    stride_x,
    stride_b,
    heads,
    groups,
    head_dim,
    state_dim,
    HAS_INITIAL: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the states before all chunks and after the last.

    With ``REVERSE``, which takes gradients of outputs as ``x`` and C as ``b``, these are the
    gradients of the states after all chunks and before the first.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    tiles = tl.cdiv(state_dim, BLOCK_N)
    p = tl.program_id(2) // tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.program_id(2) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    group = head // (heads // groups)
    rate = tl.load(a_ptr + head).to(tl.float32)
    place = p[:, None].to(tl.int64) * state_dim + n[None, :]
    inside = (p < head_dim)[:, None] & (n < state_dim)[None, :]
    size = head_dim.to(tl.int64) * state_dim
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if HAS_INITIAL:
        source = initial_ptr + (sequence * heads + head) * size + place
        state = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    begin, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    kept = tl.load(chunks_ptr + sequence)
    chunks = tl.cdiv(end - begin, BLOCK_T)
    for index in range(chunks):
        chunk = chunks - 1 - index if REVERSE else index
        row = begin + chunk * BLOCK_T + tl.arange(0, BLOCK_T)
        here = row < end
        step = tl.load(steps_ptr + row * heads + head, mask=here, other=0.0)
        x = _load_rows(x_ptr + head * head_dim, row, stride_x, p, here, head_dim)
        b = _load_rows(b_ptr + group * state_dim, row, stride_b, n, here, state_dim)
        tl.store(kept_ptr + ((kept + chunk) * heads + head) * size + place, state, mask=inside)
        exponent, total, after = _exponents(step, rate, here, BLOCK_T)
        factor = exp(total) if REVERSE else exp(after) * step
        x = x.to(tl.float32) * factor[:, None]
        state = _dot(tl.trans(x), b, state * exp(tl.sum(exponent, axis=0)), PRECISION)
    tl.store(last_ptr + (sequence * heads + head) * size + place, state, mask=inside)


@triton.jit
def _output_kernel(
    x_ptr,
    b_ptr,
    c_ptr,
    steps_ptr,
    a_ptr,
    d_ptr,
    kept_ptr,
    starts_ptr,
    chunks_ptr,
    sequences_ptr,
    y_ptr,
    stride_x,
    stride_b,
    stride_c,
    heads,
    groups,
    head_dim,
    state_dim,
    HAS_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    group = head // (heads // groups)
    row, here = _rows_of(chunk, starts_ptr, chunks_ptr, sequences_ptr, BLOCK_T)
    step = tl.load(steps_ptr + row * heads + head, mask=here, other=0.0)
    rate = tl.load(a_ptr + head).to(tl.float32)
    exponent, total, _ = _exponents(step, rate, here, BLOCK_T)
    products = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    y = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
    states = kept_ptr + (chunk * heads + head) * head_dim * state_dim
    for first in range(0, state_dim, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        b = _load_rows(b_ptr + group * state_dim, row, stride_b, n, here, state_dim)
        c = _load_rows(c_ptr + group * state_dim, row, stride_c, n, here, state_dim)
        state = _load_rows(states, p, state_dim, n, p < head_dim, state_dim)
        products = tl.dot(c, tl.trans(b), products, input_precision=PRECISION)
        y = _dot(c, tl.trans(state), y, PRECISION)
    scores = _lower(products * step[None, :], exponent, BLOCK_T)
    x = _load_rows(x_ptr + head * head_dim, row, stride_x, p, here, head_dim)
    y = _dot(scores, x, y * exp(total)[:, None], PRECISION)
    if HAS_D:
        y += tl.load(d_ptr + head).to(tl.float32) * x.to(tl.float32)
    _store_rows(y_ptr + head * head_dim, row, heads * head_dim, p, here, head_dim, y)


@triton.jit
def _gradient_kernel(
    dy_ptr,
    x_ptr,
    b_ptr,
    c_ptr,
    steps_ptr,
    a_ptr,
    d_ptr,
    kept_ptr,
    dkept_ptr,
    starts_ptr,
    chunks_ptr,
    sequences_ptr,
    dx_ptr,
    db_ptr,
    dc_ptr,
    dsteps_ptr,
    da_ptr,
    dd_ptr,
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
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    block = tl.program_id(2).to(tl.int64)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    shares = heads // groups
    group = head // shares
    row, here = _rows_of(chunk, starts_ptr, chunks_ptr, sequences_ptr, BLOCK_T)
    step = tl.load(steps_ptr + row * heads + head, mask=here, other=0.0)
    rate = tl.load(a_ptr + head).to(tl.float32)
    exponent, total, later = _exponents(step, rate, here, BLOCK_T)
    x = _load_rows(x_ptr + head * head_dim, row, stride_x, p, here, head_dim)
    dy = _load_rows(dy_ptr + head * head_dim, row, stride_dy, p, here, head_dim)
    own = (chunk * tl.num_programs(2) + block) * heads + head
    dd = tl.sum(x.to(tl.float32) * dy.to(tl.float32), axis=1)
    tl.store(dd_ptr + own, tl.sum(dd, axis=0))
    square = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    dscores = _dot(dy, tl.trans(x), square, PRECISION)
    dproducts = _lower(dscores * step[None, :], exponent, BLOCK_T)
    dtotal = tl.zeros((BLOCK_T,), tl.float32)
    after = tl.zeros((BLOCK_P,), tl.float32)
    states = (chunk * heads + head) * head_dim * state_dim
    place = ((head % shares) * tl.num_programs(2) + block) * num_tokens * groups * state_dim
    for first in range(0, state_dim, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        b = _load_rows(b_ptr + group * state_dim, row, stride_b, n, here, state_dim)
        c = _load_rows(c_ptr + group * state_dim, row, stride_c, n, here, state_dim)
        state = _load_rows(kept_ptr + states, p, state_dim, n, p < head_dim, state_dim)
        dstate = _load_rows(dkept_ptr + states, p, state_dim, n, p < head_dim, state_dim)
        after += tl.sum(dstate * state, axis=1)
        zeros = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        dc = _dot(dy, state, zeros, PRECISION) * exp(total)[:, None]
        dtotal += tl.sum(c.to(tl.float32) * dc, axis=1)
        dc = _dot(dproducts, b, dc, PRECISION)
        stride = groups * state_dim
        _store_rows(dc_ptr + place + group * state_dim, row, stride, n, here, state_dim, dc)
    # Loops of their own: what both keep does not fit into registers.
    for first in range(0, state_dim, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        c = _load_rows(c_ptr + group * state_dim, row, stride_c, n, here, state_dim)
        dstate = _load_rows(dkept_ptr + states, p, state_dim, n, p < head_dim, state_dim)
        zeros = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        db = _dot(x, dstate, zeros, PRECISION) * (exp(later) * step)[:, None]
        db = _dot(tl.trans(dproducts), c, db, PRECISION)
        stride = groups * state_dim
        _store_rows(db_ptr + place + group * state_dim, row, stride, n, here, state_dim, db)
    products = square
    from_state = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
    for first in range(0, state_dim, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        b = _load_rows(b_ptr + group * state_dim, row, stride_b, n, here, state_dim)
        c = _load_rows(c_ptr + group * state_dim, row, stride_c, n, here, state_dim)
        dstate = _load_rows(dkept_ptr + states, p, state_dim, n, p < head_dim, state_dim)
        products = tl.dot(c, tl.trans(b), products, input_precision=PRECISION)
        from_state = _dot(b, tl.trans(dstate), from_state, PRECISION)
    x = _load_rows(x_ptr + head * head_dim, row, stride_x, p, here, head_dim)
    dy = _load_rows(dy_ptr + head * head_dim, row, stride_dy, p, here, head_dim)
    dscores = _dot(dy, tl.trans(x), square, PRECISION)
    # Of the scores without the step.
    terms = _lower(dscores * products, exponent, BLOCK_T)
    columns = tl.sum(terms, axis=0)
    wide_x, wide_dy = x.to(tl.float32), dy.to(tl.float32)
    left = exp(later)
    of_left = tl.sum(wide_x * from_state, axis=1) * left
    scores = _lower(products * step[None, :], exponent, BLOCK_T)
    dx = from_state * (left * step)[:, None]
    if HAS_D:
        dx += tl.load(d_ptr + head).to(tl.float32) * wide_dy
    dx = _dot(tl.trans(scores), dy, dx, PRECISION)
    _store_rows(dx_ptr + head * head_dim, row, heads * head_dim, p, here, head_dim, dx)
    # An exponent decays what crosses its token: from earlier tokens to it and later ones, from
    # earlier ones to the last state, from the first state to it and later ones, and to the last.
    number = tl.arange(0, BLOCK_T)
    crossing = tl.cumsum(terms * step[None, :], axis=0, reverse=True) + (of_left * step)[None, :]
    crossing = tl.where(number[:, None] > number[None, :], crossing, 0.0)
    # Columns: Triton 3.7 cannot compile sums of a vector that is a sum of a product's rows for
    # sm_100.
    dexponent = tl.cumsum(dtotal[:, None], axis=0, reverse=True)
    dexponent += tl.sum(crossing, axis=1, keep_dims=True)
    dexponent += tl.sum(after, axis=0) * exp(tl.sum(exponent, axis=0))
    dstep = rate * dexponent + (columns + of_left)[:, None]
    target = (block * num_tokens + row) * heads + head
    tl.store((dsteps_ptr + target)[:, None], dstep, mask=here[:, None])
    da = tl.where(here[:, None], dexponent * step[:, None], 0.0)
    tl.store(da_ptr + own + tl.arange(0, 1), tl.sum(da, axis=0))


def supports(*args: Any) -> str | None:
    call = StateSpaceArguments(*args)
    return f"head_dim {call.input.shape[3]} is above 256" if call.input.shape[3] > 256 else None


def supports_backward(*args: Any) -> str | None:
    return supports(*of_backward(StateSpaceArguments, args, incoming=2)[1])


class _Launch(NamedTuple):
    """What the kernels of a call take."""

    rows: tuple[torch.Tensor, ...]  # input, B and C as [tokens, columns]
    steps: tuple[torch.Tensor, ...]  # steps and A
    d: torch.Tensor
    bounds: tuple[torch.Tensor, ...]  # first rows of sequences, and their first chunks
    sequences: torch.Tensor  # of each chunk
    grid: tuple[int, int, int]  # chunks, heads, blocks of channels
    sizes: tuple[int, ...]
    form: dict[str, Any]


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = StateSpaceArguments(*args)
    launch = _prepare(call, _scan_steps.steps(call)[1])
    kept, state = _states(launch, launch.rows[0], launch.rows[1], call.initial_state)
    if call.z is None:
        return _outputs(call, launch, kept, call.input.dtype), state
    output = _outputs(call, launch, kept, torch.float32)
    return (output * functional.silu(call.z.float())).to(call.input.dtype), state


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    (dy, dstate), call, _, mask = of_backward(StateSpaceArguments, args, incoming=2)
    raw, step = _scan_steps.steps(call)
    launch = _prepare(call, step)
    x, (heads, groups, _, _) = launch.rows[0], launch.sizes
    chunks, _, blocks = launch.grid
    kept, _ = _states(launch, x, launch.rows[1], call.initial_state)
    dy, dz = torch.zeros_like(call.input) if dy is None else dy.to(x.dtype), None
    if call.z is not None:
        z, output = call.z.float(), _outputs(call, launch, kept, torch.float32)
        share = torch.sigmoid(z)
        dy, dz = dy * z * share, dy * output * share * (1 + z * (1 - share))
    dy = _rows(dy)
    dkept, dinitial = _states(launch, dy, launch.rows[2], dstate, reverse=True)
    wide: dict[str, Any] = {"dtype": torch.float32}
    dx = call.input.new_empty(call.input.shape)
    db, dc = (x.new_empty(heads // max(1, groups) * blocks, call.B.numel(), **wide) for _ in "bc")
    dsteps = x.new_empty(blocks, x.shape[0] * heads, **wide)
    da, dd = (x.new_empty(chunks * blocks, heads, **wide) for _ in "ad")
    if dx.numel():
        with _launch.device_of(x):
            _gradient_kernel[launch.grid](
                *(dy, *launch.rows, *launch.steps, launch.d, kept, dkept, *launch.bounds),
                *(launch.sequences, dx, db, dc, dsteps, da, dd, dy.stride(0)),
                *(*(rows.stride(0) for rows in launch.rows), x.shape[0], *launch.sizes),
                HAS_D=call.D is not None, **launch.form,
            )  # fmt: skip
    totals = [_total(parts) for parts in (dsteps, da, db, dc, dd)]
    grad_dt = _scan_steps.steps_backward(call, raw, totals[0].view(raw.shape))
    found: tuple[Any, ...] = (dx, grad_dt, *totals[1:], dz, grad_dt.sum((0, 1)), dinitial)
    tensors: tuple[Any, ...] = call[:9]
    return tuple(
        grad.reshape(given.shape).to(given.dtype) if on and given is not None else None
        for grad, given, on in zip(found, tensors, mask, strict=True)
    )


def _total(parts: torch.Tensor) -> torch.Tensor:
    if parts.numel() == 0:
        return parts.new_zeros(parts.shape[1])
    with _launch.device_of(parts):
        total = _launch.sum_rows(parts, torch.float32)
    assert total is not None
    return total


def _states(
    launch: _Launch,
    x: torch.Tensor,
    b: torch.Tensor,
    initial: torch.Tensor | None,
    *,
    reverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states before all chunks and the last ones; ``reverse``: their gradients."""
    chunks, heads, _ = launch.grid
    sizes, count = launch.sizes[2:], launch.bounds[1].shape[0]
    blocks = _blocks(b.dtype, sizes[0], _STATE_CHANNELS)
    kept, last = (x.new_empty(n, heads, *sizes, dtype=torch.float32) for n in (chunks, count))
    if last.numel():
        tiles = triton.cdiv(sizes[0], blocks["BLOCK_P"]) * triton.cdiv(sizes[1], blocks["BLOCK_N"])
        flags = {"HAS_INITIAL": initial is not None, "REVERSE": reverse}
        tensors = (x, b, *launch.steps, _launch.dense(initial, last), *launch.bounds, kept, last)
        with _launch.device_of(x):
            _state_kernel[(count, heads, tiles)](
                *tensors, x.stride(0), b.stride(0), *launch.sizes, **flags, **launch.form | blocks
            )
    return kept, last


def _outputs(
    call: StateSpaceArguments, launch: _Launch, kept: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    output = call.input.new_empty(call.input.shape, dtype=dtype)
    if output.numel():
        tensors = (*launch.rows, *launch.steps, launch.d, kept, *launch.bounds, launch.sequences)
        strides = (rows.stride(0) for rows in launch.rows)
        with _launch.device_of(output):
            _output_kernel[launch.grid](
                *tensors, output, *strides, *launch.sizes, HAS_D=call.D is not None, **launch.form
            )
    return output


def _prepare(call: StateSpaceArguments, step: torch.Tensor) -> _Launch:
    x, state_dim = call.input, call.B.shape[3]
    batch, tokens, heads, head_dim = x.shape
    blocks = _blocks(x.dtype, head_dim)
    length = blocks["BLOCK_T"]
    if call.cu_seqlens is None:
        starts = torch.arange(batch + 1, device=x.device) * tokens
        most = batch * triton.cdiv(tokens, length)
    else:
        starts = call.cu_seqlens
        most = tokens // length + starts.shape[0] - 1
    lengths = (starts.diff() + length - 1) // length
    chunks = lengths.cumsum(0) - lengths
    numbers = torch.arange(most, device=x.device)
    a = call.A.contiguous()
    capability = compute_capability(x.device) or (0,)
    return _Launch(
        rows=tuple(_rows(tensor) for tensor in (x, call.B, call.C)),
        steps=(step.contiguous(), a),
        d=_launch.dense(call.D, a),
        bounds=(starts, chunks),
        sequences=torch.searchsorted(chunks, numbers, right=True) - 1,
        grid=(most, heads, triton.cdiv(head_dim, blocks["BLOCK_P"])),
        sizes=(heads, call.B.shape[2], head_dim, state_dim),
        form={"PRECISION": _launch.precision(x.dtype)} | blocks | _options(x.dtype, capability[0]),
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[batch, tokens, heads, size]`` as rows of tokens, a view where that is possible."""
    rows = tensor.reshape(tensor.shape[0] * tensor.shape[1], tensor.shape[2] * tensor.shape[3])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _blocks(dtype: torch.dtype, head_dim: int, most_channels: int = 32) -> dict[str, int]:
    """Return tokens of a chunk, and channels and elements of a state of a program at a time."""
    length = 32 if dtype == torch.float32 else 64
    channels = min(length, most_channels, max(16, triton.next_power_of_2(head_dim)))
    return {"BLOCK_T": length, "BLOCK_P": channels, "BLOCK_N": 32}


def _options(dtype: torch.dtype, major: int) -> dict[str, int]:
    """Return the launch options; ``major`` is the first number of the GPU's compute capability.

    The instructions of sm_90 multiply tiles of 64 rows by four warps; else four would spill. Lanes
    that add up products of each other must not fuse them: their sums would differ in bits.
    """
    num_warps = 4 if major == 9 and dtype != torch.float32 else 8
    return {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False}

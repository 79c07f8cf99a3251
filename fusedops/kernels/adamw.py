"""The AdamW step in Triton: one launch for all tensors of one mixture of dtypes.

A program updates one block of one tensor: it reads gradient, moments, parameter and copy once and
writes moments, parameter and copy once. What all elements of a tensor share (step size, root of the
bias correction, decay) is computed on the device before, because the number of steps is there, and
the learning rate may be. The host reads nothing and copies only tables that changed: a step can be
captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch, _pointer_table
from fusedops.kernels._device import PHILOX_ROUNDS
from fusedops.kernels._pointer_table import BLOCK

# Columns of the table: six addresses, the size, what Philox and its counters begin with (4), the
# address of the number of steps, and the bits of the weight decay in float64.
_COLUMNS, _DECAY = 13, 12
_COUNTED = 128  # tensors whose steps one program counts


@triton.jit
def _elements(start, size, run, pitch, BLOCK: tl.constexpr):
    """Return ``i // run * pitch + i % run`` for the ``BLOCK`` elements ``i`` from ``start`` on.

    One 64-bit division for all of them, none where a single run holds the whole tensor.
    """
    first_run = tl.cast(0, tl.int64)
    if run < size:
        first_run = start // run
    place = start - first_run * run
    # Element of the block at which the next run begins; both fit 32 bits once they are cut.
    boundary = tl.minimum(run - place, BLOCK).to(tl.int32)
    length = tl.minimum(run, BLOCK).to(tl.int32)
    e = tl.arange(0, BLOCK)
    # Exact: half an element is more than the rounding of a quotient of numbers below 2 * BLOCK.
    quotient = ((e - boundary + length).to(tl.float32) + 0.5) * (1.0 / length.to(tl.float32))
    runs = tl.maximum(quotient.to(tl.int32), 0)
    return first_run * pitch + place + e + runs * (pitch - run)


@triton.jit
def _words(element, key, offset):
    """Return a random word for each element of a parameter; ``ops/adamw.py`` specifies it."""
    counter = element >> 2
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    offset_low = (offset & 0xFFFFFFFF).to(tl.uint32)
    offset_high = ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, low, high, offset_low, offset_high, PHILOX_ROUNDS)
    word = element & 3
    return tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))


@triton.jit
def _rounded(value, words, SHIFT: tl.constexpr):
    """Return the bfloat16 above or below ``value``, as 16 bits of the words say."""
    bits = value.to(tl.uint32, bitcast=True) + ((words >> SHIFT) & 0xFFFF)
    cut = tl.where(value == value, bits >> 16, 0x7FC0)
    return cut.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _step_kernel(
    table_ptr,
    blocks_ptr,
    scalars_ptr,
    steps_ptr,
    factor_ptr,
    found_inf_ptr,
    param_ptr,
    grad_ptr,
    state_ptr,
    copy_ptr,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    HAS_FACTOR: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr,
    COPY: tl.constexpr,
    DRAW_STATE: tl.constexpr,
    DRAW_PARAM: tl.constexpr,
    VECTORIZES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks_ptr + 2 * program).to(tl.int64)
    block = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64)
    row = table_ptr + tensor * COLUMNS
    # The typed arguments are any tensors of these dtypes: only their types are used.
    param = tl.load(row).to(param_ptr.dtype)
    grad = tl.load(row + 1).to(grad_ptr.dtype)
    first = tl.load(row + 2).to(state_ptr.dtype)
    second = tl.load(row + 3).to(state_ptr.dtype)
    if VECTORIZES:
        param, grad = tl.multiple_of(param, 16), tl.multiple_of(grad, 16)
        first, second = tl.multiple_of(first, 16), tl.multiple_of(second, 16)
    size = tl.load(row + 6)
    if HAS_FOUND_INF:
        size = tl.where(tl.load(found_inf_ptr) == 0.0, size, 0)
    if VECTORIZES:
        size = tl.multiple_of(size, 16)

    i = block * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    if DRAW_STATE or DRAW_PARAM:
        key, base = tl.load(row + 7), tl.load(row + 8)
        run, pitch = tl.load(row + 9), tl.load(row + 10)
        element = base + _elements(block * BLOCK, size, run, pitch, BLOCK)
        offset = 2 * tl.load(steps_ptr + tensor).to(tl.int64)
        if DRAW_STATE:
            words = _words(element, key, offset)
        if DRAW_PARAM or AMSGRAD:
            more_words = _words(element, key, offset + 1)

    g = tl.load(grad + i, mask=mask, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        g *= tl.load(factor_ptr).to(tl.float32)
    if MAXIMIZE:
        g = -g
    m = tl.load(first + i, mask=mask, other=0.0).to(tl.float32) * beta1 + rest1 * g
    v = tl.load(second + i, mask=mask, other=0.0).to(tl.float32) * beta2 + rest2 * g * g
    if DRAW_STATE:
        tl.store(first + i, _rounded(m, words, 0), mask=mask)
        tl.store(second + i, _rounded(v, words, 16), mask=mask)
    else:
        tl.store(first + i, m.to(state_ptr.dtype.element_ty), mask=mask)
        tl.store(second + i, v.to(state_ptr.dtype.element_ty), mask=mask)
    if AMSGRAD:
        largest = tl.load(row + 4).to(state_ptr.dtype)
        before = tl.load(largest + i, mask=mask, other=0.0).to(tl.float32)
        v = tl.maximum(v, before, propagate_nan=tl.PropagateNan.ALL)
        if DRAW_STATE:
            tl.store(largest + i, _rounded(v, more_words, 16), mask=mask)
        else:
            tl.store(largest + i, v.to(state_ptr.dtype.element_ty), mask=mask)
    p = tl.load(param + i, mask=mask, other=0.0).to(tl.float32)
    if COPY:
        copy = tl.load(row + 5).to(copy_ptr.dtype)
        if VECTORIZES:
            copy = tl.multiple_of(copy, 16)
        held = tl.load(copy + i, mask=mask, other=0.0)
        p = tl.where(p.to(held.dtype).to(tl.float32) == held.to(tl.float32), p, held.to(tl.float32))
    # Loaded here, or Triton 3.9 spills on sm_120.
    step_size = tl.load(scalars_ptr + 3 * tensor)
    inverse_root = tl.load(scalars_ptr + 3 * tensor + 1)
    decay = tl.load(scalars_ptr + 3 * tensor + 2)
    moved = m / (tl.sqrt_rn(v) * inverse_root + eps)
    p -= decay * p + step_size * moved
    if DRAW_PARAM:
        tl.store(param + i, _rounded(p, more_words, 0), mask=mask)
    else:
        tl.store(param + i, p.to(param_ptr.dtype.element_ty), mask=mask)
    if COPY:
        tl.store(copy + i, p.to(copy_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _count_kernel(
    table_ptr,
    found_inf_ptr,
    step_ptr,
    counts_ptr,
    num_tensors,
    HAS_FOUND_INF: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the step where it is made: on the device, which alone knows ``found_inf``."""
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tensor < num_tensors
    address = tl.load(table_ptr + tensor.to(tl.int64) * COLUMNS + 11, mask=mask, other=0)
    step = address.to(step_ptr.dtype)
    made = 1.0
    if HAS_FOUND_INF:
        made = tl.where(tl.load(found_inf_ptr) == 0.0, 1.0, 0.0)
    count = (tl.load(step, mask=mask, other=0.0) + made).to(step_ptr.dtype.element_ty)
    tl.store(step, count, mask=mask)
    tl.store(counts_ptr + tensor, count.to(tl.float64), mask=mask)


# The leading arguments of ``forward`` whose dtypes decide whether the kernel can run: what follows
# (steps, grad_factor, found_inf, learning_rate) is single numbers, of float64 too.
DATA_ARGUMENTS = 6


@dataclass
class StepLaunch:
    """One launch of the step: the tensors of one mixture of dtypes, and what all of them share."""

    table: _pointer_table.PointerTable  # a row of each tensor
    members: torch.Tensor  # int64, which tensors of the call these are
    # Of parameters, gradients, moments, copies and numbers of steps
    dtypes: tuple[torch.dtype, ...]
    vectorizes: bool  # whether all may be read by vectors to the end
    amsgrad: bool  # whether the largest second moments are kept
    copies: bool  # whether parameters are copied
    draws: bool  # whether float32 becomes bfloat16 by stochastic rounding

    def move_gradients(self, addresses: torch.Tensor) -> None:
        """Take the addresses of the gradients of all tensors of the call."""
        self.table.set_column(1, addresses[self.members])

    def run(self, *args: Any) -> None:
        """Launch the step with the numbers of ``fusedops::adamw`` and one learning rate."""
        grad_factor, found_inf, lr, beta1, beta2, eps, maximize, bias_correction = args
        device, num_tensors = self.table.device, len(self.table.sizes)
        with _launch.guard(device):
            table, blocks = self.table.on_device()
            counts = torch.empty(num_tensors, dtype=torch.float64, device=device)
            types = [_pointer_table.of_dtype(dtype, device) for dtype in self.dtypes]
            launch = {"HAS_FOUND_INF": found_inf is not None, "COLUMNS": _COLUMNS}
            launch |= _launch.FOUR_WARPS
            flag = counts if found_inf is None else found_inf
            _count_kernel[(triton.cdiv(num_tensors, _COUNTED),)](
                table, flag, types[4], counts, num_tensors, BLOCK=_COUNTED, **launch
            )
            if len(blocks) == 0:
                return
            decays = table.view(torch.float64)[:, _DECAY]
            scalars = _scalars(counts, decays, lr, beta1, beta2, bias_correction)
            factor = scalars if grad_factor is None else grad_factor
            flag = scalars if found_inf is None else found_inf
            tensors = (table, blocks, scalars, counts, factor, flag, *types[:4])
            flags = {"HAS_FACTOR": grad_factor is not None, "MAXIMIZE": maximize}
            flags |= {"AMSGRAD": self.amsgrad, "COPY": self.copies, "VECTORIZES": self.vectorizes}
            flags["DRAW_STATE"] = self.draws and self.dtypes[2] == torch.bfloat16
            flags["DRAW_PARAM"] = self.draws and self.dtypes[0] == torch.bfloat16
            betas = (beta1, beta2, 1.0 - beta1, 1.0 - beta2)
            _step_kernel[(len(blocks),)](*tensors, *betas, eps, **flags, BLOCK=BLOCK, **launch)


def launches(
    tensors: Sequence[list[torch.Tensor]], draws: Sequence[int], weight_decays: Sequence[float]
) -> list[StepLaunch]:
    """Return the launches of a step; ``tensors`` are the seven lists of ``fusedops::adamw``."""
    *lists, steps = tensors
    params, grads, exp_avgs, _, max_exp_avg_sqs, copies = lists
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, param in enumerate(params):
        copied = copies[i].dtype if copies else param.dtype
        vectorizes = _pointer_table.vectorizes(*(column[i] for column in lists if column))
        dtypes = (param.dtype, grads[i].dtype, exp_avgs[i].dtype, copied, steps[i].dtype)
        kinds.setdefault((dtypes, vectorizes), []).append(i)
    made = []
    for (dtypes, vectorizes), members in kinds.items():
        chosen = [[column[i] for i in members] if column else [] for column in lists]
        sizes = tuple(params[i].numel() for i in members)
        table = torch.zeros(len(members), _COLUMNS, dtype=torch.int64)
        table[:, :6] = _pointer_table.addresses(*chosen)
        table[:, 6] = torch.tensor(sizes)
        numbers = [[*draws[4 * i : 4 * i + 4]] or [0, 0, 1, 1] for i in members]
        table[:, 7:11] = torch.tensor(numbers)
        table[:, 11] = torch.tensor([steps[i].data_ptr() for i in members])
        decays = torch.tensor([weight_decays[i] for i in members], dtype=torch.float64)
        table[:, _DECAY] = decays.view(torch.int64)
        rows = _pointer_table.PointerTable(table, sizes, params[0].device)
        present = (bool(max_exp_avg_sqs), bool(copies), bool(draws))
        made.append(StepLaunch(rows, torch.tensor(members), dtypes, vectorizes, *present))
    return made


def forward(*args: Any) -> None:
    grad_factor, found_inf, learning_rate, draws, weight_decays, lr, *numbers = args[7:]
    for launch in launches(args[:7], draws, weight_decays):
        launch.run(grad_factor, found_inf, lr if learning_rate is None else learning_rate, *numbers)


def _scalars(
    counts: torch.Tensor, weight_decays: torch.Tensor, lr: float | torch.Tensor, *numbers: Any
) -> torch.Tensor:
    """Return float32 ``[tensors, 3]``: step size, inverse root of the bias correction, decay."""
    beta1, beta2, bias_correction = numbers
    scalars = torch.empty(len(counts), 3, dtype=torch.float32, device=counts.device)
    step_size, root, decay = scalars.unbind(1)
    if isinstance(lr, torch.Tensor):
        lr = lr.reshape(())
    torch.mul(weight_decays, lr, out=decay)
    if bias_correction:
        torch.mul((1 - beta1**counts).reciprocal(), lr, out=step_size)
        torch.rsqrt(1 - beta2**counts, out=root)
    else:
        step_size.fill_(lr)
        root.fill_(1.0)
    return scalars

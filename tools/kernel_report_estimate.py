"""What a kernel's counts let one expect of an H100: arithmetic, no measurement.

Constants are NVIDIA's for the H100 SXM (132 multiprocessors at 1.755 GHz, 3.35 TB/s), but for the
L2 cache's. Left out are latencies that nothing hides, bank conflicts, shared memory where there are
no matrix instructions, and clocks that fall under load: an estimate tells which kernel is the
weakest and whether a change can have helped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from kernel_report_code import Code, Loop

# Bytes a clock of one multiprocessor, from memory: 3.35e12 / 132 / 1.755e9.
_BANDWIDTH = 14.5
# Four schedulers give 128 threads an instruction a clock; three quarters of that is a good loop.
_ISSUE_BUDGET = 0.75 * 128 * 16 / _BANDWIDTH
# What must be under way, loads and stores, for full bandwidth: 14.5 bytes a clock, 1200 clocks.
_IN_FLIGHT = 17_000
# Multiply-adds a clock of one multiprocessor: of warp-group products, and of the older ones, which
# reach about half of that.
_WARP_GROUP, _WARP = 2048, 1024
# Exponentials a clock: a warp's takes eight clocks of its scheduler.
_FUNCTION_CLOCKS = 8
# Bytes a clock that the L2 cache gives a multiprocessor which all others ask as well: NVIDIA tells
# no figure. Half of a multiprocessor's port; 7.4 TB/s for all, published measurements are 5.5 to 7.
_L2 = 32
# Bytes a clock of shared memory: 32 banks of four bytes.
_SHARED_BANDWIDTH = 128
# The steps that a matrix kernel is estimated for: a sum over 1024 in blocks of 64.
_STEPS = 16

# Capability -> bytes of shared memory of a multiprocessor; each block takes one KiB more than told.
_SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024, 120: 100 * 1024}


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched, and what it takes.

    Attributes:
        capability: 80, 90, 100 or 120.
        warps: of a block.
        stages: of its loop: how many steps' operands stand in shared memory.
        registers: of a thread.
        shared: bytes of shared memory of a block.
        resident: blocks that the grid gives a multiprocessor, ``None`` for as many as fit.
        loaded: bytes that the loop of a matrix kernel loads for each multiply-add.
        copied: those of them that the copy engine writes to shared memory.
    """

    capability: int
    warps: int
    stages: int
    registers: int
    shared: int
    resident: int | None = None
    loaded: float = 0.0
    copied: float = 0.0

    @property
    def blocks(self) -> int:
        """Blocks that run together on a multiprocessor."""
        registers = math.ceil(max(self.registers, 1) / 8) * 8 * 32 * self.warps
        by_shared = _SHARED[self.capability] // (self.shared + 1024)
        fit = max(1, min(65536 // registers, 64 // self.warps, 32, by_shared))
        return fit if self.resident is None else min(fit, self.resident)


def in_flight(code: Code, launch: Launch) -> int:
    """Return the bytes that a multiprocessor can have asked for at once."""
    ahead = max(1, launch.stages - 1)
    return code.main.loaded * 32 * launch.warps * launch.blocks * ahead


def instructions_per_16_bytes(code: Code) -> float:
    """Return the main loop's instructions for 16 bytes of a thread; 0 where it moves none."""
    return 16 * code.main.instructions / code.main.moved if code.main.moved else 0.0


def others_per_product(code: Code) -> float:
    """Return the main loop's other instructions for each matrix instruction."""
    main = code.main
    return (main.instructions - main.num_products) / main.num_products if main.num_products else 0.0


def asked_of_l2(launch: Launch) -> float:
    """Return the bytes a clock that products at their full rate ask the L2 cache for."""
    return launch.loaded * _WARP_GROUP


def asked_of_shared(code: Code, launch: Launch) -> float:
    """Return the bytes a clock that products at their full rate ask shared memory for."""
    clocks = _product_clocks(code.main, launch.warps)
    return _shared_bytes(code.main, launch) / clocks if clocks else 0.0


def share_of_limit(code: Code, launch: Launch) -> float:
    """Return the expected share of an H100's limit: of its arithmetic or its bandwidth."""
    if code.main.num_products:
        return _share_of_products(code, launch)
    if code.main.multiply_adds > code.main.instructions / 2:
        return code.main.multiply_adds / code.main.instructions  # a product in float32
    if not code.main.moved:
        return 0.0
    # A clock of a scheduler issues an instruction, and does the eighth of a warp's exponential.
    clocks = max(code.main.instructions, _FUNCTION_CLOCKS * code.main.functions)
    per_16 = 16 * clocks / code.main.moved
    stored = (code.main.moved - code.main.loaded) * 32 * launch.warps * launch.blocks
    return min(1.0, _ISSUE_BUDGET / per_16, (in_flight(code, launch) + stored) / _IN_FLIGHT)


def _share_of_products(code: Code, launch: Launch) -> float:
    main = code.main
    products = _STEPS * _product_clocks(main, launch.warps)
    steps = _STEPS * _other_clocks(main, launch.warps)
    rest = code.rest * launch.warps / 4
    loads = _STEPS * _multiply_adds(main, launch.warps) * launch.loaded / _L2
    shared = _STEPS * _shared_bytes(main, launch) / _SHARED_BANDWIDTH
    if launch.blocks > 1:
        # One block's products run under what another does.
        return products / max(products, steps + rest, loads, shared)
    if main.pending:
        return products / (max(products, steps, loads, shared) + rest)
    # What is waited for lasts as long as its operands take; other traffic goes on meanwhile.
    operands = _STEPS * _operand_bytes(main, launch.warps) / _SHARED_BANDWIDTH
    return products / (max(max(products, operands) + steps, loads, shared) + rest)


def _shared_bytes(loop: Loop, launch: Launch) -> float:
    """Return what a pass of a block moves in and out of shared memory."""
    copied = _multiply_adds(loop, launch.warps) * launch.copied
    return copied + _operand_bytes(loop, launch.warps) + loop.shared * 32 * launch.warps


def _operand_bytes(loop: Loop, warps: int) -> float:
    # Each of several warp groups reads its operands itself.
    return loop.operands * warps / 4


def _product_clocks(loop: Loop, warps: int) -> float:
    """Return the clocks of a pass's products, of all warps of a block."""
    return sum(
        work / (_WARP_GROUP if rows == 64 else _WARP) for rows, work in _products(loop, warps)
    )


def _multiply_adds(loop: Loop, warps: int) -> float:
    return sum(work for _, work in _products(loop, warps))


def _products(loop: Loop, warps: int) -> Iterator[tuple[int, float]]:
    """Yield rows of each kind of matrix instruction, and the multiply-adds that a block does."""
    for shape, count in loop.products.items():
        rows, columns, depth = map(int, shape.split("x"))
        # A warp-group instruction is one for four warps.
        yield rows, rows * columns * depth * count * (warps / 4 if rows == 64 else warps)


def _other_clocks(loop: Loop, warps: int) -> float:
    issued = loop.instructions - loop.num_products
    return max(issued, _FUNCTION_CLOCKS * loop.functions) * warps / 4

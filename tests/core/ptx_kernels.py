"""Kernels written by hand that the tests of ``tools/ptx_machine`` execute, and bits of numbers."""

from __future__ import annotations

import math
import random
import re
import struct
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from ptx_machine import MachineError, Program
from ptx_machine.gpu import argument

KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry kernel(.param .u64 to, .param .u64 from, .param .align 64 .b8 map[128])
{{
  .reg .pred %p<20>;
  .reg .b16 %h<20>;
  .reg .b32 %r<200>;
  .reg .b64 %d<20>;
  .reg .b32 %tid, %warp, %lane;
  ld.param.b64 %d1, [to];
  ld.param.b64 %d2, [from];
  cvta.param.u64 %d0, map;
  mov.u32 %tid, %tid.x;
  shr.u32 %warp, %tid, 5;
  and.b32 %lane, %tid, 31;
  mul.wide.u32 %d3, %tid, 4;
  add.s64 %d4, %d1, %d3;
  add.s64 %d5, %d2, %d3;
  mov.b32 %r0, memory;
  shl.b32 %r1, %tid, 2;
  add.s32 %r1, %r0, %r1;
  setp.eq.s32 %p0, %tid, 0;
  {body}
  ret;
}}
"""


def run(
    body: str,
    result: torch.Tensor,
    values: torch.Tensor | None = None,
    *,
    threads: int = 32,
    shared: int = 4096,
    seeds: int | Sequence[int] = 1,
    tensor_map: bytes = bytes(128),
) -> torch.Tensor:
    """Execute one block with each seed, and return ``result``, which every seed must agree on.

    Of the registers ``%d1`` is the address of ``result``, ``%d2`` that of ``values``, ``%d4`` and
    ``%d5`` are the same with four bytes per thread, ``%r0`` is the begin of shared memory, ``%r1``
    has four bytes per thread of it, ``%p0`` is true in thread 0 and ``%d0`` is the tensor map.
    """
    values = torch.zeros(1) if values is None else values
    program = Program(KERNEL.format(body=body))
    found = None
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        result.zero_()
        program.run(
            grid=(1, 1, 1),
            threads=threads,
            arguments=[argument("*", result), argument("*", values), tensor_map],
            tensors=[result, values],
            shared=shared,
            seed=seed,
        )
        octets = result.view(torch.uint8).clone()
        assert found is None or torch.equal(found, octets), f"seed {seed} has another result"
        found = octets
    return result


def refused(body: str, says: str, result: torch.Tensor, seeds: int = 6, **options: object) -> None:
    """Require that each of several seeds finds what is wrong, with its line of the PTX."""
    for seed in range(seeds):
        with pytest.raises(MachineError, match=says) as error:
            run(body, result, seeds=[seed], **options)  # type: ignore[arg-type]
        assert re.search(r"PTX line \d+", str(error.value))


def signed(value: int, width: int) -> int:
    """Return the number of two's complement that the lowest bits stand for."""
    return (value + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))


Row = tuple[int, ...]  # bits of the operands, and of the result
BITS = {"p": 1, "h": 16, "r": 32, "d": 64}


def computed(opcode: str, signature: str, rows: Sequence[Row], result: str = "{0}") -> list[int]:
    """Return the bits of a result for each row, which a thread computes.

    Args:
        opcode: for example ``add.s32``.
        signature: the registers of result and operands: (p)redicate, h (16), r (32) or d (64).
        rows: the operands.
        result: how the result is written: ``{0}|%p3`` has a second predicate.
    """
    lines = ["mul.wide.u32 %d3, %tid, 8; add.s64 %d4, %d1, %d3; add.s64 %d5, %d2, %d3;"]
    for i, kind in enumerate(signature[1:]):
        place = f"[%d5+{i * 8 * len(rows)}]"
        if kind == "p":
            lines.append(f"ld.global.b32 %r9, {place}; setp.ne.b32 %p{10 + i}, %r9, 0;")
        else:
            lines.append(f"ld.global.b{BITS[kind]} %{kind}{10 + i}, {place};")
    operands = ", ".join(f"%{kind}{10 + i}" for i, kind in enumerate(signature[1:]))
    target = f"%{signature[0]}6"
    lines.append(f"{opcode} {result.format(target)}, {operands};")
    if signature[0] == "p":
        lines.append("selp.b32 %r6, 1, 0, %p6;")
        if "|" in result:
            lines.append("selp.b32 %r7, 2, 0, %p7; or.b32 %r6, %r6, %r7;")
    kind = signature[0].replace("p", "r")
    lines.append(f"st.global.b{BITS[kind]} [%d4], %{kind}6;")
    columns = [[row[i] for row in rows] for i in range(len(signature) - 1)]
    values = torch.tensor([signed(x, 64) for column in columns for x in column])
    found = torch.zeros(len(rows), dtype=torch.int64)
    run("\n".join(lines), found, values, threads=len(rows))
    return [x & (1 << 64) - 1 for x in found.tolist()]


def check(opcode: str, signature: str, rows: Sequence[Row], result: str = "{0}") -> None:
    """Compare the results with the last number of each row."""
    found = computed(opcode, signature, rows, result)
    wrong = [
        f"{opcode} {[hex(x) for x in row[:-1]]}: {got:#x}, not {row[-1]:#x}"
        for row, got in zip(rows, found, strict=True)
        if got != row[-1]
    ]
    assert not wrong, "\n".join(wrong)


# Bits of significand (the first is implied) and of exponent.
FORMATS = {"bf16": (8, 8), "f16": (11, 5), "f32": (24, 8), "f64": (53, 11)}


def encoded(value: Fraction | float, kind: str) -> int:
    """Return the bits of a number rounded to nearest, ties to even, in exact arithmetic."""
    precision, exponent_bits = FORMATS[kind]
    width, bias = precision + exponent_bits, 2 ** (exponent_bits - 1) - 1
    infinity = (2**exponent_bits - 1) << (precision - 1)
    sign = math.copysign(1, value) < 0 if isinstance(value, float) else value < 0
    top = int(sign) << (width - 1)
    if isinstance(value, float) and not math.isfinite(value):
        return top | infinity if math.isinf(value) else (1 << (width - 1)) - 1
    exact = abs(Fraction(value))
    if not exact:
        return top
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    exponent -= exact < Fraction(2) ** exponent
    exponent = max(exponent, 1 - bias)
    scaled = round(exact / Fraction(2) ** (exponent - precision + 1))  # ties to even
    return top | min(((exponent + bias - 1) << (precision - 1)) + scaled, infinity)


def decoded(bits: int, kind: str) -> float:
    """Return the number that bits stand for."""
    if kind == "bf16":
        return decoded(bits << 16, "f32")
    form, size = {"f16": ("<e", 2), "f32": ("<f", 4), "f64": ("<d", 8)}[kind]
    return float(struct.unpack(form, bits.to_bytes(size, "little"))[0])


def finite(kind: str, count: int, seed: int = 0, spread: int = 30) -> list[int]:
    """Return the bits of random numbers, of both signs and exponents within ``spread``."""
    precision, exponent_bits = FORMATS[kind]
    generator, middle = random.Random(seed), 2 ** (exponent_bits - 1) - 1
    spread = min(spread, middle - 1)
    return [
        generator.getrandbits(1) << (precision + exponent_bits - 1)
        | (middle + generator.randint(-spread, spread)) << (precision - 1)
        | generator.getrandbits(precision - 1)
        for _ in range(count)
    ]


def tensor_map(
    address: int,
    swizzle: int,
    element_bytes: int,
    element_type: int,
    block: Sequence[int],
    shape: Sequence[int],
    strides: Sequence[int],
    padding: int,
) -> bytes:
    """Return a tensor map as the machine reads it: ``TensorMap`` of ``tensor_map.h``."""
    if address % 16 or any(stride * element_bytes % 16 for stride in strides[:-1]):
        raise ValueError(f"a tensor map wants 16 bytes: address {address:#x}, strides {strides}")

    def five(values: Sequence[int]) -> list[int]:
        return [*values, *[0] * (5 - len(values))]

    sizes = (*five(block), *five(shape), *five(strides))
    packed = struct.pack(
        "<QBBBB10I5Q", address, swizzle, element_bytes, len(shape), padding, *sizes
    )
    return packed.ljust(128, b"\0")

"""Matrices of the PTX machine: fragments, layouts and descriptors by the manual's tables."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ptx_kernels import refused, run

pytestmark = pytest.mark.ci  # the machine is compiled first

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-6, 7, shape, generator=generator).float()


# ---- ldmatrix and stmatrix


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("order", ["", ".trans"])
def test_matrices_of_8_rows(count: int, order: str) -> None:
    """Thread 8 m + r has the address of row r of matrix m; other addresses are ignored."""
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(2)).int() * 16
    addresses = slots.clone()
    addresses[8 * count :] = 3
    elements = torch.arange(count * 64, dtype=torch.int16).view(count, 8, 8)
    memory = torch.full((32, 8), -1, dtype=torch.int16)
    memory[slots[: 8 * count].long() // 16] = elements.view(-1, 8)
    # Register m of thread t: the elements 2 (t % 4) and the next of row t / 4 of matrix m.
    t = torch.arange(32)
    rows, columns = t // 4, t % 4 * 2
    taken = elements.transpose(1, 2) if order else elements
    fragments = torch.stack([taken[:, rows, columns], taken[:, rows, columns + 1]], 2)
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    what = f"sync.aligned.m8n8.x{count}{order}.shared.b16"
    store = "".join(f"st.global.b32 [%d4+{128 * i}], %r{10 + i};" for i in range(count))
    values = torch.cat([addresses, memory.view(torch.int32).flatten()])
    fill = "".join(
        f"ld.global.b32 %r3, [%d5+{128 * i + 128}]; st.shared.b32 [%r1+{128 * i}], %r3;"
        for i in range(4)
    )
    body = f"ld.global.b32 %r2, [%d5]; add.s32 %r2, %r2, %r0; {fill} bar.warp.sync -1;"
    found = run(
        f"{body} ldmatrix.{what} {{{registers}}}, [%r2]; {store}",
        torch.zeros(count, 32, dtype=torch.int32),
        values,
    )
    assert torch.equal(found.view(torch.int16).view(count, 32, 2), fragments)

    load = "".join(f"ld.global.b32 %r{10 + i}, [%d5+{128 * i + 128}];" for i in range(count))
    back = "".join(
        f"ld.shared.b32 %r3, [%r1+{128 * i}]; st.global.b32 [%d4+{128 * i}], %r3;" for i in range(4)
    )
    fill = "".join(f"st.shared.b32 [%r1+{128 * i}], -1;" for i in range(4))
    stored = run(
        f"ld.global.b32 %r2, [%d5]; add.s32 %r2, %r2, %r0; {load} {fill}"
        f"bar.warp.sync -1; stmatrix.{what} [%r2], {{{registers}}}; bar.warp.sync -1; {back}",
        torch.zeros(4, 32, dtype=torch.int32),
        torch.cat([addresses, fragments.contiguous().view(torch.int32).flatten()]),
    )
    assert torch.equal(stored.view(torch.int16).view(32, 8), memory)


@pytest.mark.parametrize("instruction", ["ldmatrix", "stmatrix"])
def test_rows_of_matrices_have_16_bytes_aligned(instruction: str) -> None:
    operands = "{%r3}, [%r2]" if instruction == "ldmatrix" else "[%r2], {%r3}"
    body = f"""
      mov.b32 %r3, 0; shl.b32 %r2, %lane, 4; add.s32 %r2, %r2, OFFSET;
      {instruction}.sync.aligned.m8n8.x1.shared.b16 {operands};
    """
    refused(body.replace("OFFSET", "8"), "is not aligned", torch.zeros(1))
    refused(body.replace("OFFSET", "4096"), "of 4096", torch.zeros(1))


# ---- mma


@pytest.mark.parametrize("kind", TYPES)
def test_products_of_a_warp(kind: str) -> None:
    """mma.m16n8k16: registers of the operands by the manual's tables of fragments."""
    a, b, c = numbers(16, 16), numbers(16, 8, seed=1), numbers(16, 8, seed=2)
    fragments: list[torch.Tensor] = []
    for lane in range(32):
        group, member = lane // 4, lane % 4
        for i in range(8):  # a0 to a7
            row = group if i < 2 or 4 <= i < 6 else group + 8
            fragments.append(a[row, member * 2 + (i & 1) + (8 if i >= 4 else 0)])
        for i in range(4):  # b0 to b3
            fragments.append(b[member * 2 + (i & 1) + (8 if i >= 2 else 0), group])
    packed = torch.stack(fragments).to(TYPES[kind]).view(torch.int32).view(32, 6)
    places = [
        (lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1))
        for i in range(4)
        for lane in range(32)
    ]
    rows, columns = (list(x) for x in zip(*places, strict=True))
    values = torch.cat([packed.T.flatten(), c[rows, columns].view(torch.int32)])
    load = "".join(f"ld.global.b32 %r{10 + i}, [%d5+{128 * i}];" for i in range(10))
    store = "".join(f"st.global.b32 [%d4+{128 * i}], %r{20 + i};" for i in range(4))
    body = f"""{load}
      mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r20, %r21, %r22, %r23}},
        {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};
      {store}"""
    found = run(body, torch.zeros(128), values)
    assert torch.equal(found, (a @ b + c)[rows, columns])


def test_products_of_tf32() -> None:
    """mma.m16n8k8: registers of the operands by the manual's tables of fragments."""
    a, b, c = numbers(16, 8), numbers(8, 8, seed=1), numbers(16, 8, seed=2)
    lanes = torch.arange(32)
    group, member = lanes // 4, lanes % 4
    left = [a[group + i % 2 * 8, member + i // 2 * 4] for i in range(4)]
    right = [b[member + i * 4, group] for i in range(2)]
    sums = [c[group + i // 2 * 8, member * 2 + i % 2] for i in range(4)]
    values = torch.cat([*left, *right, *sums]).view(torch.int32)
    values[: 6 * 32] |= 1  # a bit that is not read
    load = "".join(f"ld.global.b32 %r{10 + i}, [%d5+{128 * i}];" for i in range(10))
    store = "".join(f"st.global.b32 [%d4+{128 * i}], %r{20 + i};" for i in range(4))
    body = f"""{load}
      mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{%r20, %r21, %r22, %r23}},
        {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};
      {store}"""
    found = run(body, torch.zeros(128), values)
    product = a @ b + c
    places = [product[group + i // 2 * 8, member * 2 + i % 2] for i in range(4)]
    assert torch.equal(found, torch.cat(places))


# ---- wgmma

CODES = {0: 0, 128: 1, 64: 2, 32: 3}  # of the swizzle, in bits 62 and 63 of a descriptor


def offset(swizzle: int, k_major: bool, row: int, k: int, leading: int, stride: int) -> int:
    """Return the byte of an element in the manual's canonical layout, before the swizzle.

    With T = 8 elements of 16 bytes in all, and W = 1, 2, 4 or 8 of them for a swizzle of none, 32,
    64 or 128 bytes, the layouts are in K-major ((8, m), (T, 2 k)) : ((W T, SBO), (1, LBO or T)), in
    MN-major ((T, W, m), (8, k)) : ((1, T, LBO), (W T, SBO)), without swizzle with SBO and LBO
    exchanged.
    """
    wide = max(swizzle // 16, 1)
    if k_major:
        column = k // 8 * (16 if swizzle else leading) + k % 8 * 2
        return row % 8 * wide * 16 + row // 8 * stride + column
    across, down = (leading, stride) if swizzle else (stride, leading)
    atom = 8 * wide
    return (
        row % 8 * 2
        + row % atom // 8 * 16
        + row // atom * across
        + k % 8 * wide * 16
        + k // 8 * down
    )


def image(
    matrix: torch.Tensor, swizzle: int, k_major: bool, start: int, leading: int, stride: int
) -> tuple[torch.Tensor, int]:
    """Return shared memory that holds a matrix (rows of A, columns of B), and its descriptor.

    ``start`` is a multiple of 1024; Swizzle<n, 4, 3> exchanges bits 4 and up by bits 7 and up.
    """
    memory = torch.full((16384,), 0x7FFF, dtype=torch.int16)
    bits = matrix.view(torch.int16)
    for row, k in itertools.product(range(matrix.shape[0]), range(matrix.shape[1])):
        byte = offset(swizzle, k_major, row, k, leading, stride)
        byte ^= (byte >> 7) % max(swizzle // 16, 1) << 4
        memory[byte // 2] = bits[row, k]
    descriptor = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | CODES[swizzle] << 62
    return memory, descriptor


FILL = """
  mov.b32 %r2, 0;
  $FILL: shl.b32 %r3, %r2, 9; add.s32 %r3, %r3, %r1; cvt.u64.u32 %d6, %r3; add.s64 %d6, %d6, %d2;
  ld.global.b32 %r4, [%d6]; st.shared.b32 [%r3], %r4;
  add.s32 %r2, %r2, 1; setp.lt.s32 %p1, %r2, 128; @%p1 bra $FILL;
"""
FENCE = "fence.proxy.async.shared::cta;"
READY = f"{FENCE} bar.sync 0;"


def accumulators(n: int) -> tuple[str, str]:
    """Return the list of registers and the stores of a product of n columns."""
    names = [f"%r{40 + i}" for i in range(n // 2)]
    stores = "".join(f"st.global.b32 [%d4+{512 * i}], {name};" for i, name in enumerate(names))
    return "{" + ", ".join(names) + "}", stores


def gathered(found: torch.Tensor, n: int) -> torch.Tensor:
    """Return the 64 rows of a product from register i of thread t, by the manual's table of D."""
    result = torch.zeros(64, n)
    for i, t in itertools.product(range(n // 2), range(128)):
        row = t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2)
        result[row, i // 4 * 8 + t % 4 * 2 + i % 2] = found.view(n // 2, 128)[i, t]
    return result


def product(n: int, kind: str, a: str, b: str, signs: str, adds: str = "1") -> str:
    names, stores = accumulators(n)
    begin = "".join(f"mov.b32 {name}, 0f40400000;" for name in names[1:-1].split(", "))
    return f"""{begin}
      setp.ne.b32 %p3, {adds}, 0;
      wgmma.fence.sync.aligned;
      wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {names}, {a}, {b}, %p3, {signs};
      wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; {stores}"""


LAYOUTS = {  # swizzle, K-major -> leading and stride byte offsets of 64 rows or n columns
    (0, True): (4096, 128 + 16),
    (32, True): (16, 512),
    (64, True): (16, 512),
    (128, True): (16, 1024),
    (0, False): (8192, 256),
    (32, False): (2048, 256),
    (64, False): (1024, 512),
    (128, False): (4096, 1024),
}


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("a_major", [True, False])
@pytest.mark.parametrize("b_major", [True, False])
def test_products_of_shared_memory(swizzle: int, a_major: bool, b_major: bool) -> None:
    kind = "f16" if a_major else "bf16"
    other = {0: 64, 64: 0, 32: 128, 128: 32}[swizzle]  # of B
    n = {0: 72, 32: 8, 64: 128, 128: 24}[swizzle]
    a, b = numbers(64, 16), numbers(n, 16, seed=1)
    left, left_at = image(a.to(TYPES[kind]), swizzle, a_major, 0, *LAYOUTS[swizzle, a_major])
    right, right_at = image(b.to(TYPES[kind]), other, b_major, 32768, *LAYOUTS[other, b_major])
    values = torch.cat([left, right])
    for negated, adds in ((1, 1), 0), ((-1, 1), 1), ((1, -1), 1), ((-1, -1), 0):
        immediates = f"{negated[0]}, {negated[1]}, {int(not a_major)}, {int(not b_major)}"
        body = f"""{FILL} {READY} mov.b64 %d7, {left_at}; mov.b64 %d8, {right_at};
          {product(n, kind, "%d7", "%d8", immediates, str(adds))}"""
        found = run(body, torch.zeros(64 * n), values, threads=128, shared=65536)
        expected = negated[0] * negated[1] * (a @ b.T) + 3 * adds
        assert torch.equal(gathered(found, n), expected)


@pytest.mark.parametrize(("swizzle", "step"), [(128, 1), (128, 3), (64, 1)])
def test_a_descriptor_begins_within_a_swizzled_row(swizzle: int, step: int) -> None:
    """The sum begins 16 elements later when the start address of a K-major matrix does 32 bytes."""
    wide = swizzle // 2
    a, b = numbers(64, wide), numbers(16, wide, seed=1)
    left, left_at = image(a.bfloat16(), swizzle, True, 0, 16, 8 * swizzle)
    right, right_at = image(b.bfloat16(), swizzle, True, 32768, 16, 8 * swizzle)
    body = f"""{FILL} {READY} mov.b64 %d7, {left_at + 2 * step}; mov.b64 %d8, {right_at + 2 * step};
      {product(16, "bf16", "%d7", "%d8", "1, 1, 0, 0", "0")}"""
    found = run(
        body, torch.zeros(64 * 16), torch.cat([left, right]), threads=128, shared=65536, seeds=2
    )
    part = slice(16 * step, 16 * step + 16)
    assert torch.equal(gathered(found, 16), a[:, part] @ b[:, part].T)


@pytest.mark.parametrize("kind", TYPES)
def test_products_with_a_in_registers(kind: str) -> None:
    a, b = numbers(64, 16), numbers(16, 16, seed=1)
    right, descriptor = image(b.to(TYPES[kind]), 32, True, 32768, *LAYOUTS[32, True])
    halves = []
    for i, t in itertools.product(range(4), range(128)):  # register i of thread t
        row, k = t // 32 * 16 + t % 32 // 4 + 8 * (i % 2), t % 4 * 2 + 8 * (i // 2)
        halves += [a[row, k], a[row, k + 1]]
    fragments = torch.stack(halves).to(TYPES[kind]).view(torch.int16)
    values = torch.cat([fragments, torch.zeros(16384 - len(fragments), dtype=torch.int16), right])
    load = "".join(f"ld.global.b32 %r{20 + i}, [%d5+{512 * i}];" for i in range(4))
    body = f"""{FILL} {READY} {load} mov.b64 %d8, {descriptor};
      {product(16, kind, "{%r20, %r21, %r22, %r23}", "%d8", "-1, 1, 0")}"""
    found = run(body, torch.zeros(64 * 16), values, threads=128, shared=65536, seeds=2)
    assert torch.equal(gathered(found, 16), 3 - a @ b.T)


PRODUCT = f"""{FILL} {READY} mov.b64 %d7, DESCRIPTOR; mov.b64 %d8, DESCRIPTOR;
  {product(16, "bf16", "%d7", "%d8", "1, 1, 0, 0", "0")}"""
SOME = "setp.lt.s32 %p5, %warp, 3; @%p5 wgmma.mma_async"
FAULTS = {
    ("wgmma.mma_async", SOME): "only some of the four warps",
    (FENCE, ""): "without fence.proxy.async",
    ("bar.sync 0;", ""): "without a barrier between|nobody has written|without fence.proxy.async",
    ("wgmma.fence.sync.aligned;", ""): "without wgmma.fence",
    ("wgmma.wait_group.sync.aligned 0;", ""): "accumulator of a wgmma before the wait",
    ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"): "before the wait",
    ("wgmma.wait_group.sync.aligned 0;", "mov.b32 %r41, 0;"): "accumulator of a wgmma|under way",
    ("wgmma.commit_group.sync.aligned;", ""): "accumulator of a wgmma before the wait",
    (", 1, 1, 0, 0;", ", 1, 1, 0;"): "number of operands",
    ("%r47}", "%r46, %r47, %r48}"): "number of operands or registers",
}


@pytest.mark.parametrize("change", FAULTS)
def test_faults_of_products_are_found(change: tuple[str, str]) -> None:
    options: dict[str, Any] = {
        "values": torch.zeros(16384),
        "threads": 128,
        "shared": 65536,
    }
    body = PRODUCT.replace("DESCRIPTOR", str(image(torch.zeros(1, 1), 128, True, 0, 16, 1024)[1]))
    run(body, torch.zeros(1024), seeds=20 if "fence" in change[0] else 2, **options)
    assert change[0] in body
    refused(body.replace(*change), FAULTS[change], torch.zeros(1024), **options)


def test_descriptors_that_are_refused() -> None:
    for start, says in ((65536 - 512, "of 65536"), (1 << 49, "base offset")):
        descriptor = start if start >> 49 else start >> 4 | 1 << 16 | 64 << 32 | 1 << 62
        body = PRODUCT.replace("DESCRIPTOR", str(descriptor))
        refused(body, says, torch.zeros(1024), values=torch.zeros(16384), threads=128, shared=65536)

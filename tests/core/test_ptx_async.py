"""Copies that land late, barriers of memory, and accesses that the PTX machine must refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ptx_kernels import refused, run, tensor_map

pytestmark = pytest.mark.ci  # the machine is compiled first

SEEDS = 20  # of what is right: no false alarm
OUT = torch.zeros(64, dtype=torch.int32)
VALUES = torch.arange(1, 1025, dtype=torch.int32)

# ---- cp.async


@pytest.mark.parametrize("cache", ["ca", "cg"])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_fewer_bytes_than_asked_for_are_filled_with_zeros(cache: str, size: int) -> None:
    """Thread i copies min(i, size) bytes."""
    body = f"""
      shl.b32 %r2, %lane, 4; cvt.u64.u32 %d6, %r2; add.s64 %d6, %d6, %d2; add.s32 %r3, %r0, %r2;
      min.u32 %r4, %lane, {size};
      cp.async.{cache}.shared.global [%r3], [%d6], {size}, %r4;
      cp.async.commit_group; cp.async.wait_group 0;
    """
    for i in range(size // 4):
        body += f"ld.shared.b32 %r5, [%r3+{4 * i}]; st.global.b32 [%d4+{128 * i}], %r5;"
    result = torch.zeros(size // 4, 32, dtype=torch.int32)
    if cache == "cg" and size < 16:
        return refused(body, "cp.async of", result, values=VALUES)
    found = run(body, result, VALUES, seeds=SEEDS)
    taken = VALUES[:128].view(torch.uint8).view(32, 16)[:, :size].clone()
    for i in range(size):
        taken[i, i:] = 0
    assert torch.equal(found.T.flatten().view(torch.uint8).view(32, size), taken)
    refused(
        body.replace(f"min.u32 %r4, %lane, {size}", "mov.u32 %r4, 32"), "cp.async of 32", result
    )
    return None


def copy(group: int) -> str:
    return f"""cp.async.ca.shared.global [%r1+{128 * group}], [%d5+{128 * group}], 4;
      cp.async.commit_group;"""


def take(group: int) -> str:
    return f"ld.shared.b32 %r4, [%r1+{128 * group}]; st.global.b32 [%d4+{128 * group}], %r4;"


def test_groups_of_copies_are_waited_for_in_order() -> None:
    begin = copy(0) + copy(1) + copy(2)
    right = (
        begin
        + "cp.async.wait_group 2;" + take(0)
        + "cp.async.wait_group 1;" + take(1)
        + "cp.async.wait_group 0;" + take(2)
    )  # fmt: skip
    result = torch.zeros(96, dtype=torch.int32)
    assert torch.equal(run(right, result, VALUES, seeds=SEEDS), VALUES[:96])
    says = "before the wait for its asynchronous copy"
    for left, group in ((2, 1), (1, 2), (3, 0)):
        refused(begin + f"cp.async.wait_group {left};" + take(group), says, result, values=VALUES)
    # A copy of no group yet is in none that is waited for.
    late = begin + "cp.async.ca.shared.global [%r1+512], [%d5], 4; cp.async.wait_group 0;" + take(4)
    refused(late, says, torch.zeros(256, dtype=torch.int32), values=VALUES)
    over = copy(0) + "st.shared.b32 [%r1], 0; cp.async.wait_group 0;"
    refused(over, "to which an asynchronous copy is under way", result, values=VALUES)


def test_a_copy_to_what_another_warp_writes_or_reads() -> None:
    first = "setp.eq.s32 %p1, %warp, 0; and.b32 %r2, %lane, 31; shl.b32 %r2, %r2, 2;"
    both = "add.s32 %r3, %r0, %r2; @!%p1 st.shared.b32 [%r3], 7; bar.sync 0;"
    read = "@!%p1 ld.shared.b32 %r4, [%r3]; bar.sync 0;"
    late = "@%p1 cp.async.ca.shared.global [%r3], [%d5], 4; cp.async.commit_group;"
    late += "cp.async.wait_group 0; @%p1 ld.shared.b32 %r4, [%r3]; st.global.b32 [%d4], %r4;"
    found = run(first + both + read + late, OUT.clone(), VALUES, threads=64, seeds=SEEDS)
    assert found.tolist() == [*range(1, 33), *[7] * 32]
    says = "without a barrier between|copy is under way|before the wait"
    for wrong in (
        both.replace("bar.sync 0;", "") + late,
        both + read.replace("bar.sync 0;", "") + late,
    ):
        refused(first + wrong, says, OUT, values=VALUES, threads=64)


# ---- mbarrier and boxes of tensors

BARRIER = 32768
INIT = f"@%p0 mbarrier.init.shared::cta.b64 [%r0+{BARRIER}], 1; bar.sync 0;"


def wait(parity: str = "0", label: str = "WAIT") -> str:
    return f"""${label}: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r0+{BARRIER}], {parity};
      @!%p2 bra.uni ${label};"""


def box(coordinates: str, size: int, rank: int, target: str = "%r0") -> str:
    """Return what thread 0 does to copy a box of some bytes."""
    return f"""
      @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0+{BARRIER}], {size};
      @%p0 cp.async.bulk.tensor.{rank}d.shared::cta.global.mbarrier::complete_tx::bytes
        [{target}], [%d0, {{{coordinates}}}], [%r0+{BARRIER}];"""


def all_of(size: int) -> str:
    """Return what copies shared memory to the result, with 32 threads."""
    return "".join(
        f"ld.shared.b32 %r4, [%r1+{i}]; st.global.b32 [%d4+{i}], %r4;" for i in range(0, size, 128)
    )


def swizzled(memory: torch.Tensor, mode: int) -> torch.Tensor:
    """Exchange pieces of 16 bytes: bits 4 and up of the address by bits 7 and up."""
    pieces = memory.view(-1, 16)
    at = torch.arange(len(pieces))
    result = torch.empty_like(pieces)
    result[at ^ (at >> 3) % 2**mode] = pieces
    return result.flatten()


def taken(x: torch.Tensor, begin: list[int], block: list[int]) -> torch.Tensor:
    """Return a box of a tensor; what is outside is zero."""
    result = torch.zeros(block, dtype=x.dtype)
    inside = [
        slice(max(-b, 0), max(min(size, n - b), 0))
        for b, size, n in zip(begin, block, x.shape, strict=True)
    ]
    source = [slice(max(b, 0), max(b + size, 0)) for b, size in zip(begin, block, strict=True)]
    result[tuple(inside)] = x[tuple(source)]
    return result


BOXES = [  # type, shape, stride of a row, box, begin, swizzle
    (torch.int32, [100], 1, [32], [16], 0),
    (torch.int32, [99], 1, [32], [80], 0),
    (torch.int32, [99], 1, [32], [-3], 0),
    (torch.int16, [77], 1, [64], [71], 0),
    (torch.int16, [20, 64], 64, [8, 64], [3, 0], 3),
    (torch.int16, [20, 64], 64, [16, 32], [10, 40], 2),
    (torch.int16, [20, 60], 72, [16, 16], [-5, 50], 1),
    (torch.int16, [20, 61], 72, [16, 16], [-5, -3], 1),
    (torch.int16, [20, 61], 72, [16, 64], [8, 5], 3),
    (torch.int32, [20, 36], 36, [8, 8], [17, 33], 1),
    (torch.int32, [20, 36], 36, [8, 16], [-9, 0], 2),
    (torch.uint8, [20, 100], 112, [4, 128], [1, -7], 3),
    (torch.int16, [5, 9, 40], 40, [2, 8, 32], [-1, 4, 20], 2),
    (torch.int16, [5, 9, 64], 64, [2, 8, 64], [4, -3, -2], 3),
    (torch.int32, [3, 4, 20], 20, [2, 4, 4], [2, 2, 17], 0),
]


def description(
    x: torch.Tensor, block: list[int], swizzle: int = 0, padding: int = 0, extra: int = 0
) -> bytes:
    element = x.element_size()
    return tensor_map(
        x.data_ptr() + extra, swizzle, element, 0, block, x.shape, x.stride(), padding
    )


@pytest.mark.parametrize("case", range(len(BOXES)))
def test_boxes_of_tensors(case: int) -> None:
    """Zeros come from outside of the tensor, not what lies there in memory."""
    dtype, shape, pitch, block, begin, swizzle = BOXES[case]
    whole = torch.arange(1, math.prod(shape[:-1]) * max(pitch, shape[-1]) + 1).to(dtype)
    if len(shape) > 1:
        whole = whole.view(*shape[:-1], pitch)
    x = whole[..., : shape[-1]]
    size = math.prod(block) * x.element_size()
    coordinates = ", ".join(str(b) for b in reversed(begin))
    body = INIT + box(coordinates, size, len(shape)) + wait() + all_of(size)
    found = run(
        body,
        torch.zeros(size // 4, dtype=torch.int32),
        whole,
        shared=BARRIER + 8,
        seeds=SEEDS,
        tensor_map=description(x, block, swizzle),
    )
    expected = swizzled(taken(x, begin, block).flatten().view(torch.uint8), swizzle)
    assert torch.equal(found.view(torch.uint8), expected)


IMAGE = torch.arange(1, 2049, dtype=torch.int32).view(64, 32)
ROW = description(IMAGE, [1, 32])


def phases(parity: str = "and.b32 %r6, %r2, 1;", barrier: str = "bar.sync 0;") -> str:
    """Return a loop in which thread 0 brings a row of 128 bytes in each of four phases."""
    return f"""{INIT} mov.b32 %r2, 0;
      $LOOP: {parity}
      {box("0, %r2", 128, 2)} {wait("%r6")}
      shl.b32 %r7, %lane, 2; add.s32 %r7, %r7, %r0; ld.shared.b32 %r4, [%r7];
      mul.lo.s32 %r8, %r2, 128; cvt.u64.u32 %d6, %r8; add.s64 %d6, %d6, %d1;
      shl.b32 %r9, %lane, 2; cvt.u64.u32 %d7, %r9; add.s64 %d6, %d6, %d7; st.global.b32 [%d6], %r4;
      {barrier}
      add.s32 %r2, %r2, 1; setp.lt.s32 %p1, %r2, 4; @%p1 bra $LOOP;"""


def test_a_barrier_has_phases_of_alternating_parity() -> None:
    result = torch.zeros(4, 32, dtype=torch.int32)
    options: dict[str, Any] = {
        "values": IMAGE,
        "threads": 64,
        "shared": BARRIER + 8,
        "tensor_map": ROW,
    }
    assert torch.equal(run(phases(), result, seeds=SEEDS, **options), IMAGE[:4])
    # The parity of a phase that is not the present one: its wait is over at once, or never.
    for parity in ("mov.b32 %r6, 0;", "xor.b32 %r6, %r2, 1; and.b32 %r6, %r6, 1;"):
        says = "before the wait for its|nobody completes|without a barrier|nobody has written"
        refused(phases(parity), says, result, **options)
    # A box to what the other warp reads.
    refused(
        phases(barrier=""),
        "without a barrier between|before the wait for its|nobody completes",
        result,
        **options,
    )
    # The phase before the first one has passed.
    run(INIT + wait("1"), result, seeds=SEEDS, **options)


ONE = box("0, 0", 128, 2)
ARRIVE = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0+{BARRIER}], 0;"
INVALIDATE = f"@%p0 mbarrier.inval.shared::cta.b64 [%r0+{BARRIER}]; bar.sync 0;"
BOX_FAULTS = {
    "nobody arrives": (INIT + wait(), "nobody completes"),
    "too many bytes": (INIT + ONE.replace(", 128;", ", 144;") + wait(), "nobody completes"),
    "too few bytes": (INIT + ONE.replace(", 128;", ", 112;") + wait(), "nobody completes"),
    "one of two": ((INIT + ONE + wait()).replace(", 1; bar", ", 2; bar"), "nobody completes"),
    "no wait": (INIT + ONE + all_of(128), "before the wait|nobody has written|a copy"),
    "not initialised": (ONE + wait(), "not initialised"),
    "target": (INIT + box("0, 0", 128, 2, "%r0+64") + wait(), "no multiple of 128"),
    "outside": (INIT + box("0, 0", 128, 2, f"%r0+{BARRIER + 128}") + wait(), "of 32776"),
    "rank": (INIT + box("0", 128, 1) + wait(), "another rank"),
    "misaligned": (INIT.replace(f"{BARRIER}", f"{BARRIER - 4}") + wait(), "is not aligned"),
    "invalidated": (INIT + INVALIDATE + wait(), "not initialised"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOX_FAULTS)
def test_faults_of_boxes_are_found(name: str) -> None:
    body, says = BOX_FAULTS[name]
    refused(body, says, OUT, values=IMAGE, threads=64, shared=BARRIER + 8, tensor_map=ROW)


def test_faults_of_tensor_maps_are_found() -> None:
    body = INIT + ONE + wait()
    for described, says in (
        (description(IMAGE, [1, 32], swizzle=2), "not more than the swizzle"),
        (description(IMAGE, [1, 3]), "multiple of 16"),
        (description(IMAGE, [1, 32], padding=1), "pads with NaN"),
        (description(IMAGE, [1, 32], extra=-128), "global memory"),
        (bytes(128), "no tensor map"),
    ):
        refused(body, says, OUT, values=IMAGE, shared=BARRIER + 8, tensor_map=described)
    with pytest.raises(ValueError, match="16 bytes"):
        description(torch.zeros(8, 6), [8, 4])


# ---- bar.sync and memory

SPIN = f"""
  setp.eq.s32 %p1, %warp, 1; @%p1 bra $B; bar.sync 0; @%p0 {ARRIVE} bra $C;
  $B: {wait()} bar.sync 0; $C:"""
HANGS = {
    # Warp 1 waits for an arrival that comes behind the barrier of the block.
    INIT + SPIN: "no warp can go on|nobody completes",
    # Half of a warp arrives.
    "setp.lt.s32 %p1, %lane, 16; @%p1 bar.sync 0;": "a part of the lanes",
    "setp.lt.s32 %p1, %lane, 16; @%p1 bra $A; bar.sync 0; bra $B; $A: bar.sync 0; $B:": "a part of",
    "bar.sync 1;": "another barrier than 0",
}


@pytest.mark.parametrize("body", HANGS)
def test_barriers_that_a_warp_does_not_reach(body: str) -> None:
    refused(body, HANGS[body], OUT, threads=64, shared=BARRIER + 8)


def test_warps_that_have_ended_are_not_waited_for() -> None:
    body = "setp.eq.s32 %p1, %warp, 1; @%p1 ret; bar.sync 0; st.global.b32 [%d4], %tid;"
    found = run(body, OUT.clone(), threads=64, seeds=SEEDS)
    assert found.tolist() == [*range(32), *[0] * 32]
    body = "setp.lt.s32 %p1, %lane, 16; @%p1 ret; bar.sync 0; st.global.b32 [%d4], %tid;"
    assert run(body, OUT.clone(), threads=64, seeds=SEEDS)[16:32].tolist() == [*range(16, 32)]


VECTOR = "{%r2, %r3, %r4, %r5}"
ACCESSES = {
    "ld.global.b32 %r2, [%d2+2];": "not aligned",
    "ld.global.v2.b32 {%r2, %r3}, [%d2+4];": "not aligned",
    f"ld.global.v4.b32 {VECTOR}, [%d2+8];": "not aligned",
    "st.global.b16 [%d1+1], 0;": "not aligned",
    "ld.global.b8 %r2, [%d2+4096];": "4096 bytes behind the begin",
    "ld.global.b32 %r2, [%d2+-4];": "global memory",
    "st.global.b64 [%d1+256], 0;": "256 bytes behind the begin",
    "ld.global.b64 %d6, [0];": "global memory",
    "ld.shared.b32 %r2, [%r0+2];": "not aligned",
    "st.shared.v2.b32 [%r0+4], {%r2, %r3};": "not aligned",
    f"st.shared.v4.b32 [%r0+4088], {VECTOR};": "not aligned|of 4096",
    "st.shared.b32 [%r0+4096], 0;": "4096 of 4096",
    "st.shared.b32 [%r0+-4], 0;": "of 4096",
    "cp.async.ca.shared.global [%r0+4], [%d2], 8;": "not aligned",
    "cp.async.ca.shared.global [%r0], [%d2+4], 8;": "not aligned",
    "cp.async.cg.shared.global [%r0], [%d2+8], 16, 8;": "not aligned",
    "cp.async.ca.shared.global [%r0], [%d2+4096], 16, 4;": "4096 bytes behind",
    "cp.async.ca.shared.global [%r0+4096], [%d2], 16, 0;": "of 4096",
    "ld.param.b64 %d6, [map+124];": "bytes of parameters",
}


@pytest.mark.parametrize("body", ACCESSES)
def test_accesses_that_are_misaligned_or_outside(body: str) -> None:
    refused(f"@%p0 {body}", ACCESSES[body], OUT, values=VALUES)
    # No lane executes it.
    run(f"setp.ne.s32 %p1, %tid, %tid; @%p1 {body}", OUT.clone(), VALUES)


def test_no_byte_beyond_is_read_for_zeros() -> None:
    """A copy of no byte has any source; one of the last bytes ends with them."""
    body = """
      @%p0 cp.async.ca.shared.global [%r0], [0], 16, 0;
      @%p0 cp.async.ca.shared.global [%r0+16], [%d2+4080], 16, 12;
      cp.async.commit_group; cp.async.wait_group 0;
      @%p0 ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r0+16];
      @%p0 st.global.v4.b32 [%d1], {%r2, %r3, %r4, %r5};
    """
    found = run(body, OUT.clone(), VALUES, seeds=SEEDS)
    assert found[:4].tolist() == [1021, 1022, 1023, 0]


def test_a_row_of_a_matrix_may_be_addressed_modulo_32_bits() -> None:
    body = """
      st.shared.b32 [%r1], %tid; mov.b32 %r2, 0; sub.s32 %r2, %r2, 64;
      bar.warp.sync -1;
      ld.shared.b32 %r3, [%r2+64]; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r2+64];
      st.global.b32 [%d4], %r4;
    """
    assert run(body, OUT.clone(), seeds=2)[:4].tolist() == [0, 1, 2, 3]

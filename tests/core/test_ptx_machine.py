"""The machine that executes PTX computes what the manual says, and finds what a GPU hides."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ptx_machine import MachineError, Program
from ptx_machine.gpu import argument

pytestmark = pytest.mark.ci  # the machine is compiled first

# A kernel of one block whose parameters are addresses.
KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry kernel(.param .u64 to, .param .u64 from)
{{
  .reg .pred %p<9>;
  .reg .b16 %h<9>;
  .reg .b32 %r<99>;
  .reg .b64 %d<9>;
  ld.param.b64 %d1, [to];
  ld.param.b64 %d2, [from];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %d3, %r1, 4;
  add.s64 %d1, %d1, %d3;
  add.s64 %d2, %d2, %d3;
  shl.b32 %r2, %r1, 2;
  {body}
  ret;
}}
"""
LOAD, STORE = "ld.global.b32 %r3, [%d2];", "st.global.b32 [%d1], %r4;"


def executed(
    body: str, values: torch.Tensor, threads: int = 32, shared: int = 4096, seeds: int = 8
) -> torch.Tensor:
    """Return what a kernel writes: one element per thread, the same with every seed."""
    program = Program(KERNEL.format(body=body))
    results = []
    for seed in range(seeds):
        result = torch.zeros(threads, dtype=values.dtype)
        program.run(
            grid=(1, 1, 1),
            threads=threads,
            arguments=[argument("*", result), argument("*", values)],
            tensors=[result, values],
            shared=shared,
            seed=seed,
        )
        results.append(result)
    assert all(
        torch.equal(each.view(torch.int32), results[0].view(torch.int32)) for each in results
    )
    return results[0]


FLOATS = torch.linspace(-3.0, 5.0, 32)
INTEGERS = torch.arange(-7, 25, dtype=torch.int32) * 7919
# Instructions of one register -> what they compute.
COMPUTED: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
    "fma.rn.f32 %r4, %r3, %r3, 0f3F800000;": (FLOATS, lambda x: x * x + 1),
    "ex2.approx.f32 %r4, %r3;": (FLOATS, torch.exp2),
    # The product is lost in the sum, except that its sign decides the rounding: 2^24 (sum - 1).
    "fma.rm.f32 %r4, %r3, 0fB0000000, 0f3F800000; fma.rn.f32 %r4, %r4, 0f4B800000, 0fCB800000;": (
        FLOATS,
        lambda x: -(x > 0).float(),
    ),
    "cvt.sat.f32.f32 %r4, %r3;": (FLOATS, lambda x: x.clamp(0, 1)),
    "setp.geu.f32 %p1, %r3, 0f7FC00000; selp.f32 %r4, %r3, 0f00000000, %p1;": (FLOATS, lambda x: x),
    "max.f32 %r4, %r3, 0f7FC00000;": (FLOATS, lambda x: x),
    "max.f32 %r4, 0f3F800000, %r3, 0fC0000000;": (FLOATS, lambda x: x.clamp(min=1)),
    "max.NaN.f32 %r4, %r3, 0f7FC00000;": (FLOATS, lambda x: x * torch.nan),
    "cvt.rn.bf16.f32 %h1, %r3; cvt.f32.bf16 %r4, %h1;": (FLOATS, lambda x: x.bfloat16().float()),
    "cvt.rzi.s32.f32 %r4, %r3; cvt.rn.f32.s32 %r4, %r4;": (FLOATS, torch.trunc),
    "setp.lt.f32 %p1, %r3, 0f00000000; selp.f32 %r4, 0f00000000, %r3, %p1;": (FLOATS, torch.relu),
    "mul.hi.s32 %r4, %r3, 1000003;": (INTEGERS, lambda x: (x.long() * 1000003 >> 32).int()),
    "shr.s32 %r4, %r3, 40;": (INTEGERS, lambda x: x >> 31),
    "bfe.s32 %r4, %r3, 3, 5;": (INTEGERS, lambda x: (x << 24) >> 27),
    "prmt.b32 %r4, %r3, 0, 0x0123;": (
        INTEGERS,
        lambda x: x.view(torch.uint8).view(-1, 4).flip(1).contiguous().view(torch.int32).view(-1),
    ),
    "shfl.sync.bfly.b32 %r4, %r3, 5, 31, -1;": (INTEGERS, lambda x: x[torch.arange(32) ^ 5]),
    "shfl.sync.up.b32 %r4, %r3, 3, 0, -1;": (
        INTEGERS,
        lambda x: torch.cat([x[:3], x[:-3]]),
    ),
    "redux.sync.add.s32 %r4, %r3, -1;": (INTEGERS, lambda x: x.sum().int().expand(32)),
    # A generic address of shared memory.
    "mov.b64 %d3, memory; cvta.shared.u64 %d3, %d3; st.b32 [%d3], 7; ld.b32 %r4, [%d3];": (
        INTEGERS,
        lambda x: torch.full_like(x, 7),
    ),
    # Lanes that take other ways meet again.
    "setp.lt.s32 %p1, %r3, 0; @%p1 bra $A; add.s32 %r4, %r3, 1; bra $B; $A: neg.s32 %r4, %r3;$B:": (
        INTEGERS,
        lambda x: torch.where(x < 0, -x, x + 1),
    ),
}


@pytest.mark.parametrize("body", COMPUTED)
def test_instructions_compute_what_the_manual_says(body: str) -> None:
    values, expected = COMPUTED[body]
    result = executed(LOAD + body + STORE, values)
    torch.testing.assert_close(result, expected(values), equal_nan=True)


PLACE = "mov.b32 %r5, memory; add.s32 %r5, %r5, %r2;"
EXCHANGED = (
    f"{LOAD}{PLACE} st.shared.b32 [%r5], %r3; BARRIER"
    "mov.b32 %r6, memory; sub.s32 %r6, %r6, %r2; ld.shared.b32 %r4, [%r6+252];" + STORE
)
COPIED = (
    f"{PLACE} cp.async.ca.shared.global [ %r5 + 0 ], [ %d2 + 0 ], 4; cp.async.commit_group;"
    "WAIT BARRIER mov.b32 %r6, memory; sub.s32 %r6, %r6, %r2; ld.shared.b32 %r4, [%r6+252];" + STORE
)
REVERSED = torch.arange(64, dtype=torch.int32)


def test_warps_exchange_through_shared_memory() -> None:
    for body in (EXCHANGED, COPIED.replace("WAIT", "cp.async.wait_group 0;")):
        result = executed(body.replace("BARRIER", "bar.sync 0;"), REVERSED, threads=64)
        assert torch.equal(result, REVERSED.flip(0))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (EXCHANGED.replace("BARRIER", ""), "nobody has written|without a barrier between"),
        (COPIED.replace("WAIT", "").replace("BARRIER", "bar.sync 0;"), "before the wait for its"),
        (
            COPIED.replace("WAIT", "cp.async.wait_group 0;").replace("BARRIER", ""),
            "nobody has written|without a barrier between|before the wait for its",
        ),
        # Each warp reads what the other one wrote, and overwrites what the other one reads.
        (
            EXCHANGED.replace("BARRIER", "bar.sync 0;") + "st.shared.b32 [%r5], %r1;",
            "reads without a barrier between|writes without a barrier between",
        ),
        (LOAD.replace("%d2", "%d2+4096") + STORE, r"reads 4 bytes of global memory .*argument 1"),
        (LOAD.replace("%d2", "%d2+2") + STORE, "is not aligned"),
        ("ld.shared.b32 %r4, [%r2];" + STORE, "nobody has written"),
        ("ld.shared.b32 %r4, [%r2+8192];" + STORE, "8192 of 4096"),
        ("add.f31 %r4, %r3, %r3;", "the machine does not know 'add.f31'"),
        ("add.f32 %r4, %r3, %r3, %r3;", "'add.f32' has 4 operands, not 3"),
    ],
)
def test_what_is_wrong_is_found(body: str, says: str) -> None:
    with pytest.raises(MachineError, match=says) as error:
        executed(body, REVERSED, threads=64)
    assert re.search(r"PTX line \d+", str(error.value))


def test_a_barrier_of_memory_that_nobody_completes_is_a_hang() -> None:
    body = """
      mov.b32 %r5, memory; setp.eq.s32 %p1, %r1, 0;
      @%p1 mbarrier.init.shared::cta.b64 [%r5], 1; bar.sync 0;
      $A: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], 0; @!%p2 bra.uni $A;
    """
    with pytest.raises(MachineError, match="that nobody completes"):
        executed(body, REVERSED, threads=64)


def test_matrices_of_shared_memory_are_multiplied() -> None:
    """ldmatrix, mma and their layouts: A is 16 x 16, B is 16 x 8, in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-4, 5, (16, 16), generator=generator).bfloat16()
    b = torch.randint(-4, 5, (8, 16), generator=generator).bfloat16()  # columns
    values = torch.cat([a.flatten(), b.flatten()]).view(torch.int32)
    body = """
      mov.b32 %r5, memory; add.s32 %r5, %r5, %r2;
      ld.global.b32 %r3, [%d2]; st.shared.b32 [%r5], %r3;
      ld.global.b32 %r3, [%d2+128]; st.shared.b32 [%r5+128], %r3;
      ld.global.b32 %r3, [%d2+256]; st.shared.b32 [%r5+256], %r3;
      ld.global.b32 %r3, [%d2+384]; st.shared.b32 [%r5+384], %r3;
      ld.global.b32 %r3, [%d2+512]; st.shared.b32 [%r5+512], %r3;
      ld.global.b32 %r3, [%d2+640]; st.shared.b32 [%r5+640], %r3;
      bar.sync 0;
      mov.b32 %r6, memory;
      and.b32 %r7, %r1, 15; shl.b32 %r7, %r7, 5; shr.u32 %r8, %r1, 4; shl.b32 %r8, %r8, 4;
      add.s32 %r7, %r7, %r8; add.s32 %r7, %r7, %r6;
      ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r7];
      and.b32 %r7, %r1, 7; shl.b32 %r7, %r7, 5; bfe.u32 %r8, %r1, 3, 1; shl.b32 %r8, %r8, 4;
      add.s32 %r7, %r7, %r8; add.s32 %r7, %r7, %r6; add.s32 %r7, %r7, 512;
      ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r14, %r15}, [%r7];
      mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {%r20, %r21, %r22, %r23}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {0, 0, 0, 0};
      st.global.b32 [%d1], %r20; st.global.b32 [%d1+128], %r21;
      st.global.b32 [%d1+256], %r22; st.global.b32 [%d1+384], %r23;
    """
    program, result = Program(KERNEL.format(body=body)), torch.zeros(4, 8, 4)
    given: Any = [argument("*", result), argument("*", values)]
    program.run(grid=(1, 1, 1), threads=32, arguments=given, tensors=[result, values], shared=4096)
    # Lane 4 r + c has of row r, and of row r + 8, the columns 2 c and 2 c + 1.
    product = result.view(2, 2, 8, 4).permute(0, 2, 3, 1).reshape(16, 8)
    assert torch.equal(product, a.float() @ b.float().T)

"""Lanes of a warp of the PTX machine: control flow, shuffles, reductions and their masks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ptx_kernels import refused, run, signed
from ptx_machine import MachineError
from ptx_machine.run import main

pytestmark = pytest.mark.ci  # the machine is compiled first


LANES = torch.arange(100, 132, dtype=torch.int32)


def source_lane(mode: str, lane: int, b: int, clamp: int, segments: int) -> tuple[int, bool]:
    """Return the lane that is read and the predicate, as the manual defines shfl.sync."""
    most = lane & segments | clamp & ~segments
    j = {
        "up": lane - b % 32,
        "down": lane + b % 32,
        "bfly": lane ^ b % 32,
        "idx": lane & segments | b % 32 & ~segments,
    }[mode]
    inside = j >= most if mode == "up" else j <= most
    return (j if inside else lane), inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode: str) -> None:
    cases = [
        (b, clamp, segments)
        for b in (0, 1, 5, 16, 31, 33)
        for clamp in (0, 7, 15, 31)
        for segments in (0, 16, 24, 28)
    ]
    body = "ld.global.b32 %r3, [%d5];"
    for i, (b, clamp, segments) in enumerate(cases):
        body += f"""
          shfl.sync.{mode}.b32 %r4|%p1, %r3, {b}, {segments << 8 | clamp}, -1;
          selp.b32 %r5, 1000, 0, %p1; add.s32 %r4, %r4, %r5; st.global.b32 [%d4+{128 * i}], %r4;
        """
    found = run(body, torch.zeros(len(cases), 32, dtype=torch.int32), LANES)
    for case, row in zip(cases, found.tolist(), strict=True):
        for lane, got in enumerate(row):
            source, inside = source_lane(mode, lane, *case)
            assert got == 100 + source + 1000 * inside, (case, lane)


def test_reductions_of_a_warp() -> None:
    values = torch.arange(-5, 27, dtype=torch.int32) * 134217729
    unsigned = [x % 2**32 for x in values.tolist()]
    expected = {
        "add.s32": signed(sum(unsigned), 32),
        "max.s32": max(values.tolist()),
        "min.s32": min(values.tolist()),
        "max.u32": signed(max(unsigned), 32),
        "min.u32": signed(min(unsigned), 32),
    }
    for name, total in expected.items():
        body = (
            f"ld.global.b32 %r3, [%d5]; redux.sync.{name} %r4, %r3, -1; st.global.b32 [%d4], %r4;"
        )
        assert run(body, torch.zeros(32, dtype=torch.int32), values).tolist() == [total] * 32
    # Of a half of the lanes.
    body = """
      ld.global.b32 %r3, [%d5]; setp.lt.s32 %p1, %lane, 16; mov.b32 %r4, 0;
      @%p1 redux.sync.add.s32 %r4, %r3, 0x0000ffff; st.global.b32 [%d4], %r4;
    """
    found = run(body, torch.zeros(32, dtype=torch.int32), LANES)
    assert found.tolist() == [sum(range(100, 116))] * 16 + [0] * 16


@pytest.mark.parametrize("leader", ["%r4|%p1", "_|%p1"])
def test_one_lane_is_elected(leader: str) -> None:
    for mask in (0xFFFFFFFF, 0x00FF0000):
        body = f"""
          mov.b32 %r3, {mask}; shr.u32 %r5, %r3, %lane; and.b32 %r5, %r5, 1;
          setp.ne.b32 %p2, %r5, 0; setp.ne.b32 %p1, %r5, %r5; mov.b32 %r4, 0;
          @%p2 elect.sync {leader}, {mask};
          selp.b32 %r6, 1, 0, %p1; st.global.b32 [%d4], %r6; st.global.b32 [%d4+128], %r4;
        """
        found = run(body, torch.zeros(2, 32, dtype=torch.int32))
        assert found[0].sum() == 1 and mask >> int(found[0].argmax()) & 1
        if "%r4" in leader:
            members = [lane for lane in range(32) if mask >> lane & 1]
            assert set(found[1, members].tolist()) == {int(found[0].argmax())}


@pytest.mark.parametrize(
    "body",
    [
        # The mask names lanes that do not execute the instruction.
        "setp.lt.s32 %p1, %lane, 16; @%p1 shfl.sync.bfly.b32 %r4, %tid, 1, 31, -1;",
        "setp.lt.s32 %p1, %lane, 16; @%p1 bra $A; shfl.sync.bfly.b32 %r4, %tid, 1, 31, -1; $A:",
        "setp.lt.s32 %p1, %lane, 16; @%p1 redux.sync.add.s32 %r4, %tid, -1;",
        "setp.lt.s32 %p1, %lane, 16; @%p1 elect.sync %r4|%p2, -1;",
        "setp.lt.s32 %p1, %lane, 16; @%p1 ret; shfl.sync.idx.b32 %r4, %tid, 0, 31, -1;",
        # A lane executes it that the mask does not name.
        "shfl.sync.bfly.b32 %r4, %tid, 1, 31, 0x0000ffff;",
        "redux.sync.add.s32 %r4, %tid, 0x0000ffff;",
        "elect.sync %r4|%p2, 0x0000ffff;",
        # It reads a lane that does not execute it.
        "setp.lt.s32 %p1, %lane, 16; @%p1 shfl.sync.idx.b32 %r4, %tid, 20, 31, 0x0000ffff;",
    ],
)
def test_masks_must_be_those_of_the_lanes(body: str) -> None:
    refused(body, "lanes that do not execute|which does not execute|does not name", torch.zeros(1))


# ---- control flow: what each lane computes, and the lanes that are together again behind it

LOOP = (
    "$LOOP: add.s32 %r4, %r4, %r3; add.s32 %r3, %r3, -1; setp.gt.s32 %p1, %r3, 0; @%p1 bra $LOOP;"
)
FLOWS = {
    "loop": (
        """
        mov.u32 %r3, %lane; mov.b32 %r4, 0;
        $LOOP: add.s32 %r4, %r4, %r3; add.s32 %r3, %r3, -1; setp.gt.s32 %p1, %r3, 0; @%p1 bra $LOOP;
        """,
        lambda i: i * (i + 1) // 2,
    ),
    "nested": (
        """
        and.b32 %r3, %lane, 1; setp.eq.s32 %p1, %r3, 0; setp.lt.s32 %p2, %lane, 16;
        @%p1 bra $EVEN;
        @%p2 bra $LOW; mov.b32 %r4, 3; bra $END; $LOW: mov.b32 %r4, 2; bra $END;
        $EVEN: mov.b32 %r4, 1; @!%p2 bra $END; mov.b32 %r4, 0;
        $END:
        """,
        lambda i: (0 if i < 16 else 1) if i % 2 == 0 else (2 if i < 16 else 3),
    ),
    "loop in loop": (
        """
        mov.b32 %r4, 0; and.b32 %r3, %lane, 3;
        $OUTER: and.b32 %r5, %lane, 7;
        $INNER: add.s32 %r4, %r4, 1; add.s32 %r5, %r5, -1; setp.ge.s32 %p1, %r5, 0; @%p1 bra $INNER;
        add.s32 %r3, %r3, -1; setp.ge.s32 %p1, %r3, 0; @%p1 bra $OUTER;
        """,
        lambda i: (i % 4 + 1) * (i % 8 + 1),
    ),
    "break": (
        """
        mov.b32 %r4, 0;
        $LOOP: setp.eq.s32 %p1, %r4, %lane; @%p1 bra $END; add.s32 %r4, %r4, 1;
        setp.lt.s32 %p1, %r4, 20; @%p1 bra $LOOP; mov.b32 %r4, 100;
        $END:
        """,
        lambda i: i if i < 20 else 100,
    ),
    "predicated": (
        """
        setp.lt.s32 %p1, %lane, 7; mov.b32 %r4, 1; @%p1 mov.b32 %r4, 2; @!%p1 add.s32 %r4, %r4, 8;
        setp.ne.s32 %p2, %r4, %r4; @%p2 mov.b32 %r4, 5; @!%p2 add.s32 %r4, %r4, 1;
        """,
        lambda i: 3 if i < 7 else 10,
    ),
}


@pytest.mark.parametrize("name", FLOWS)
def test_lanes_take_other_ways_and_meet_again(name: str) -> None:
    """Behind them a shuffle of all lanes."""
    body, function = FLOWS[name]
    body += "shfl.sync.bfly.b32 %r4, %r4, 31, 31, -1; st.global.b32 [%d4], %r4;"
    found = run(body, torch.zeros(64, dtype=torch.int32), threads=64, seeds=20)
    assert found.tolist() == [function(31 - i) for i in range(32)] * 2


def test_lanes_leave_early() -> None:
    body = """
      setp.lt.s32 %p1, %lane, 5; @%p1 ret;
      st.global.b32 [%d4], 1; setp.ge.s32 %p2, %lane, 30; @%p2 exit;
      mov.b32 %r3, %lane; $LOOP: add.s32 %r3, %r3, -1; setp.gt.s32 %p1, %r3, 9; @%p1 bra $LOOP;
      setp.lt.s32 %p1, %r3, 9; @%p1 ret; st.global.b32 [%d4], 2;
    """
    found = run(body, torch.zeros(32, dtype=torch.int32), seeds=20).tolist()
    assert found == [0] * 5 + [1] * 5 + [2] * 20 + [1] * 2


def test_constants_and_operands() -> None:
    """Integers of each base, with a suffix U; what is unknown is refused."""
    for text, value in {
        "-7": -7,
        "0x1F": 31,
        "017": 15,
        "0b101": 5,
        "12U": 12,
        "-0x10": -16,
    }.items():
        found = run(f"mov.b32 %r4, {text}; st.global.b32 [%d4], %r4;", torch.zeros(32).int())
        assert found.tolist() == [value] * 32, text
    for text in ("mov.b32 %r4, 1.5;", "and.pred %p1, %p0, !%p2;", "add.s32 %r4, %r5, %nobody;"):
        with pytest.raises(MachineError):
            run(text, torch.zeros(1))


def test_a_kernel_runs_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = tmp_path / "kernel.ptx"
    kernel.write_text(
        """
        .visible .entry scaled(.param .u64 to, .param .u64 from, .param .f32 by, .param .u32 n)
        {
          .reg .pred %p<2>; .reg .b32 %r<9>; .reg .b64 %d<9>;
          ld.param.b64 %d1, [to]; ld.param.b64 %d2, [from];
          ld.param.b32 %r5, [by]; ld.param.b32 %r6, [n];
          mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
          mad.lo.s32 %r1, %r1, %r2, %r3; setp.ge.u32 %p1, %r1, %r6; @%p1 ret;
          mul.wide.u32 %d3, %r1, 4; add.s64 %d1, %d1, %d3; add.s64 %d2, %d2, %d3;
          ld.global.b32 %r4, [%d2]; mul.f32 %r4, %r4, %r5; st.global.b32 [%d1], %r4;
          ret;
        }
        """
    )
    options = ["--grid", "2", "--threads", "64", "--seeds", "3", "--arg", "output:float32:10x10"]
    options += ["--arg", "tensor:float32:100:arange", "--arg", "float32:2.5", "--arg"]
    assert main([str(kernel), *options, "uint32:100"]) == 0
    assert "float32 [10, 10], mean 123.75, 0 NaN: 0, 2.5, 5, 7.5, ..." in capsys.readouterr().out
    assert main([str(kernel), *options, "uint32:101"]) == 1
    assert "400 bytes behind the begin of" in capsys.readouterr().out

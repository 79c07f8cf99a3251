"""The static reports of GPU kernels: what the compiler says is read and compared rightly."""

from __future__ import annotations

import importlib
from pathlib import Path

import kernel_report
import native
import native_flags
import pytest
import report_table
import torch

Rows = list[report_table.Row]


def row(**changes: str) -> report_table.Row:
    usual = {"kernel": "k", "arch": "sm_90", "registers": "32", "shared": "0"}
    return usual | changes


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> report_table.Table:
    monkeypatch.setattr(report_table, "REPORTS", tmp_path / "docs" / "reports")
    return report_table.Table(
        path=tmp_path / "docs" / "reports" / "table.csv",
        command="remake it",
        compiler="compiler 1",
        keys=("kernel", "arch"),
        bounded=("registers", "shared"),
        problems=lambda each: ["too many"] if int(each["registers"]) > 100 else [],
    )


def changed(table: report_table.Table, **changes: object) -> report_table.Table:
    return report_table.Table(**{**vars(table), **changes})


NEWER = {"compiler": "compiler 2"}
# What the table is (besides a row of the kernel j), rows that are written, rows that are compared,
# what the table is then, and the words of what is wrong; without any nothing is.
COMPARED: dict[str, tuple[dict[str, object], Rows, Rows, dict[str, object], list[str]]] = {
    "lower": ({}, [row()], [row(registers="30")], {}, []),
    "risen": ({}, [row()], [row(registers="40")], {}, ["k sm_90: registers rose from 32 to 40"]),
    "come and gone": (
        {},
        [row()],
        [row(kernel="other")],
        {},
        ["other sm_90: a new kernel", "k sm_90: the kernel of this row is gone"],
    ),
    "no table": ({}, [], [row()], {}, [""]),
    "of another compiler": ({}, [row()], [row(registers="40")], NEWER, []),
    "rules hold for any compiler": ({}, [row()], [row(registers="101")], NEWER, ["too many"]),
    "one name": ({}, [row()], [row(), row()], {}, ["k sm_90: two rows of this name"]),
    "other sources of the same figures": (
        {"digest": "digest"},
        [row(digest="1a"), row(kernel="j", digest="2b")],
        [row(digest="3c"), row(kernel="j", digest="2b")],
        {},
        ["k sm_90: changed after the row was written"],
    ),
    "must not fall": (
        {"not_below": ("estimate",)},
        [row(estimate="61"), row(kernel="j", estimate="")],
        [row(estimate="60"), row(kernel="j", estimate="7")],
        {},
        ["k sm_90: estimate fell from 61 to 60"],
    ),
}


@pytest.mark.parametrize("name", COMPARED)
def test_a_table_is_compared_with_what_compiles_now(
    name: str, table: report_table.Table, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, written, compared, then, words = COMPARED[name]
    table = changed(table, **kind)
    if written:
        assert report_table.finish(table, written, check=False) == 0
    assert report_table.finish(changed(table, **then), compared, check=True) == bool(words)
    said = capsys.readouterr().err
    assert all(each in said for each in words)


def test_tiles_are_those_of_the_version_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fusedops.kernels import _attention_launch, _triton_version

    def tile(version: tuple[int, int]) -> int:
        monkeypatch.setattr(_triton_version, "TRITON", version)
        arguments = ("keys", 90, torch.bfloat16, 128, 128, "plain")
        return _attention_launch.block_table(*arguments)[0]["BLOCK_M"]

    monkeypatch.setattr(_attention_launch.env, "triton_interpreted", lambda: False)
    tiles = [tile(each) for each in ((3, 6), (3, 8), (3, 9), (3, 10), (4, 0))]
    assert tiles == [64, 64, 32, 32, 32]


def test_nvcc_compiles_for_the_gpus_that_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho sm_75 sm_90 sm_103 sm_120\n")
    nvcc.chmod(0o755)
    assert native_flags.gencode(native.gpus(str(nvcc))) == [
        "-gencode=arch=compute_90,code=[sm_90,compute_90]",
        "-gencode=arch=compute_120,code=sm_120",
    ]
    monkeypatch.setenv("FUSEDOPS_CUDA_ARCHS", "sm_90,sm_100")
    assert native.gpus(str(nvcc)) == ["sm_90"]
    monkeypatch.setenv("FUSEDOPS_CUDA_ARCHS", "sm_91")
    with pytest.raises(native.BuildError, match="FUSEDOPS_CUDA_ARCHS=sm_91: the names are sm_80"):
        native.gpus(str(nvcc))


def test_rules_of_triton_kernels() -> None:
    usual = {"arch": "sm_90", "stack": "0", "shared": "0", "matrix": "1", "case": "BLOCK_M=64"}
    usual |= {"repeated": "1", "calls": "0"}
    counts = dict.fromkeys(kernel_report.INSTRUCTIONS, "0")
    assert kernel_report.problems(usual | counts | {"wgmma": "8"}) == []
    assert "matrix" in kernel_report.problems(usual | counts)[0]
    assert "warp-group" in kernel_report.problems(usual | counts | {"mma": "8"})[0]
    flat = usual | counts | {"mma": "8", "matrix": "few rows"}
    assert kernel_report.problems(flat) == [], "a warp-group instruction has 64 rows"
    spilled = usual | counts | {"matrix": "0", "stack": "8"}
    assert "registers spill" in kernel_report.problems(spilled)[0]
    large = usual | counts | {"matrix": "0", "shared": str(228 * 1024)}
    assert "shared memory" in kernel_report.problems(large)[0]
    twice = usual | counts | {"wgmma": "8", "repeated": "2"}
    assert "computed 2 times" in kernel_report.problems(twice)[0]


TWO_KERNELS = """
import triton
import triton.language as tl

LIMIT = tl.constexpr({limit})

@triton.jit
def inner(x):
    {comment}
    return x * {factor}

@triton.jit
def outer(x_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, inner(tl.load(x_ptr + offsets)), mask=offsets < LIMIT)
"""


def test_a_digest_follows_callees_and_constants_but_no_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest(number: int, *, before: str = "", **changes: object) -> str:
        text = TWO_KERNELS.format(**{"limit": 8, "comment": "# one", "factor": 2} | changes)
        (tmp_path / f"kernels_{number}.py").write_text(before + text)
        kernel = importlib.import_module(f"kernels_{number}").outer
        case = {
            "kernel": kernel,
            "signature": {"x_ptr": "*fp32"},
            "constexprs": {"BLOCK": 16},
            "num_warps": 4,
            "num_stages": 1,
            "matrix": False,
        }
        assert kernel_report.digest(case, 90) != kernel_report.digest(case | {"num_warps": 8}, 90)
        assert kernel_report.digest(case, 90) != kernel_report.digest(case, 80)
        # The module's name is a part of what is hashed: the same one for all of them.
        found = kernel_report.sources(kernel)
        return repr([(name.split(".")[-1], code) for name, code in sorted(found.items())])

    first = digest(0)
    assert digest(1, before="# moved\n\n\n", comment="# two") == first
    assert digest(2, factor=3) != first
    assert digest(3, limit=9) != first

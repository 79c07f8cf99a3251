"""The static reports of GPU kernels: what the compiler says is read and compared rightly."""

from __future__ import annotations

from pathlib import Path

import cuda_report
import kernel_report
import pytest
import report_table

# Two kernels as nvcc 13.0 -Xptxas=-v reports them, shortened.
PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN8fusedops55_GLOBAL__N__9fb9_13_layer_norm_cu_a1b27forwardIfLi4EEEvPKfPfi' for 'sm_90a'
ptxas info    : Function properties for _ZN8fusedops55_GLOBAL__N__9fb9_13_layer_norm_cu_a1b27forwardIfLi4EEEvPKfPfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compile time = 21.011 ms
ptxas info    : Compiling entry function '_Z4spilPf' for 'sm_80'
ptxas info    : Function properties for _Z4spilPf
    16 bytes stack frame, 24 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, 368 bytes cmem[0]
"""  # noqa: E501


def test_ptxas_output_is_parsed() -> None:
    first, second = cuda_report.parse(PTXAS)
    assert first["arch"] == "sm_90a"
    assert (first["registers"], first["shared"], first["spill_stores"]) == ("38", "128", "0")
    assert second["kernel"] == "spil"
    assert (second["spill_stores"], second["spill_loads"], second["stack"]) == ("24", "20", "16")
    assert cuda_report.problems(first) == []
    assert len(cuda_report.problems(second)) == 3
    assert cuda_report.parse(PTXAS + PTXAS) == [first, second]


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


def test_unchanged_or_lower_figures_pass(
    table: report_table.Table, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_table.finish(table, [row()], check=False) == 0
    assert report_table.finish(table, [row()], check=True) == 0
    assert report_table.finish(table, [row(registers="30")], check=True) == 0


def test_risen_figures_fail_with_both_numbers(
    table: report_table.Table, capsys: pytest.CaptureFixture[str]
) -> None:
    report_table.finish(table, [row()], check=False)
    assert report_table.finish(table, [row(registers="40")], check=True) == 1
    assert "k sm_90: registers rose from 32 to 40" in capsys.readouterr().err


def test_kernels_that_come_or_go_fail(
    table: report_table.Table, capsys: pytest.CaptureFixture[str]
) -> None:
    report_table.finish(table, [row()], check=False)
    assert report_table.finish(table, [row(kernel="other")], check=True) == 1
    message = capsys.readouterr().err
    assert "other sm_90: a new kernel" in message
    assert "k sm_90: the kernel of this row is gone" in message


def test_figures_of_another_compiler_are_not_compared_but_rules_hold(
    table: report_table.Table, capsys: pytest.CaptureFixture[str]
) -> None:
    report_table.finish(table, [row()], check=False)
    newer = report_table.Table(**{**vars(table), "compiler": "compiler 2"})
    assert report_table.finish(newer, [row(registers="40")], check=True) == 0
    assert report_table.finish(newer, [row(registers="101")], check=True) == 1


def test_missing_table_fails(table: report_table.Table, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_table.finish(table, [row()], check=True) == 1


def test_rules_of_triton_kernels() -> None:
    usual = {"arch": "sm_90", "stack": "0", "shared": "0", "matrix": "1", "case": "BLOCK_M=64"}
    counts = dict.fromkeys(kernel_report.INSTRUCTIONS, "0")
    assert kernel_report.problems(usual | counts | {"wgmma": "8"}) == []
    assert "matrix" in kernel_report.problems(usual | counts)[0]
    assert "warp-group" in kernel_report.problems(usual | counts | {"mma": "8"})[0]
    flat = usual | counts | {"mma": "8", "case": "BLOCK_M=16, BLOCK_N=128"}
    assert kernel_report.problems(flat) == [], "a warp-group instruction has 64 rows"
    spilled = usual | counts | {"matrix": "0", "stack": "8"}
    assert "registers spill" in kernel_report.problems(spilled)[0]
    large = usual | counts | {"matrix": "0", "shared": str(228 * 1024)}
    assert "shared memory" in kernel_report.problems(large)[0]


def test_rows_of_one_name_fail(
    table: report_table.Table, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_table.finish(table, [row(), row()], check=False) == 1
    assert "k sm_90: two rows of this name" in capsys.readouterr().err


def test_cases_of_one_label_are_named_by_what_differs() -> None:
    def case(label: str, **constexprs: object) -> dict[str, object]:
        return {"kernel": "f", "label": label, "signature": {}, "constexprs": constexprs}

    cases = [case("N=8", N=8, DROP=True), case("N=8", N=8, DROP=False), case("N=16", N=16)]
    names = [kernel_report.case_name(each, cases) for each in cases]
    assert names == ["N=8, DROP=True", "N=8, DROP=False", "N=16"]

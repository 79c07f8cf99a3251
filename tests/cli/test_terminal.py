"""Tables on terminals of any width, and files that are written whole or not at all."""

from __future__ import annotations

import io
import os
import pty
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_records import record, row
from rich.console import Console
from rich.table import Table

from fusedops.bench import report
from fusedops.bench.cases import lead, timed_row, trusted_fields
from fusedops.bench.limits import LeastWork, Limit, Limits
from fusedops.bench.runner import BenchSettings
from fusedops.cli.plan import layouts as plan_command
from fusedops.planner import Layout, plan, preset
from fusedops.runtime.timer import CpuClock, Timing, TimingPlan
from fusedops.terminal import files
from fusedops.terminal.console import console, number_columns, print_table, show_table
from fusedops.terminal.files import UserError


def terminal(width: int) -> Console:
    return Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)


def printed(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_what_is_no_terminal_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Table()
    for name in ("first", "second"):
        shown.add_column(name)
    shown.add_row("a b " * 300, "c d " * 300)
    out = console()
    print_table(out, shown)
    out.print("one line of words " * 40)
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 6 and "a b " * 299 in rows[3] and "c d " * 299 in rows[3]


@pytest.mark.parametrize("width", [200, 160, 100, 80, 60, 40, 20])
def test_the_answer_of_a_plan_is_whole_in_a_terminal_of_any_width(width: int) -> None:
    model = preset("mixtral-8x7b")
    few: dict[str, Any] = {"recompute": ("none",), "offload": ((),)}
    found = plan(model, 16, 80 << 30, Layout.of(microbatches=8), **few)
    out = terminal(width)
    plan_command.show_memory("mixtral", model, 16, found, 2, out)
    text = printed(out)
    assert "…" not in text
    lines = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line] for line in lines if line[1].strip()]
    best = found.rows[0]
    sizes = [str(getattr(best.layout.parallel, name)) for name in ("dp", "tp", "pp", "ep", "zero")]
    assert cells[0][1:6] == sizes
    assert f"{best.estimate.peak / 2**30:.2f}" in cells[0]


def test_words_are_wrapped_and_numbers_are_not() -> None:
    shown = Table()
    shown.add_column("words")
    shown.add_column("number", justify="right")
    shown.add_row("some words to wrap", "1234567.89")
    out = terminal(30)
    print_table(out, shown)
    text = printed(out)
    assert "1234567.89" in text and all(len(line) <= 30 for line in text.splitlines())
    assert all(word in text for word in ("some", "words", "to", "wrap"))
    assert out.width == 30


def test_columns_of_two_tables_have_the_cells_of_each() -> None:
    out, columns = terminal(80), ("what", *number_columns("value"))
    for what, value in (("first", 11), ("second", 22)):
        show_table(out, columns, [(what, value)])
    lines = [line for line in printed(out).splitlines() if line.startswith("│")]
    assert [line.split("│")[2].strip() for line in lines] == ["11", "22"]


FIGURES: dict[str, Any] = {"speedup": 6458.7, "speedup_q1": 6458.7, "speedup_q3": 6458.7}
FIGURES |= {"median": 1.25, "gb_per_s": 77.5, "limit_share": 0.33, "host_us": 2.5}


def test_a_disturbed_row_has_no_times_in_a_table() -> None:
    for trusted in (True, False):
        out = terminal(200)
        report.show(record(row("eager"), row(trusted=trusted, **FIGURES)), out)
        ours = next(line for line in printed(out).splitlines() if "fusedops (cpp)" in line)
        times = ("6458.70", "1.25", "77.5", "33%")
        assert [time in ours for time in times] == [trusted] * 4
        assert ("disturbed" in ours) == (not trusted)
        assert "2.5" in ours and "0.25" in ours  # what depends on no clock


def test_a_disturbed_row_of_a_model_has_no_times_in_table_and_picture() -> None:
    leads = dict.fromkeys(("lead", "lead_q1", "lead_q3"), 6458.7)
    disturbed = row(trusted=False, **FIGURES, **leads, rival="eager")
    out = terminal(200)
    measured = record(row("eager"), disturbed)
    measured.settings["patch"] = "fusedops.patch(model)"
    report.show(measured, out)
    assert "6458" not in printed(out) and "disturbed" in printed(out)
    picture = report.draw(measured)
    assert "6458" not in picture and ">disturbed<" in picture


def test_a_lead_over_a_disturbed_rival_is_no_figure() -> None:
    limits = Limits(Limit(1.0, "copy_", {}), {})
    plan, cpu = TimingPlan(), torch.device("cpu")
    settings = BenchSettings(cpu, CpuClock(), plan, limits, False, "tuned", 0, lambda what: None)
    for disturbed in (False, True):
        timing = Timing(
            {"eager": [4.0], "peer": [2.0], "fusedops": [1.0]},
            {"eager": [False], "peer": [disturbed], "fusedops": [False]},
        )
        work = LeastWork(1, 0, 1.0, True)
        assert lead(timing, "fusedops")["rival"] == "peer"
        ours = timed_row(
            timing, "fusedops", work, settings, None, op="gelu", case="4x8", dtype="float32",
            direction="forward", backend="cpp", host_us=None, peak_bytes=0,
            **trusted_fields(timing, "fusedops")
        )  # fmt: skip
        assert ours.trusted and ours.speedup == 4.0
        assert ours.lead == (None if disturbed else 2.0)


ACTIVITY = """
import sys
from fusedops.terminal import progress
progress._LOG_EVERY = float(sys.argv[1])
with progress.activity("loading") as report:
    print("result")
    report("second part")
"""


def activity_on(stderr: int, log_every: float) -> str:
    """Run work of two parts with its stderr on a file descriptor; return what stdout got."""
    command = [sys.executable, "-c", ACTIVITY, str(log_every)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True)
    return done.stdout


def test_an_activity_is_shown_on_a_terminal_and_stdout_keeps_the_result_alone() -> None:
    ours, theirs = pty.openpty()
    try:
        assert activity_on(theirs, 10) == "result\n"
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "second part" in shown


@pytest.mark.parametrize(("log_every", "lines"), [(10, ""), (0, "second part\n")])
def test_a_log_gets_a_line_of_an_activity_only_after_a_while(
    tmp_path: Path, log_every: float, lines: str
) -> None:
    with (tmp_path / "log").open("w") as file:
        assert activity_on(file.fileno(), log_every) == "result\n"
    assert (tmp_path / "log").read_text() == lines


def test_text_takes_the_place_of_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    target.chmod(0o640)
    files.write_text(target, "new")
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["a.txt"]
    (tmp_path / "link").symlink_to(target)
    files.write_text(tmp_path / "link", "newer")
    assert (tmp_path / "link").is_symlink() and target.read_text() == "newer"


def test_new_file_has_what_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_text(tmp_path / "a.txt", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640


def test_write_past_the_allowed_size_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    limit = 10_000
    program = (
        "from fusedops.terminal import files\n"
        "with files.one_line_errors():\n"
        f"    files.write_text({str(tmp_path / 'a.json')!r}, 'x' * {10 * limit})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 2
    assert done.stderr.startswith("fusedops: error: cannot write ") and done.stderr.count("\n") == 1
    assert "File too large" in done.stderr
    assert (tmp_path / "a.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("missing/a.json", "folder .*missing does not exist"),
        (".", "it is a folder"),
        ("a_file/b.json", "folder .*a_file does not exist"),
        ("x" * 300, "File name too long"),
    ],
)
def test_unwritable_file_is_known_before(tmp_path: Path, path: str, says: str) -> None:
    (tmp_path / "a_file").write_text("")
    with pytest.raises(UserError, match=says):
        files.check_writable(tmp_path / path)
    files.check_writable(tmp_path / "a.json")
    assert os.listdir(tmp_path) == ["a_file"]

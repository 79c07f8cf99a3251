"""The page of a run has the numbers of its records, and draws in a browser without an error."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedops.cli.main import app
from fusedops.cli.report_page import page, page_data
from fusedops.launch.config_table import InputError
from fusedops.profiler import RunShape, read_timings
from fusedops.profiler.timings import memory_file
from tests.profiler.simulated import Fault, write_run

plotly_offline = pytest.importorskip("plotly.offline")

SHAPE = RunShape({"pp": 2, "dp": 4, "cp": 1, "tp": 2, "ep": 1})
Command = Callable[..., str]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


def record(folder: Path, count: int, shape: RunShape = SHAPE) -> Path:
    """Write the records of a run whose rank 5 is slow from step 20 on."""
    write_run(folder, shape, count, 1, Fault("rank", (5,), "backward", 20, 0.5))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, count + 1):
            line = {"step": step, "loss": 5 * math.exp(-step / 300) + 1, "lr": 1e-3, "mfu": 0.41}
            line |= {"seconds": 0.4 + 1e-3 * (step % 7), "tokens_per_second": 1e5, "grad_norm": 1.0}
            file.write(json.dumps(line) + "\n")
    for rank in (0, 5):
        layers = {f"layers.{n}": {"activation": (n + 1) << 20, "gradient": 1 << 19} for n in (0, 1)}
        timeline = [[n << 20, f"layers.{n % 2}", "forward"] for n in range(8)]
        memory = {"step": 3, "rank": rank, "layers": layers, "timeline": timeline}
        memory |= {"weights": 4 << 20, "gradients": 4 << 20, "states": 8 << 20}
        memory_file(folder, rank).write_text(json.dumps(memory))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("run"), 60)


def unpacked(packed: dict[str, Any], name: str) -> torch.Tensor:
    entry = packed["fields"][name]
    words = torch.frombuffer(bytearray(base64.b64decode(entry["text"])), dtype=torch.uint16)
    return words.double().view(len(packed["steps"]), packed["ranks"]) / 65535 * entry["most"]


def test_the_numbers_of_the_page_are_those_of_the_records(run: Path) -> None:
    data, timings = page_data(run), read_timings(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert data["metrics"]["loss"]["values"] == [line["loss"] for line in lines]
    overview = dict(data["overview"])
    assert overview["steps"] == "60" and overview["loss"] == f"{lines[-1]['loss']:.6g}"
    assert overview["seconds per step, median"] == "0.403" and overview["MFU, median"] == "41.00 %"
    for name in ("backward", "blocked_dp"):
        expected = timings.of(name).double()
        error = (unpacked(data["timings"], name) - expected).abs().max()
        assert error <= expected.max() / 65535, name
    assert data["ranks"][0][0] == "5" and data["findings"][0]["ranks"] == [5]
    assert {row[0] for row in data["groups"]} == {"tp", "dp", "pp", "world"}


def test_a_plan_is_shown_beside_what_was_measured(run: Path) -> None:
    layout = {"seconds": 0.31, "tokens_per_second": 1.3e5, "utilization": 0.5}
    plan = {"layouts": [layout | {"parts": {"tensor": 0.03, "data": 0.02, "products": 0.2}}]}
    rows = {row[0]: row[1:] for row in page_data(run, plan)["plan"]}
    assert rows["seconds per step"] == ["0.31", "0.403", "-23.1 %"]
    assert rows["tokens per second"][2] == "+30.0 %"
    # Transfers of tp take 20 ms in the records, whoever is late.
    predicted, measured, difference = rows["seconds of communication per step: tp"]
    assert predicted == "0.03" and float(measured) == pytest.approx(0.02, rel=0.05)
    assert float(difference.split()[0]) == pytest.approx(50, abs=8)
    assert "seconds of communication per step: dp" in rows


def test_a_run_without_times_or_with_half_a_line_is_shown(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run of fusedops train(?!.*fusedops profile)"):
        page(tmp_path)
    (tmp_path / "profile").mkdir()
    with pytest.raises(InputError, match=f"another trainer: fusedops profile {tmp_path}"):
        page(tmp_path)
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"ste')
    with pytest.raises(InputError, match="has no step yet"):
        page(tmp_path)
    file.write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 2.5}\n{"step": 3, "lo')
    data = page_data(tmp_path)
    assert data["metrics"] == {"loss": {"steps": [2], "values": [2.5]}}
    assert data["timings"] is None and data["findings"] == []


def test_nothing_of_a_run_can_end_the_script(tmp_path: Path) -> None:
    folder = tmp_path / "<b>run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "action": "</script>"}\n')
    text = page(folder)
    assert "<title>Run &lt;b&gt;run<" in text and text.count("</script>") == 3
    library = plotly_offline.get_plotlyjs().replace("</script", "<\\/script")
    own = text.replace(library, "")  # which has links to its makers
    assert not re.search(r"(src|href)=[\"']https?:", own)


def test_the_command_writes_one_file(
    run: Path, tmp_path: Path, output_of: Command, error_of: Command
) -> None:
    file = tmp_path / "page.html"
    assert "open it in a browser" in output_of("report", run, "--out", file)
    assert file.stat().st_size < 8e6
    assert "no run of fusedops train" in error_of("report", tmp_path)
    assert "missing is no folder of a run" in error_of("report", tmp_path / "missing")


@pytest.mark.parametrize("plan", [[], {}, {"layouts": 5}, {"layouts": ["tp=2"]}])
def test_a_plan_that_is_none_is_one_line(
    run: Path, tmp_path: Path, error_of: Command, plan: object
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    assert f"{file} is no plan" in error_of("report", run, "--plan", file)


def browse(file: Path, tab: str, width: int) -> tuple[str, str]:
    """Return the elements of the page in a browser, and what it wrote to its console."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *(f"--window-size={width},1200", "--virtual-time-budget=10000", "--dump-dom"),
            f"file://{file}#{tab}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("width", [360, 1920])
def test_every_tab_draws_in_a_browser(tmp_path: Path, width: int) -> None:
    large = RunShape({"pp": 2, "dp": 8, "cp": 1, "tp": 4, "ep": 1})
    folder = record(tmp_path, 1000, large)
    file = folder / "report.html"
    app(["report", str(folder)], standalone_mode=False)
    assert file.stat().st_size <= 8e6
    plots = {"Overview": 4, "Timeline": 3, "Memory": 3, "Communication": 1, "Findings": 0}
    for tab, count in plots.items():
        elements, console = browse(file, tab, width)
        assert console == "", (tab, console)
        panels = re.findall('<[^>]* role="tabpanel"[^>]*>', elements)
        (shown,) = [panel for panel in panels if " hidden" not in panel]
        assert f'id="panel-{tab}"' in shown
        assert len(re.findall('<[^>]* class="[^"]*js-plotly-plot', elements)) >= count, tab
        if tab == "Findings":
            assert re.search("<(td|a)[^>]*>[^<]*rank 5 is", elements)
            assert re.search('<a[^>]* href="#Timeline/', elements)
        if tab == "Memory":
            assert re.search("<td[^>]*>8.00<", elements)  # MiB of the optimizer's states
        if tab == "Overview":
            line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
            assert re.search(f"<td[^>]*>{line['loss']:.6g}<", elements)

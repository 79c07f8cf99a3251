"""``fusedops bench memory`` on a model that runs in milliseconds: bytes, bits, files."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from bench_records import invoke

from fusedops.bench import memory
from fusedops.bench.model_zoo import FAMILIES, ModelSize
from fusedops.runtime.timer import CpuClock, TimingPlan

pytest.importorskip("transformers")

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("known_limits")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_rows_hold_less_where_less_is_kept_and_keep_every_bit(family: str) -> None:
    size = ModelSize(hidden=64, layers=4, batch=4, seq_len=64)
    rows, reports = memory.run_case(
        FAMILIES[family],
        size,
        torch.float32,
        CPU,
        CpuClock(),
        TimingPlan(2, 2, 0.0),
        lambda what: None,
    )
    by_name = {row.policy: row for row in rows}
    assert all(row.same_bits for row in rows)
    plain = by_name["plain"]
    assert plain.overhead == 1.0
    whole, selective = by_name["recompute"], by_name["recompute, keep attention"]
    assert whole.activations < selective.activations < plain.activations
    assert by_name["recompute norms"].activations < plain.activations
    assert by_name["recompute, offload inputs"].activations < whole.activations
    assert reports["plain"].activations == plain.activations


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    target, picture = tmp_path / "rows.json", tmp_path / "steps.svg"
    options = f"--hidden 32 --layers 2 --tokens 1x16 --seconds 0.01 --allocator system --threads 1 \
        --json {target} --svg {picture}"
    done = invoke("bench", "memory", *options.split())
    assert done.exit_code == 0, done.output
    record = json.loads(target.read_text())
    assert [row["policy"] for row in record["rows"]] == list(memory.policies(["x"]))
    assert record["settings"]["device"] == "cpu"
    for row in record["rows"]:
        assert f"{row['activations'] / 2**20:.1f}" in done.output
    drawn = ElementTree.fromstring(picture.read_text())
    assert "recomputation" in drawn.attrib["aria-label"]


def test_a_step_in_an_arena_has_the_bits_of_one_without() -> None:
    size = ModelSize(hidden=32, layers=2, batch=2, seq_len=16)
    settings = memory.ArenaStepSettings("gpt2", size, torch.float32, 0.01, 1, 1)
    row = memory._arena_step(settings)
    assert row.same_bits and row.report.block_bytes >= row.report.bound_bytes > 0
    assert min(row.plain_ms, row.arena_ms) > 0
    assert row.speedup_q1 <= row.speedup <= row.speedup_q3

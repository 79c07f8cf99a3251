"""``fusedops bench models`` and ``bench memory`` on models that run in milliseconds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from bench_records import LIMITS, fixed_timing, invoke, row
from torch import nn

import fusedops
from fusedops.bench import memory, models
from fusedops.bench.model_zoo import FAMILIES, HEADLINE, ModelSize
from fusedops.bench.models import DECODING, FORWARD, TRAINING, ModelCase, run_case
from fusedops.bench.results import load_json
from fusedops.bench.runner import BenchSettings
from fusedops.runtime.timer import CpuClock, TimingPlan

pytest.importorskip("transformers")

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("known_limits")
TINY = ModelSize(hidden=32, layers=2, batch=2, seq_len=16, steps=3)
PLAN = TimingPlan(1, 1, 0.0)
SETTINGS = BenchSettings(
    *(CPU, CpuClock(), PLAN, LIMITS, False, "system", 1 << 20, lambda what: None), memory=False
)


def bench(*args: str) -> Any:
    size = ("--hidden", "32", "--layers", "2", "--tokens", "2x16", "--steps", "3")
    options = ("--allocator", "system", "--threads", "1", "--seconds", "0.01", "--quick")
    return invoke("bench", "models", *args, *size, *options)


def outcome(family: str, mode: str, **changes: Any) -> models.FamilyResult:
    dtype = changes.pop("dtype", torch.float32)
    settings = replace(SETTINGS, **changes)
    return run_case(ModelCase(FAMILIES[family], mode, TINY, dtype), settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_right_in_every_mode(family: str) -> None:
    assert set(HEADLINE) < set(FAMILIES)
    # Decoding begins with a forward of the prompt.
    for mode in (TRAINING, DECODING if FAMILIES[family].decodes else FORWARD):
        found = outcome(family, mode)
        assert found.notes == () and found.wrong == ()
        eager, ours = found.rows
        assert (eager.variant, ours.variant, ours.direction) == ("eager", "fusedops", mode)
        # Fused ops really ran: without the compiled library on the reference.
        assert ours.backend in ("cpp", "torch", "cpp+torch")
        assert ours.error_mean_ulps is not None and eager.error_mean_ulps is not None
        assert ours.error_mean_ulps <= 2 * eager.error_mean_ulps + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_judged_by_what_stock_is_off(dtype: torch.dtype) -> None:
    found = outcome("llama", TRAINING, dtype=dtype)
    assert found.wrong == () and len(found.rows) == 2


def _scaled(model: nn.Module, factor: float) -> None:
    """Patch, and let one feed-forward layer in each block compute a little too much."""
    fusedops.patch(model)
    for module in model.modules():
        if type(module).__name__ == "GPT2MLP":
            module.register_forward_hook(lambda module, args, output: output * factor)


def _wrong_gradient(model: nn.Module) -> None:
    fusedops.patch(model)
    weight = model.transformer.h[0].ln_1.weight
    weight.register_hook(lambda grad: grad * 1.01)


def _wrong_loss(model: nn.Module) -> None:
    """Add what has no gradient to the loss."""
    fusedops.patch(model)
    loss = model.loss_function
    model.loss_function = lambda *args, **kwargs: loss(*args, **kwargs) + 0.01


def _no_gradient(model: nn.Module) -> None:
    fusedops.patch(model)
    model.transformer.h[1].ln_2.weight.requires_grad_(False)


def _broken(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda *_: 1 / 0)


@pytest.mark.parametrize(
    "patch, mode, said",
    [
        (partial(_scaled, factor=1.01), TRAINING, "logits are off"),
        (partial(_scaled, factor=1.01), FORWARD, "logits are off"),
        (partial(_scaled, factor=1.01), DECODING, "logits are off"),
        (partial(_scaled, factor=math.nan), FORWARD, "logits are off"),
        (_wrong_gradient, TRAINING, "gradient of transformer.h.0.ln_1.weight: root mean square"),
        (_wrong_loss, TRAINING, "loss is"),
        (_no_gradient, TRAINING, "gradients are missing"),
        (_broken, FORWARD, "the patched model raises ZeroDivisionError"),
    ],
)
def test_what_is_wrong_has_no_time(
    monkeypatch: pytest.MonkeyPatch, patch: Any, mode: str, said: str
) -> None:
    monkeypatch.setattr(models, "patch", patch)
    found = outcome("gpt2", mode)
    assert [row.variant for row in found.rows] == ["eager"]
    assert any(said in each for each in found.wrong), found.wrong


def test_command_exits_1_where_values_are_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = lambda model: _scaled(model, 1.01)  # noqa: E731
    monkeypatch.setattr(models, "patch", wrong)
    path = tmp_path / "a.json"
    options = ("--family", "gpt2", "--mode", "forward", "--dtype", "float32")
    done = bench(*options, "--json", str(path))
    assert done.exit_code == 1, done.output
    assert "WRONG: gpt2 forward 32x2, 2x16 float32: logits are off" in done.output
    record = load_json(path)
    assert [row.variant for row in record.rows] == ["eager"]
    assert record.notes[0].startswith("WRONG: gpt2 forward")


def test_files_hold_the_rows_and_compare_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    chosen = ("--family", "gpt2,bert", "--mode", "forward,decoding", "--dtype", "float32")
    done = bench(*chosen, "--json", str(path), "--results", str(tmp_path))
    assert done.exit_code == 0, done.output
    record = load_json(path)
    cases = [
        ("gpt2", "32x2, 2x16", "forward"),
        ("gpt2", "32x2, 1x16+3", "decoding"),
        ("gpt2", "32x2, 2x16+3", "decoding"),
        ("bert", "32x2, 2x16", "forward"),
    ]
    assert [row.key for row in record.rows] == [
        (family, case, "float32", mode, who)
        for family, case, mode in cases
        for who in ("eager", "fusedops")
    ]
    for eager, ours in zip(record.rows[::2], record.rows[1::2], strict=True):
        assert (eager.lead, ours.rival) == (None, "eager")
        assert ours.lead == ours.speedup and ours.lead_q1 == ours.speedup_q1
        assert eager.tflop_per_s is not None
        rate = eager.tflop_per_s * eager.median_us / ours.median_us
        assert ours.tflop_per_s == pytest.approx(rate)
        assert ours.limit_share > 0 and ours.gb_per_s > 0
    folder = tmp_path / record.machine["slug"]
    names = {f"models-{family}-float32.json" for family in ("bert", "gpt2")}
    assert {path.name for path in folder.iterdir()} == names
    saved = load_json(folder / "models-bert-float32.json")
    assert saved.rows == record.rows[6:] and saved.versions == record.versions
    same = invoke("bench", "compare", str(path), str(path))
    assert same.exit_code == 0 and "4 rows of fusedops compared" in same.output


@pytest.mark.parametrize("option", [[], ["--calibrate"]])
def test_calibrate_is_passed_on_and_said(
    monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    calls = []

    def patch(model: nn.Module, **options: Any) -> None:
        calls.append(options)
        fusedops.patch(model, **options)

    monkeypatch.setattr(models, "patch", patch)
    done = bench(*JUDGED, *option)
    assert done.exit_code == 0, done.output
    assert [call.get("calibrate", False) for call in calls] == [bool(option)]
    assert ("fusedops.patch(model, calibrate=True, example=batch)" in done.output) == bool(option)


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_dtypes_that_torch_multiplies_slowly_train_fewer_tokens(
    capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    size = ModelSize(batch=4, seq_len=256)
    small = replace(size, batch=1, seq_len=64)
    bfloat16 = size if capability == "AVX512" else small
    for mode, dtype, device, expected in (
        (TRAINING, torch.float16, CPU, small),
        (TRAINING, torch.bfloat16, CPU, bfloat16),
        (TRAINING, torch.float32, CPU, size),
        (FORWARD, torch.float16, CPU, size),
        (TRAINING, torch.float16, torch.device("cuda"), size),
    ):
        assert models.affordable(mode, size, dtype, device) == expected


JUDGED = ("--family", "bert", "--mode", "forward", "--dtype", "float32")


@pytest.mark.parametrize(
    ("lead", "option", "code"),
    [
        (0.95, ["--fail-if-slower"], 1),
        (0.98, ["--fail-if-slower"], 0),
        (0.98, ["--fail-if-slower", "1"], 1),
        (1.1, ["--fail-if-slower", "1.2"], 1),
        (2.0, ["--fail-if-slower", "1.2"], 0),
        (0.1, [], 0),
    ],
)
def test_slower_rows_fail_and_are_named(
    monkeypatch: pytest.MonkeyPatch, lead: float, option: list[str], code: int
) -> None:
    """A disturbed row is named and not judged."""
    leads = {"lead": lead, "lead_q1": lead, "lead_q3": lead, "rival": "eager"}
    rows = [row("eager"), row(**leads), row("eager", case="2x2"), row(case="2x2", **leads)]
    rows[3] = replace(rows[3], trusted=False)
    result = models.FamilyResult(tuple(rows))
    monkeypatch.setattr(models, "run_case", lambda *_: result)
    # The option stands first and in the middle: its number may be left out.
    for arguments in ([*option, *JUDGED], [*JUDGED, *option]):
        done = bench(*arguments)
        assert done.exit_code == code, done.output
        for word, case in (("slower", "16x16"), ("not judged, disturbed while measured", "2x2")):
            said = f"{word}: gelu {case} float32 forward: {lead:.2f}x of eager" in done.output
            assert said == (code == 1)
        judged = f"{2 - code} rows of fusedops judged" in done.output
        assert judged == bool(option)


def test_the_fastest_other_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "measure", fixed_timing(eager=2.0, compile=1.0, fusedops=1.25))
    (_, ours) = outcome("bert", FORWARD).rows
    assert (ours.speedup, ours.rival, ours.lead) == (1.6, "compile", 0.8)
    assert models.slower([ours], 0.97) == ([ours], [])


def test_a_dtype_that_stock_cannot_run_leaves_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not implemented for 'Half'\nsecond line")

    monkeypatch.setattr(models, "_truth", refuse)
    found = outcome("bert", FORWARD)
    assert found.rows == ()
    (note,) = found.notes
    said = "no rows: RuntimeError: not implemented for 'Half'"
    assert note == f"bert forward 32x2, 2x16 float32: {said}"


@pytest.mark.slow
def test_compile_row_is_measured() -> None:
    found = outcome("bert", TRAINING, compiled=True)
    assert found.notes == () and found.wrong == ()
    assert [row.variant for row in found.rows] == ["eager", "compile", "fusedops"]
    assert found.rows[2].rival in ("eager", "compile")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_rows_hold_less_where_less_is_kept_and_keep_every_bit(family: str) -> None:
    size = ModelSize(hidden=64, layers=4, batch=4, seq_len=64)
    model, timing = (FAMILIES[family], size, torch.float32, CPU), TimingPlan(2, 2, 0.0)
    rows, reports = memory.run_case(*model, timing, lambda what: None)
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
    assert [found["policy"] for found in record["rows"]] == list(memory.policies(["x"]))
    assert record["settings"]["device"] == "cpu"
    for found in record["rows"]:
        assert f"{found['activations'] / 2**20:.1f}" in done.output
    drawn = ElementTree.fromstring(picture.read_text())
    assert "recomputation" in drawn.attrib["aria-label"]


def test_a_step_in_an_arena_has_the_bits_of_one_without() -> None:
    size = ModelSize(hidden=32, layers=2, batch=2, seq_len=16)
    settings = memory.ArenaStepSettings("gpt2", size, torch.float32, 0.01, 1, 1)
    row = memory._arena_step(settings)
    assert row.same_bits and row.report.block_bytes >= row.report.bound_bytes > 0
    assert min(row.plain_ms, row.arena_ms) > 0
    assert row.speedup_q1 <= row.speedup <= row.speedup_q3

"""``fusedops doctor``: right ops pass, a wrong one is found, and it says what runs where."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from typing import Any

import fresh_process
import pytest
import torch
from bench_records import invoke
from click.testing import Result
from typer.testing import CliRunner

from fusedops._core import backends, extension
from fusedops.cli import doctor_report
from fusedops.cli.doctor_report import check_op
from fusedops.cli.main import app
from fusedops.runtime.timer import CpuClock, Timing
from fusedops.specs import Spec, all_specs

CPU = torch.device("cpu")


def doctor(*options: str) -> Result:
    return invoke("doctor", "--device", "cpu", *options)


@pytest.mark.parametrize("op", all_specs())
def test_right_ops_pass_and_tell_their_backends(op: str) -> None:
    """Where the time is over, the first sample of each dtype is still compared."""
    outcome = check_op(all_specs()[op], CPU, seconds=0.0)
    assert outcome.failures == ()
    assert outcome.checks == 3
    assert outcome.skipped == 3 * (len(all_specs()[op].samples(CPU, torch.float32)) - 1)
    assert set(outcome.runs_on) == {"float32", "bfloat16", "float16"}
    assert all(where.startswith(("cpp", "torch")) for where in outcome.runs_on.values())


def _doubled_gradient(x: torch.Tensor) -> torch.Tensor:
    copied = x.clone()
    if copied.requires_grad:
        copied.register_hook(lambda grad: 2 * grad)
    return copied


def _broken(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("illegal instruction")


# What is done to the input or to the result of an op, and what its failures say.
WRONG: dict[str, tuple[Any, Any, str]] = {
    "values": (None, lambda y: y * 1.001, "output 0.*over the error budget"),
    "gradient": (_doubled_gradient, None, "gradient 0.*over the error budget"),
    "nan": (None, lambda y: y * torch.nan, "is nan, float64 has"),
    "exception": (_broken, None, "RuntimeError: illegal instruction"),
}


@pytest.mark.parametrize(("before", "after", "says"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_found(before: Any, after: Any, says: str) -> None:
    spec = all_specs()["gelu"]

    def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        y = spec.op(before(x) if before else x, *args, **kwargs)
        return after(y) if after else y

    failures = check_op(replace(spec, op=wrong), CPU).failures
    assert any(re.search(says, failure) for failure in failures), failures


def test_command_exits_1_when_an_op_is_wrong(specs: dict[str, Spec]) -> None:
    op, eager = specs["gelu"].op, specs["gelu"].eager

    def loud(*args: Any, **kwargs: Any) -> Any:
        warnings.warn("no fast path", stacklevel=1)
        return eager(*args, **kwargs)

    specs["gelu"] = replace(specs["gelu"], eager=loud)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # eager torch's own warnings are not shown
        done = doctor()
    assert done.exit_code == 0, done.output
    assert "right" in done.output and "runs on" in done.output and "allocator" in done.output
    if extension.cpu_library() is None:
        missing = torch.ops.fusedops_native.why_no_tiles()
        assert f"AMX tiles      {f'no: {missing}' if missing else 'usable'}" in done.output
    specs["gelu"] = replace(specs["gelu"], op=lambda *args, **kwargs: op(*args, **kwargs) + 1)
    done = doctor()
    assert done.exit_code == 1
    assert "WRONG" in done.output


@pytest.mark.ci
def test_json_is_alone_on_stdout() -> None:
    code = """
        from fusedops.cli.main import app
        app(["doctor", "--device", "cpu", "--json"])
    """
    done = fresh_process.run(code, check=True, FUSEDOPS_BACKEND="torch")
    record = json.loads(done.stdout)
    assert record["versions"]["torch"] == torch.__version__
    assert [machine["device"] for machine in record["machines"]] == ["cpu"]
    assert record["kernels"]["Triton kernels"].startswith(("usable", "no: "))
    assert record["environment"]["FUSEDOPS_BACKEND"] == "torch"
    assert record["warnings"] == []
    assert any(finding["setting"] == "instruction set" for finding in record["host"])
    results = {outcome["op"]: outcome for outcome in record["ops"]["cpu"]}
    assert list(results) == list(all_specs())
    assert all(result["runs_on"] and not result["failures"] for result in results.values())


@pytest.mark.usefixtures("specs")
def test_it_tells_what_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDOPS_BACKND", "torch")
    monkeypatch.setenv("FUSEDOPS_BACKEND", "cuda")
    with backends.use_backend("cuda"):
        done = doctor()
    assert done.exit_code == 1
    assert "FUSEDOPS_BACKEND=cuda" in done.output
    assert "FUSEDOPS_BACKND is set, but nothing reads it: did you mean" in done.output
    assert "fails  gelu" in done.output and "WRONG" not in done.output
    assert "unset FUSEDOPS_BACKEND" in done.output


MISSPELT = (
    "FUSEDOPS_BACKEND: value must be one of 'cpp', 'cuda', 'triton', 'torch', got 'tritn' "
    "(did you mean 'triton'?)"
)


@pytest.mark.parametrize(
    "words",
    [
        "doctor --device cpu",
        "doctor --device cpu --json",
        "bench gelu",
        "bench compare a b",
        "demo",
    ],
)
@pytest.mark.usefixtures("specs")
def test_a_misspelt_backend_is_one_line_and_keeps_the_doctor_from_nothing(
    monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("FUSEDOPS_BACKEND", "tritn")
    usual = backends._requests[0]
    backends.start()  # as the import of a process of its own does
    try:
        done = CliRunner().invoke(app, words.split(), env={"COLUMNS": "200"})
    finally:
        backends._requests[0] = usual
        backends._apply_request()
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == f"fusedops: error: {MISSPELT}"
    if words.endswith("--json"):
        record = json.loads(done.stdout)
        assert record["warnings"] == [MISSPELT] and record["ops"]["cpu"][0]["failures"] == []
    elif words.startswith("doctor"):
        assert all(text in done.stdout for text in (MISSPELT, "allocator", "right  gelu"))
    else:
        assert done.output == f"fusedops: error: {MISSPELT}\n"


def test_calibrate_shows_rates_ratios_and_backends(
    specs: dict[str, Spec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_report, "PRODUCTS", ((64, 32, 48), (4, 32, 48)))
    monkeypatch.setattr(doctor_report, "OPS", ("gelu",))
    gelu = specs["gelu"]
    small = replace(gelu.bench_cases[0], label="4x8", make=lambda *on: gelu.samples(*on)[0])
    specs["gelu"] = replace(gelu, bench_cases=(small,))
    done = doctor("--calibrate")
    assert done.exit_code == 0, done.output
    lines = [line.split("\u2502") for line in done.stdout.splitlines() if "\u2502" in line]
    rows = {(cells[1].strip(), cells[2].strip()): cells[3:-1] for cells in lines}
    for dtype in ("float32", "bfloat16", "float16"):
        for what in ("linear 64x32->48", "linear 4x32->48", "gelu 4x8"):
            *rates, ratio, runs_on = (cell.strip() for cell in rows[what, dtype])
            assert runs_on in ("cpp", "torch") and len(rates) == (2 if "linear" in what else 0)
            if ratio == "disturbed":  # this machine has other work
                assert all(rate == "-" for rate in rates)
            else:
                assert float(ratio) > 0 and all(float(rate) >= 0 for rate in rates)


def test_rates_are_of_the_work_that_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"eager": [2e-3] * 3, "fusedops": [1e-3] * 3}
    timing = Timing(seconds, {name: [False] * 3 for name in seconds}, least=1)
    monkeypatch.setattr(doctor_report, "measure", lambda *_: timing)
    rate = doctor_report.product_rate((16, 32, 64), torch.float32, CPU, CpuClock())
    assert rate.ratio == 2.0 and rate.trusted
    assert rate.gflops == pytest.approx((2 * 16 * 32 * 64 / 1e6, 2 * 16 * 32 * 64 / 2e6))


def test_what_a_dtype_cannot_run_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(doctor_report, "linear_act", refuse)
    rate = doctor_report.product_rate((16, 32, 64), torch.float16, CPU, CpuClock())
    assert rate.ratio is None and rate.problem == "not implemented for 'Half'"

"""``fusedops doctor``: right ops pass, a wrong one is found, and it says what runs where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from fusedops._core import backends, extension
from fusedops.cli import calibrate
from fusedops.cli.main import app
from fusedops.cli.selftest import check_op
from fusedops.runtime.timer import CpuClock, Timing
from fusedops.specs import all_specs

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", all_specs())
def test_right_ops_pass_and_tell_their_backends(op: str) -> None:
    outcome = check_op(all_specs()[op], CPU)
    assert outcome.failures == ()
    assert outcome.checks == 3 * len(all_specs()[op].samples(CPU, torch.float32))
    assert set(outcome.runs_on) == {"float32", "bfloat16", "float16"}
    assert all(where.startswith(("cpp", "torch")) for where in outcome.runs_on.values())


def test_time_over_skips_and_counts_the_rest() -> None:
    spec = all_specs()["gelu"]
    outcome = check_op(spec, CPU, seconds=0.0)
    assert outcome.checks == 3
    assert outcome.skipped == 3 * (len(spec.samples(CPU, torch.float32)) - 1)


def test_wrong_values_are_found() -> None:
    spec = all_specs()["gelu"]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return spec.op(*args, **kwargs) * 1.001

    failures = check_op(replace(spec, op=wrong), CPU).failures
    assert any("output 0" in failure and "over the error budget" in failure for failure in failures)


def test_wrong_gradient_is_found() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad

    spec = all_specs()["gelu"]

    def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return spec.op(Doubled.apply(x), *args, **kwargs)

    failures = check_op(replace(spec, op=wrong), CPU).failures
    assert any(
        "gradient 0" in failure and "over the error budget" in failure for failure in failures
    )


def test_nan_is_wrong() -> None:
    spec = all_specs()["gelu"]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return spec.op(*args, **kwargs) * float("nan")

    failures = check_op(replace(spec, op=wrong), CPU).failures
    assert any("is nan, float64 has" in failure for failure in failures)


def test_exception_is_a_failure_with_its_message() -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("illegal instruction")

    failures = check_op(replace(all_specs()["gelu"], op=broken), CPU).failures
    assert failures and "RuntimeError: illegal instruction" in failures[0]


def test_command_exits_1_when_an_op_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = all_specs()["gelu"]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return spec.op(*args, **kwargs) + 1

    specs = {"gelu": spec}
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: specs)
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "right" in done.output and "runs on" in done.output and "allocator" in done.output
    if extension.cpu_library() is None:
        missing = torch.ops.fusedops_native.why_no_tiles()
        assert f"AMX tiles      {f'no: {missing}' if missing else 'usable'}" in done.output
    specs["gelu"] = replace(spec, op=wrong)
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert done.exit_code == 1
    assert "WRONG" in done.output


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.ci), "tritn"])
def test_json_is_alone_on_stdout(backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fusedops", "doctor", "--device", "cpu", "--json"],
        env=os.environ | {"FUSEDOPS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (2 if backend == "tritn" else 0), done.stderr
    record = json.loads(done.stdout)
    assert record["versions"]["torch"] == torch.__version__
    assert [machine["device"] for machine in record["machines"]] == ["cpu"]
    assert record["kernels"]["Triton kernels"].startswith(("usable", "no: "))
    assert record["environment"]["FUSEDOPS_BACKEND"] == backend
    assert record["warnings"] == ([MISSPELT] if backend == "tritn" else [])
    assert any(finding["setting"] == "instruction set" for finding in record["host"])
    results = {outcome["op"]: outcome for outcome in record["ops"]["cpu"]}
    assert list(results) == list(all_specs())
    assert all(result["runs_on"] and not result["failures"] for result in results.values())


def test_it_tells_what_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {"gelu": all_specs()["gelu"]}
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: specs)
    monkeypatch.setenv("FUSEDOPS_BACKND", "torch")
    monkeypatch.setenv("FUSEDOPS_BACKEND", "cuda")
    with backends.use_backend("cuda"):
        done = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert done.exit_code == 1
    assert "FUSEDOPS_BACKEND=cuda" in done.output
    assert "FUSEDOPS_BACKND is set, but nothing reads it: did you mean" in done.output
    assert "fails  gelu" in done.output and "WRONG" not in done.output
    assert "unset FUSEDOPS_BACKEND" in done.output


MISSPELT = (
    "FUSEDOPS_BACKEND: value must be one of 'cpp', 'cuda', 'triton', 'torch', got 'tritn' "
    "(did you mean 'triton'?)"
)


def run_misspelt(monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    specs = {"gelu": all_specs()["gelu"]}
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: specs)
    monkeypatch.setenv("FUSEDOPS_BACKEND", "tritn")
    usual = backends._requests[0]
    backends.start()  # as the import of a process of its own does
    try:
        return CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    finally:
        backends._requests[0] = usual
        backends._apply_request()


def test_a_misspelt_backend_does_not_keep_the_doctor_from_reporting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = run_misspelt(monkeypatch, "doctor", "--device", "cpu")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == f"fusedops: error: {MISSPELT}"
    assert MISSPELT in done.stdout and "allocator" in done.stdout and "right  gelu" in done.stdout


@pytest.mark.parametrize("words", ["bench gelu", "bench compare a b", "demo"])
def test_a_misspelt_backend_is_one_line_of_every_other_command(
    monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    done = run_misspelt(monkeypatch, *words.split())
    assert done.exit_code == 2
    assert done.output == f"fusedops: error: {MISSPELT}\n"


def test_a_misspelt_backend_does_not_hide_the_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fusedops.cli.main", "--help"],
        env=os.environ | {"FUSEDOPS_BACKEND": "tritn"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "doctor" in done.stdout and not done.stderr


def test_eager_torchs_warnings_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = all_specs()["gelu"]

    def loud(*args: Any, **kwargs: Any) -> Any:
        warnings.warn("no fast path", stacklevel=1)
        return spec.eager(*args, **kwargs)

    specs = {"gelu": replace(spec, eager=loud)}
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: specs)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        done = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert done.exit_code == 0
    assert not [each for each in heard if "fast path" in str(each.message)]


def test_calibrate_shows_rates_ratios_and_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "PRODUCTS", ((64, 32, 48), (4, 32, 48)))
    monkeypatch.setattr(calibrate, "OPS", ("gelu",))
    case = next(
        bench_case for bench_case in all_specs()["gelu"].bench_cases if not bench_case.headline
    )
    small = replace(case, label="4x8", make=lambda device, dtype: _tiny(device, dtype))
    specs = {"gelu": replace(all_specs()["gelu"], bench_cases=(replace(small, headline=True),))}
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: specs)
    monkeypatch.setattr(calibrate, "all_specs", lambda: specs)
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--calibrate"])
    assert done.exit_code == 0, done.output
    lines = [line.split("\u2502") for line in done.stdout.splitlines() if "\u2502" in line]
    rows = {(cells[1].strip(), cells[2].strip()): cells[3:-1] for cells in lines}
    for dtype in ("float32", "bfloat16", "float16"):
        for size in ("linear 64x32->48", "linear 4x32->48"):
            ours, torchs, ratio, runs_on = (cell.strip() for cell in rows[size, dtype])
            assert runs_on in ("cpp", "torch")
            if ratio == "disturbed":  # this machine has other work
                assert (ours, torchs) == ("-", "-")
            else:
                assert float(ours) >= 0 and float(torchs) >= 0 and float(ratio) > 0
        ratio, runs_on = (cell.strip() for cell in rows["gelu 4x8", dtype])
        assert (ratio == "disturbed" or float(ratio) > 0) and runs_on in ("cpp", "torch")


def _tiny(device: torch.device, dtype: torch.dtype) -> Any:
    return all_specs()["gelu"].samples(device, dtype)[0]


def test_rates_are_of_the_work_that_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> Timing:
        return Timing({"eager": [2e-3] * 3, "fusedops": [1e-3] * 3}, contended(False), least=1)

    def contended(state: bool) -> dict[str, list[bool]]:
        return {"eager": [state] * 3, "fusedops": [state] * 3}

    monkeypatch.setattr(calibrate, "measure", measure)
    rate = calibrate.product_rate("linear", (16, 32, 64), torch.float32, CPU, CpuClock())
    assert rate.ratio == 2.0 and rate.trusted
    assert rate.gflops == pytest.approx((2 * 16 * 32 * 64 / 1e6, 2 * 16 * 32 * 64 / 2e6))


def test_what_a_dtype_cannot_run_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(calibrate, "linear_act", refuse)
    rate = calibrate.product_rate("linear", (16, 32, 64), torch.float16, CPU, CpuClock())
    assert rate.ratio is None and rate.problem == "not implemented for 'Half'"

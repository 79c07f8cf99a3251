"""What ``fusedops doctor`` finds and prints: the installation, the host, and the test of every op.

Each op runs on its small samples, whose values and gradients are compared with float64: the same
samples and error budget as the project's tests, but only the automatic choice of backend and the
common dtypes.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console

from fusedops import specs
from fusedops._core import backends, env, extension
from fusedops.bench import machine
from fusedops.bench.contenders import ContenderCall, error_line
from fusedops.bench.results import dtype_name
from fusedops.runtime import host
from fusedops.specs import Sample, Spec
from fusedops.specs.comparison import difference_from_truth, fresh, run
from fusedops.specs.recorder import RecordOps
from fusedops.terminal.progress import steps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of all self-tests on one device: a doctor must not keep the patient waiting.
_SECONDS = 24.0


@dataclass(frozen=True)
class SelftestResult:
    """What the self-test of one op found."""

    op: str  # the op's name
    # per dtype name, the backend that runs here and why not the ones before it
    runs_on: dict[str, str]
    checks: int  # how many calls were compared
    skipped: int  # how many were not, because the time was over
    failures: tuple[str, ...]  # one sentence per difference or exception
    seconds: float  # how long it took


def check_op(spec: Spec, device: torch.device, seconds: float = math.inf) -> SelftestResult:
    """Run the self-test of one op on a device.

    After ``seconds`` the rest is skipped; the first sample of each dtype always runs.
    """
    start = time.perf_counter()
    runs_on: dict[str, str] = {}
    failures = []
    checks = skipped = 0
    for index, dtype in enumerate(DTYPES, start=1):
        deadline = start + seconds * index / len(DTYPES)
        name = dtype_name(dtype)
        try:
            samples = spec.samples(device, dtype)
            runs_on[name] = _resolution(spec, samples)
        except Exception as error:
            failures.append(f"{spec.name} {name}: {error_line(error)}")
            continue
        for number, sample in enumerate(samples):
            if number > 0 and time.perf_counter() > deadline:
                skipped += len(samples) - number
                break
            checks += 1
            try:
                wrong = difference_from_truth(run(spec.op, fresh(sample)), spec, sample)
            except Exception as error:
                wrong = error_line(error)
            if wrong is not None:
                failures.append(f"{spec.name} {name} {sample.name}: {wrong}")
    elapsed = time.perf_counter() - start
    return SelftestResult(spec.name, runs_on, checks, skipped, tuple(failures), elapsed)


def _resolution(spec: Spec, samples: list[Sample]) -> str:
    """Return which backend runs the op's first non-empty sample, and why not a better one."""
    given = next(sample for sample in samples if all(tensor.numel() for tensor in sample.leaves))
    with RecordOps() as recorded:
        outputs = spec.op(*given.args, **given.kwargs)
        if given.leaves:
            ContenderCall.of(spec, given).backward(outputs)
    parts = []
    for operator, args in recorded.calls:
        name = operator._opname.removesuffix("_backward")
        if name in backends.op_names():
            backward = operator._opname != name
            parts.append(str(backends.resolve(name, *args, backward=backward)))
    return "; ".join(dict.fromkeys(parts))


def installation(devices: list[torch.device]) -> dict[str, Any]:
    """Return what is printed above the ops, as JSON holds it."""
    return {
        "versions": machine.versions(),
        "source": machine.git_commit(),
        "machines": [machine.describe(device) for device in devices],
        "kernels": _kernels(),
        "environment": env.settings(),
        "warnings": [*env.unknown(), *env.mistakes(backends.BACKENDS)],
        "host": [asdict(finding) for finding in host.inspect_host()],
    }


def _kernels() -> dict[str, str]:
    """Return for each kind of kernels whether it is usable, and the reason where it is not."""
    reasons = {
        "C++ kernels": extension.cpu_library(),
        "CUDA kernels": extension.cuda_library(),
        "Triton kernels": extension.triton_missing(),
    }
    if not reasons["C++ kernels"]:
        reasons["AMX tiles"] = torch.ops.fusedops_native.why_no_tiles()
    states = {name: f"no: {reason}" if reason else "usable" for name, reason in reasons.items()}
    if not reasons["C++ kernels"]:
        states["C++ kernels"] = f"loaded, run on {torch.ops.fusedops_native.isa_in_use()}"
    return states


def show_installation(out: Console, record: dict[str, Any]) -> None:
    """Print versions, kernels, environment, and what of the host costs speed."""
    versions = record["versions"]
    here = machine.machine(torch.device("cpu"))
    gpu = "none that this torch sees"
    if torch.cuda.is_available():
        card = machine.machine(torch.device("cuda"))
        gpu = f"{card.name}, CUDA {versions['cuda']}, driver {versions['driver']}"
    packages = ("python", "torch", "fusedops", "triton", "transformers", "liger-kernel")
    lines = [("CPU", f"{here.name} ({here.slug})"), ("GPU", gpu)]
    lines += [(package, versions.get(package, "not installed")) for package in packages]
    lines += record["kernels"].items()
    lines += [("environment", f"{name}={value}") for name, value in record["environment"].items()]
    out.rule("installed", align="left")
    for name, state in lines:
        out.print(f"  {name:14} {state}", markup=False)
    for message in record["warnings"]:
        out.print(f"  {'':14} {message}", style="yellow", markup=False)
    out.rule("host", align="left")
    for finding in record["host"]:
        mark = "[green]good[/]" if finding["good"] else "[yellow]slow[/]"
        out.print(f"  {mark}   {finding['setting']}: {finding['state']}")
        if not finding["good"]:
            out.print(f"         cost: {finding['cost']}", style="dim")
            if finding["cure"]:
                out.print(f"         cure: {finding['cure']}")


def show_ops(out: Console, device: torch.device) -> list[SelftestResult]:
    """Test every op; print what it runs on and whether it is right."""
    out.rule(f"ops on {device.type}", align="left")
    known = specs.all_specs()
    outcomes = []
    with steps(len(known)) as progress:
        start = time.perf_counter()
        for number, spec in enumerate(known.values(), start=1):
            progress.describe(f"testing {spec.name}")
            # What the ops before it left over is its own.
            deadline = start + _SECONDS * number / len(known)
            with warnings.catch_warnings():
                # Of what is compared with: eager torch tells that it has no fast path.
                warnings.simplefilter("ignore")
                outcomes.append(check_op(spec, device, deadline - time.perf_counter()))
            progress.advance()
    for outcome in outcomes:
        _show_outcome(out, outcome)
    total, checks, skipped = (
        sum(getattr(outcome, name) for outcome in outcomes)
        for name in ("seconds", "checks", "skipped")
    )
    rest = f" ({skipped} more skipped: this machine is busy)" if skipped else ""
    out.print(
        f"  {checks} calls compared with float64, values and gradients, in {total:.1f} s{rest}"
    )
    return outcomes


def show_conclusion(out: Console, failed: list[SelftestResult]) -> None:
    """Print what an op that failed means."""
    if any(outcome.checks for outcome in failed):
        out.print("[red]An op gives wrong results here: see above.[/]")
        return
    out.print("[red]An op does not run here: see above.[/]")
    if backends.requested() is not None:
        cure = "unset FUSEDOPS_BACKEND for the automatic choice"
        out.print(f"Backend {backends.requested()} is asked for: {cure}.", markup=False)


def _show_outcome(out: Console, outcome: SelftestResult) -> None:
    mark = "[green]right[/]"
    if outcome.failures:
        mark = "[red]WRONG[/]" if outcome.checks else "[red]fails[/]"
    backends = list(dict.fromkeys(outcome.runs_on.values()))
    where = ", ".join(f"{dtype}: {backend}" for dtype, backend in outcome.runs_on.items())
    if len(backends) == 1:
        where = backends[0]
    ran = f"runs on {where}" if where else "does not run"
    out.print(f"  {mark}  {outcome.op:21} {ran}")
    for failure in outcome.failures:
        out.print(f"         {failure}", style="red", markup=False)

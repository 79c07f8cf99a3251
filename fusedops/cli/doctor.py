"""``fusedops doctor``: what is installed, what runs where and why, and what the host costs.

It also runs every op on small inputs and tells whether the results are right.
"""

from __future__ import annotations

import json
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from fusedops.terminal import files
from fusedops.terminal.progress import steps

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from fusedops.cli.selftest import SelftestResult

# Of all self-tests on one device: a doctor must not keep the patient waiting.
_SECONDS = 24.0


def doctor(
    device: Annotated[str, Option(help="cpu or cuda; default: all available.")] = "",
    calibrate: Annotated[bool, Option("--calibrate", help="Also time ops against torch.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show what is installed, the backend and test result of each op, and what costs speed.

    Every op runs on small inputs against float64 (under 30 s; --calibrate adds two to five).
    The command exits with 1 if an op fails, and with 2 if an environment variable requests
    something that does not exist; ops then ignore the request.
    """
    import_module("fusedops.ops")  # obeys FUSEDOPS_BACKEND, which the block below suspends
    from fusedops._core import backends, env

    with files.one_line_errors():
        devices = _devices(device)
        if as_json and calibrate:
            raise files.UserError("--calibrate prints tables: leave it out, or --json")
    from rich.console import Console

    out = Console(highlight=False, soft_wrap=True, quiet=as_json)
    record = _record(devices)
    _show_installed(out, record)
    _show_host(out, record)
    outcomes: dict[str, list[SelftestResult]] = {}
    wrong = env.mistakes(backends.BACKENDS)
    with backends.use_backend(None) if wrong else nullcontext():
        for name in devices:
            outcomes[name.type] = _show_ops(out, name)
            if calibrate:
                from fusedops.cli import calibrate as speed

                out.rule(f"speed on {name.type}", align="left")
                speed.show(out, name)
    failed = [outcome for tested in outcomes.values() for outcome in tested if outcome.failures]
    if failed:
        _show_conclusion(out, failed)
    if as_json:
        ops = {name: [asdict(outcome) for outcome in tested] for name, tested in outcomes.items()}
        print(json.dumps(record | {"ops": ops}, indent=1))
    with files.one_line_errors():
        files.check_environment()
    if failed:
        raise typer.Exit(1)


def _devices(text: str) -> list[torch.device]:
    import torch

    here = [torch.device(name) for name in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]]
    devices = [device for device in here if text in ("", device.type)]
    if not devices:
        known = ", ".join(device.type for device in here)
        raise files.UserError(f"no device {text!r} here; this torch sees {known}: give one of them")
    return devices


def _record(devices: list[torch.device]) -> dict[str, Any]:
    """Return what is printed above the ops, as JSON holds it."""
    from fusedops._core import backends, env
    from fusedops.bench import machine
    from fusedops.runtime import host

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
    import torch

    from fusedops._core import extension

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


def _show_installed(out: Console, record: dict[str, Any]) -> None:
    import torch

    from fusedops.bench import machine

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


def _show_host(out: Console, record: dict[str, Any]) -> None:
    out.rule("host", align="left")
    for finding in record["host"]:
        mark = "[green]good[/]" if finding["good"] else "[yellow]slow[/]"
        out.print(f"  {mark}   {finding['setting']}: {finding['state']}")
        if not finding["good"]:
            out.print(f"         cost: {finding['cost']}", style="dim")
            if finding["cure"]:
                out.print(f"         cure: {finding['cure']}")


def _show_ops(out: Console, device: torch.device) -> list[SelftestResult]:
    """Test every op; print what it runs on and whether it is right."""
    from fusedops.cli.selftest import check_op
    from fusedops.specs import all_specs

    out.rule(f"ops on {device.type}", align="left")
    specs = all_specs()
    outcomes = []
    with steps(len(specs)) as progress:
        start = time.perf_counter()
        for number, spec in enumerate(specs.values(), start=1):
            progress.describe(f"testing {spec.name}")
            # What the ops before it left over is its own.
            deadline = start + _SECONDS * number / len(specs)
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


def _show_conclusion(out: Console, failed: list[SelftestResult]) -> None:
    from fusedops._core import backends

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

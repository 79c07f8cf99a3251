"""``fusedops doctor``: what is installed, what runs where and why, and what the host costs.

It also runs every op on small inputs and tells whether the results are right.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from fusedops.terminal import files

if TYPE_CHECKING:
    import torch


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
    from fusedops.cli import selftest

    with files.one_line_errors():
        devices = _devices(device)
        if as_json and calibrate:
            raise files.UserError("--calibrate prints tables: leave it out, or --json")
    from rich.console import Console

    out = Console(highlight=False, soft_wrap=True, quiet=as_json)
    record = selftest.installation(devices)
    selftest.show_installation(out, record)
    outcomes: dict[str, list[selftest.SelftestResult]] = {}
    wrong = env.mistakes(backends.BACKENDS)
    with backends.use_backend(None) if wrong else nullcontext():
        for name in devices:
            outcomes[name.type] = selftest.show_ops(out, name)
            if calibrate:
                from fusedops.cli import calibrate as speed

                out.rule(f"speed on {name.type}", align="left")
                speed.show(out, name)
    failed = [outcome for tested in outcomes.values() for outcome in tested if outcome.failures]
    if failed:
        selftest.show_conclusion(out, failed)
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

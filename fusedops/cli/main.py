"""The ``fusedops`` command: its subcommands, ``doctor`` and ``demo``; others have own modules.

Help, completion and usage errors must not wait for torch: the modules of the commands import it,
and all of fusedops that needs it, inside of their functions.
"""

from __future__ import annotations

import json
import os
import platform
import runpy
import sys
from contextlib import nullcontext
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

try:
    import typer
    from typer import Option
except ImportError:
    sys.stderr.write("fusedops: error: the command needs typer: pip install 'fusedops[cli]'\n")
    raise SystemExit(2) from None

from fusedops.cli import generate, output, plan, report, train
from fusedops.cli.bench import commands as bench
from fusedops.terminal import files

if TYPE_CHECKING:
    import torch

app = typer.Typer(
    name="fusedops",
    help="Fused transformer operators for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _show_version(requested: bool) -> None:
    """Print the version, and the versions on which results depend, and exit."""
    if not requested:
        return
    import torch

    import fusedops

    own, python = fusedops.__version__, platform.python_version()
    typer.echo(f"fusedops {own} (torch {torch.__version__}, Python {python})")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.add_typer(bench.app, name="bench")
app.add_typer(plan.app, name="plan")


@app.command()
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
    from fusedops.cli import doctor_report

    with files.one_line_errors():
        devices = _devices(device)
        if as_json and calibrate:
            raise files.UserError("--calibrate prints tables: leave it out, or --json")
    from rich.console import Console

    out = Console(highlight=False, soft_wrap=True, quiet=as_json)
    record = doctor_report.installation(devices)
    doctor_report.show_installation(out, record)
    outcomes: dict[str, list[doctor_report.SelftestResult]] = {}
    wrong = env.mistakes(backends.BACKENDS)
    with backends.use_backend(None) if wrong else nullcontext():
        for name in devices:
            outcomes[name.type] = doctor_report.show_ops(out, name)
            if calibrate:
                out.rule(f"speed on {name.type}", align="left")
                doctor_report.show_rates(out, name)
    failed = [outcome for tested in outcomes.values() for outcome in tested if outcome.failures]
    if failed:
        doctor_report.show_conclusion(out, failed)
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


app.command()(train.train)
app.command()(report.profile)
app.command()(report.report)
app.command()(generate.generate)


# Options are the script's own, `--help` too.
@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def demo(context: typer.Context) -> None:
    """Train a small GPT-2, stock and fused, and compare them (`fusedops demo --help`)."""
    script = output.source_script("bench/models/train_gpt2.py", "make demo")
    with files.one_line_errors():
        make_parser = runpy.run_path(str(script.parent / "gpt2_demo" / "options.py"))["make_parser"]
        make_parser("fusedops demo").parse_args(context.args)  # help and mistakes need no torch
        files.check_environment()
    os.execv(sys.executable, [sys.executable, str(script), *context.args])


if __name__ == "__main__":
    app()

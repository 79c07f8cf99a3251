"""The ``fusedops`` command: one line per subcommand, each in its own module.

Help, completion and usage errors must not wait for torch: the modules of the commands import it,
and all of fusedops that needs it, inside of their functions.
"""

from __future__ import annotations

import platform
import sys
from typing import Annotated

try:
    import typer
    from typer import Option
except ImportError:
    sys.stderr.write("fusedops: error: the command needs typer: pip install 'fusedops[cli]'\n")
    raise SystemExit(2) from None

from fusedops.cli import demo, doctor, generate, plan, report, train
from fusedops.cli.bench import commands as bench

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
app.command()(doctor.doctor)
app.command()(train.train)
app.command()(report.profile)
app.command()(report.report)
app.command()(generate.generate)
app.command(context_settings=demo.PASS_ON, add_help_option=False)(demo.demo)

if __name__ == "__main__":
    app()

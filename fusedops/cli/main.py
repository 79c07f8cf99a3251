"""The ``fusedops`` command: one line per subcommand, each in its own module."""

from __future__ import annotations

import sys

try:
    import typer
except ImportError:
    sys.stderr.write("fusedops: error: the command needs typer: pip install 'fusedops[cli]'\n")
    raise SystemExit(2) from None

from fusedops.cli import demo, doctor, generate, plan, train
from fusedops.cli.bench import command as bench

app = typer.Typer(
    name="fusedops",
    help="Fused transformer operators for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.add_typer(bench.app, name="bench")
app.command()(doctor.doctor)
app.command()(plan.plan)
app.command()(train.train)
app.command()(generate.generate)
app.command(context_settings=demo.PASS_ON, add_help_option=False)(demo.demo)

if __name__ == "__main__":
    app()

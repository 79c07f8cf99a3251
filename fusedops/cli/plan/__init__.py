"""The commands of ``fusedops plan``; ``fusedops.planner`` estimates, ``arguments`` is shared.

Their functions import what they use: ``--help`` must not wait longer than the package itself does.
"""

from __future__ import annotations

import typer

from fusedops.cli.default_group import DefaultGroup
from fusedops.cli.plan import image, memory, models, step_time


class _Group(DefaultGroup):
    default = "memory"


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    help="Estimate memory and time of parallel layouts, without a GPU.",
)
app.command(
    epilog="Also `fusedops plan time` (the fastest layouts on a known device), "
    "`fusedops plan image` (cuts of a convolutional model), `fusedops plan models` (known models)."
)(memory.memory)
app.command("time")(step_time.step_time)
app.command()(image.image)
app.command()(models.models)

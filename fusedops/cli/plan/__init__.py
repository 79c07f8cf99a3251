"""The commands of ``fusedops plan``; ``fusedops.planner`` estimates, ``arguments`` is shared.

Their functions import what they use: ``--help`` must not wait longer than the package itself does.
"""

from __future__ import annotations

import typer

from fusedops.cli.default_group import DefaultGroup
from fusedops.cli.plan import image, layouts
from fusedops.terminal.console import console, number_columns, show_table
from fusedops.terminal.sizes import show_count

app = typer.Typer(
    cls=DefaultGroup,
    add_completion=False,
    help="Estimate memory and time of parallel layouts, without a GPU.",
)
app.command(
    epilog="Also `fusedops plan time` (the fastest layouts on a known device), "
    "`fusedops plan image` (cuts of a convolutional model), `fusedops plan models` (known models)."
)(layouts.memory)
app.command("time")(layouts.step_time)
app.command()(image.image)


@app.command()
def models() -> None:
    """List the published models that --model knows, and their sizes."""
    from fusedops.planner import PRESETS

    sizes = number_columns("parameters", "layers", "hidden", "heads", "experts", "tokens")
    cells = []
    for name, model in PRESETS.items():
        shape = model.num_layers, model.hidden_size, model.num_heads, model.num_experts or "-"
        cells.append((name, show_count(model.parameters().total), *shape, model.seq_len))
    show_table(console(), ("model", *sizes), cells)

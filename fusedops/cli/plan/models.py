"""``fusedops plan models``: the published models whose sizes are known."""

from __future__ import annotations

from fusedops.terminal.console import console, number_columns, show_table
from fusedops.terminal.sizes import show_count


def models() -> None:
    """List the published models that --model knows, and their sizes."""
    from fusedops.planner import PRESETS

    sizes = number_columns("parameters", "layers", "hidden", "heads", "experts", "tokens")
    rows = (
        (
            name,
            show_count(model.parameters().total),
            model.num_layers,
            model.hidden_size,
            model.num_heads,
            model.num_experts or "-",
            model.seq_len,
        )
        for name, model in PRESETS.items()
    )
    show_table(console(), ("model", *sizes), rows)

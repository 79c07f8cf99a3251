"""``fusedops plan models``: the published models whose sizes are known."""

from __future__ import annotations


def models() -> None:
    """List the published models that --model knows, and their sizes."""
    from rich.table import Table

    from fusedops.planner import PRESETS, show_count
    from fusedops.terminal.console import console, number_columns, print_table

    sizes = number_columns("parameters", "layers", "hidden", "heads", "experts", "tokens")
    table = Table("model", *sizes, header_style="bold")
    for name, model in PRESETS.items():
        table.add_row(
            name,
            show_count(model.parameters().total),
            str(model.num_layers),
            str(model.hidden_size),
            str(model.num_heads),
            str(model.num_experts or "-"),
            str(model.seq_len),
        )
    print_table(console(), table)

"""The command line of ``fusedops bench device``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusedops.cli.bench import options
from fusedops.terminal import files
from fusedops.terminal.console import console, number_columns, show_table
from fusedops.terminal.progress import sigterm_interrupts, steps

if TYPE_CHECKING:
    from fusedops.bench.device import DeviceStep


def device(
    out: Annotated[Path, typer.Option(help="The TOML file, for fusedops plan time --device.")],
    device: options.Device = "cpu",
    threads: options.Threads = 1,
    dtype: options.Dtypes = "float32,bfloat16",
    links: Annotated[
        Path | None, typer.Option(help="JSON of fusedops bench communication on this machine.")
    ] = None,
    seconds: Annotated[float, options.seconds_per("step", most=60)] = 2.0,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller models: a first look.")] = False,
) -> None:
    """Measure this machine as a device of the planner, in one to two minutes.

    Peak rates and bandwidth are measured, and efficiencies are fitted on training steps of small
    models: docs/planning.md. A device of a CPU is one process with --threads threads. Use an idle
    machine.
    """
    with files.one_line_errors():
        files.check_environment()
        files.check_writable(out)
        conditions = options.conditions(dtype, device, seconds, threads, "tuned", quick=quick)
        from fusedops.bench.device import measure_device
        from fusedops.bench.device import sizes as cases
        from fusedops.cli.device_file import device_toml
        from fusedops.planner.communication import CommunicationModel

        dtypes = conditions.set_up()
        curves = CommunicationModel.load(links) if links else None
        with steps(len(cases(quick=quick)) + 2) as progress, sigterm_interrupts():
            measured = measure_device(
                conditions.device, dtypes, seconds, progress.done, links=curves, quick=quick
            )
        own = measured.device
        source = f"fitted on {len(measured.steps)} steps of small models on this machine"
        files.write_text(out, device_toml(own, asdict(own.efficiency), source))
        figures = ("width", "layers", "tokens", "measured ms", "predicted ms", "error")
        cells = map(_cells, measured.steps, measured.errors)
        show_table(console(), ("processes", *number_columns(*figures)), cells, title=own.name)
        print(f"wrote {out}: fusedops plan time --device {out}")


def _cells(step: DeviceStep, error: float) -> list[object]:
    shape = step.shape
    sizes = {"dp": shape.dp, "zero": shape.zero, "tp": shape.tp, "cp": shape.cp, "pp": shape.pp}
    shown = [f"{name} {size}" for name, size in sizes.items() if size > (name != "zero")]
    shown += [name for name in ("sp", "overlap_microbatches") if getattr(shape, name)]
    return [
        ", ".join(shown) or "1",
        shape.hidden,
        shape.layers,
        f"{shape.micro_batch} x {shape.seq_len} x {shape.microbatches}",
        f"{1e3 * step.seconds:.1f}",
        f"{1e3 * step.seconds * (1 + error):.1f}",
        f"{100 * error:+.0f} %",
    ]

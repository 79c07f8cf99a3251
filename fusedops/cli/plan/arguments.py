"""Options that the commands of ``fusedops plan`` share, and the values that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusedops.cli.bench import options
from fusedops.terminal import files
from fusedops.terminal.sizes import parse_bytes

if TYPE_CHECKING:
    from fusedops.models import TransformerConfig
    from fusedops.planner import Layout

_MOST_DEVICES = 1 << 16

Model = Annotated[
    str,
    typer.Option(help="A published model (fusedops plan models lists them), or a config.json."),
]
Devices = Annotated[int, typer.Option(min=1, max=_MOST_DEVICES, help="Number of devices.")]
Device = Annotated[str, typer.Option(help="A known device (h100, a100-80), or a TOML file of one.")]
DeviceMemory = Annotated[
    str, typer.Option(help="Memory of each device: 32GiB, 80GB; default: what --device has.")
]
SequenceLength = Annotated[
    int, typer.Option(min=0, help="Tokens of a sequence; 0: the model's longest.")
]
Precision = Annotated[
    str,
    typer.Option(help="float32, autocast, mixed, half-gradients, half: docs/estimates.md."),
]
Kernels = Annotated[
    str, typer.Option(help="fused (these ops), stock (eager torch) or eager (saves scores).")
]
TensorParallel = Annotated[
    str, typer.Option("--tp", help="Comma-separated sizes to try; default: 1,2,4,8.")
]
Pipeline = Annotated[str, typer.Option("--pp", help="The same; default: divisors of the layers.")]
Experts = Annotated[str, typer.Option("--ep", help="The same; default: divisors of the experts.")]
Schedule = Annotated[
    str, typer.Option(help="Comma-separated pipeline schedules: docs/pipeline.md.")
]
Virtual = Annotated[
    int, typer.Option(min=0, help="Stages of a pipeline rank; 0: the schedule's default.")
]
Zero = Annotated[str, typer.Option(help="Comma-separated ZeRO stages to try.")]
Recompute = Annotated[
    str, typer.Option(help="Comma-separated: none, selective, full; or scores+norm+activation.")
]
Offload = Annotated[
    str, typer.Option(help="Comma-separated: none, optimizer, optimizer+activations.")
]
ChunkedLoss = Annotated[
    bool, typer.Option("--chunked-loss", help="linear_cross_entropy: logits in chunks.")
]
ExpertImbalance = Annotated[
    float, typer.Option(min=1, help="Rows of the busiest expert-parallel rank, by their mean.")
]
JsonFile = Annotated[
    str, typer.Option("--json", help="Write all rows to a file; -: print them instead.")
]
SCHEDULES = "1f1b,interleaved,zero_bubble,zbv"
RECOMPUTE = "none,selective,full"
OFFLOAD = "none,optimizer,optimizer+activations"


def model_sizes(name: str) -> TransformerConfig:
    """Return the sizes of a known model, or of a configuration file."""
    if not name:
        raise files.UserError("--model is missing: a name (fusedops plan models) or a config.json")
    from fusedops.models import from_config, preset

    file = _configuration(name)
    try:
        return preset(name) if file is None else from_config(file, sizes_only=True)
    except (ValueError, TypeError) as error:
        where = f"{file}: " if file is not None and str(file) not in str(error) else ""
        raise files.UserError(f"{where}{error}") from None


def device_memory(device: str, memory: str) -> int:
    """Return the bytes of ``--memory``, such as 80GiB, or what ``--device`` has for tensors."""
    from fusedops.planner import load_device

    with files.user_errors(ValueError):
        return parse_bytes(memory) if memory else load_device(device).memory.usable


def base_layout(**base: Any) -> Layout:
    """Return what is not searched for; names are those of ``Layout.of``."""
    from fusedops.planner import Layout
    from fusedops.planner.layout import KERNELS, PRECISIONS

    options.check_known(base["precision"], PRECISIONS, "precision")
    options.check_known(base["kernels"], KERNELS, "kernels")
    with files.user_errors(ValueError, TypeError):
        return Layout.of(**base)


def _configuration(name: str) -> Path | None:
    """Return the file that ``--model`` names, or ``None`` for the name of a published model."""
    path = Path(name)
    if name.endswith(".json"):
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    if path.is_dir():
        raise files.UserError(
            f"--model: the folder {name} has no config.json: give a folder with one"
        )
    if path.is_file():
        raise files.UserError(f"--model: {name} is no configuration: its name must end in .json")
    return None


def choices(
    tp: str, pp: str, ep: str, zero: str, recompute: str, offload: str, schedule: str
) -> dict[str, Any]:
    """Return what is to be tried, by the names that ``layouts`` takes."""
    from fusedops.parallel.pipeline.schedules import SCHEDULES
    from fusedops.planner.layout import OFFLOADS, RECOMPUTE

    tried: dict[str, Any] = {
        "tp": _numbers(tp, "tp"),
        "pp": _numbers(pp, "pp"),
        "ep": _numbers(ep, "ep"),
        "zero": _numbers(zero or ",", "zero", least=0, most=3),
    }
    words = options.split(recompute)
    tried["recompute"] = list(dict.fromkeys(words))
    if not words:
        raise files.UserError(f"--recompute is empty; known: {', '.join(RECOMPUTE)}")
    for word in "+".join(tried["recompute"]).split("+"):
        options.check_known(word, RECOMPUTE, "recompute")
    offloads = []
    for text in offload.split(","):
        words = options.split(text, "+")
        for word in words:
            options.check_known(word, ("none", *OFFLOADS), "offload")
        offloads.append(tuple(dict.fromkeys(word for word in words if word != "none")))
    tried["offload"] = list(dict.fromkeys(offloads))
    tried["schedule"] = tuple(dict.fromkeys(options.words(schedule, SCHEDULES, "schedule")))
    return tried


def _numbers(text: str, name: str, least: int = 1, most: int = _MOST_DEVICES) -> tuple[int, ...]:
    words = options.split(text)
    if text and not words:
        raise files.UserError(f"--{name} is empty: write sizes such as 1,2, or leave it out")
    for word in words:
        if not word.isdecimal() or len(word) > 9 or not least <= int(word) <= most:
            expected = f"numbers from {least} to {most}"
            raise files.UserError(f"--{name} must be {expected} with commas between, got {word!r}")
    return tuple(dict.fromkeys(int(word) for word in words))

"""What the commands of ``fusedops plan`` share: options, and the values that they stand for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Option

from fusedops.cli.bench import options
from fusedops.terminal import files
from fusedops.terminal.sizes import parse_bytes

if TYPE_CHECKING:
    from fusedops import planner
    from fusedops.models import TransformerConfig
    from fusedops.planner import Layout

_MOST_DEVICES = 1 << 16

Devices = Annotated[int, Option(min=1, max=_MOST_DEVICES, help="Number of devices.")]
Device = Annotated[str, Option(help="A known device (h100, a100-80), or a TOML file of one.")]
DeviceMemory = Annotated[str, Option(help="Memory of each: 32GiB, 80GB; default: the device's.")]
JsonFile = Annotated[str, Option("--json", help="Write all rows to a file; -: print them instead.")]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What both searches for layouts take from the command line."""

    model: Annotated[str, Option(help="A name (fusedops plan models), or a config.json.")] = ""
    devices: Devices = 8
    device: Device = ""
    memory: DeviceMemory = ""
    seq_len: Annotated[int, Option(min=0, help="Tokens of a sequence; 0: the model's longest.")] = 0
    precision: Annotated[
        str, Option(help="float32, autocast, mixed, half-gradients, half: docs/estimates.md.")
    ] = "mixed"
    kernels: Annotated[
        str, Option(help="fused (these ops), stock (eager torch) or eager (saves scores).")
    ] = "fused"
    tp: Annotated[str, Option(help="Comma-separated sizes to try; default: 1,2,4,8.")] = ""
    pp: Annotated[str, Option(help="The same; default: divisors of the layers.")] = ""
    ep: Annotated[str, Option(help="The same; default: divisors of the experts.")] = ""
    schedule: Annotated[
        str, Option(help="Comma-separated pipeline schedules: docs/pipeline.md.")
    ] = "1f1b,interleaved,zero_bubble,zbv"
    virtual: Annotated[int, Option(min=0, help="Stages of a pipeline rank; 0: usual.")] = 0
    zero: Annotated[str, Option(help="Comma-separated ZeRO stages to try.")] = "0,1,2,3"
    recompute: Annotated[
        str, Option(help="Comma-separated: none, selective, full; or scores+norm+activation.")
    ] = "none,selective,full"
    offload: Annotated[
        str, Option(help="Comma-separated: none, optimizer, optimizer+activations.")
    ] = "none,optimizer,optimizer+activations"
    chunked_loss: Annotated[bool, Option("--chunked-loss", help="Logits in chunks.")] = False
    expert_imbalance: Annotated[float, Option(min=1, help="Busiest expert rank by the mean.")] = 1.0
    json_file: JsonFile = ""

    def sizes(self) -> TransformerConfig:
        """Return the sizes of the model that is named, or of its configuration file."""
        if not self.model:
            raise files.UserError(
                "--model is missing: a name (fusedops plan models) or config.json"
            )
        from fusedops._core.checks import UnsupportedError
        from fusedops.models import from_config, preset
        from fusedops.planner.layout import check_kind

        file = _configuration(self.model)
        try:
            sizes = preset(self.model) if file is None else from_config(file, sizes_only=True)
            check_kind(sizes)
            return sizes
        except (ValueError, TypeError, UnsupportedError) as error:
            where = f"{file}: " if file is not None and str(file) not in str(error) else ""
            raise files.UserError(f"{where}{error}") from None

    def base(self, **others: Any) -> Layout:
        """Return what is not searched for; ``others`` are further fields of a layout."""
        from fusedops.planner import Layout
        from fusedops.planner.layout import KERNELS, PRECISIONS

        options.check_known(self.precision, PRECISIONS, "precision")
        options.check_known(self.kernels, KERNELS, "kernels")
        names = ("precision", "kernels", "chunked_loss", "expert_imbalance")
        given = {name: getattr(self, name) for name in names}
        with files.user_errors(ValueError, TypeError):
            return Layout.of(seq_len=self.seq_len or None, **given, **others)

    def choices(self) -> dict[str, Any]:
        """Return what is to be tried, by the names that the searches take."""
        from fusedops.parallel.pipeline.schedules import SCHEDULES
        from fusedops.planner.layout import OFFLOADS, RECOMPUTE

        tried: dict[str, Any] = {name: _numbers(getattr(self, name), name) for name in _SIZES}
        tried["zero"] = _numbers(self.zero or ",", "zero", least=0, most=3)
        words = list(dict.fromkeys(options.split(self.recompute)))
        if not words:
            raise files.UserError(f"--recompute is empty; known: {', '.join(RECOMPUTE)}")
        for word in "+".join(words).split("+"):
            options.check_known(word, RECOMPUTE, "recompute")
        tried["recompute"] = words
        offloads = []
        for text in self.offload.split(","):
            words = options.split(text, "+")
            for word in words:
                options.check_known(word, ("none", *OFFLOADS), "offload")
            offloads.append(tuple(dict.fromkeys(word for word in words if word != "none")))
        tried["offload"] = list(dict.fromkeys(offloads))
        schedules = options.words(self.schedule, SCHEDULES, "schedule")
        tried["schedule"] = tuple(dict.fromkeys(schedules))
        return tried


_SIZES = ("tp", "pp", "ep")


def takes_search_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command have ``SearchOptions`` in front of its own options.

    It gets them as its first argument.
    """
    hints = get_type_hints(SearchOptions, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=hints[field.name])
        for field in fields(SearchOptions)
    ]
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    parameters += [parameter.replace(kind=keyword) for parameter in own]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(SearchOptions(**{name: given.pop(name) for name in hints}), **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def known_device(name: str) -> planner.Device:
    """Return the device that ``--device`` names."""
    if not name:
        raise files.UserError("--device is missing: h100, a100-80 or a TOML file")
    from fusedops.planner import load_device

    return load_device(name)


def device_memory(device: str, memory: str) -> int:
    """Return the bytes of ``--memory``, such as 80GiB, or what ``--device`` has for tensors."""
    with files.user_errors(ValueError):
        return parse_bytes(memory) if memory else known_device(device).memory.usable


def _configuration(name: str) -> Path | None:
    """Return the file that ``--model`` names, or ``None`` for the name of a published model."""
    path = Path(name)
    if path.is_dir():
        return path / "config.json"
    if name.endswith(".json"):
        return path
    if path.is_file():
        raise files.UserError(f"--model: {name} is no configuration: its name must end in .json")
    return None


def _numbers(text: str, name: str, least: int = 1, most: int = _MOST_DEVICES) -> tuple[int, ...]:
    words = options.split(text)
    if text and not words:
        raise files.UserError(f"--{name} is empty: write sizes such as 1,2, or leave it out")
    for word in words:
        if not word.isdecimal() or len(word) > 9 or not least <= int(word) <= most:
            expected = f"numbers from {least} to {most}"
            raise files.UserError(f"--{name} must be {expected} with commas between, got {word!r}")
    return tuple(dict.fromkeys(int(word) for word in words))

"""What commands share: options, the values that they stand for, groups with a default command."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from fusedops._core import spelling
from fusedops.terminal import files

if TYPE_CHECKING:
    import torch

    from fusedops.bench.model_zoo import ModelSize
    from fusedops.bench.runner import Conditions

DTYPES = ("float32", "bfloat16", "float16", "float64")


class DefaultGroup(typer.core.TyperGroup):
    """A group whose first subcommand may be left out: ``bench gelu`` is ``bench run gelu``."""

    @property
    def default(self) -> str:
        """The name of that subcommand."""
        return next(iter(self.commands))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default subcommand before arguments that do not begin with one."""
        if not args or args[0] not in self.commands:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def finite(seconds: float) -> float:
    """Return a number of seconds; raise for NaN, which is neither below nor above a limit."""
    if math.isnan(seconds):
        raise typer.BadParameter("nan is no number of seconds")
    return seconds


def seconds_per(what: str, most: float = 600) -> Any:
    """Return an option for how long something is measured."""
    return Option(callback=finite, min=0.01, max=most, help=f"Time per {what}.")


Dtypes = Annotated[str, Option(help=f"Comma-separated: {', '.join(DTYPES)}.")]
Device = Annotated[str, Option(help="cpu or cuda.")]
Threads = Annotated[int, Option(min=0, help="CPU threads; 0: one per physical core.")]
Allocator = Annotated[str, Option(help="C allocator settings: tuned or system.")]
Hidden = Annotated[int, Option(min=64, help="Width; heads have 64.")]
SmallHidden = Annotated[int, Option(min=16, help="Width; heads have 64.")]
Layers = Annotated[int, Option(min=1, help="Number of layers.")]
Vocabulary = Annotated[int, Option(min=2, help="Size of the vocabulary.")]
Tokens = Annotated[str, Option(help="Sequences x tokens.")]
JsonRecord = Annotated[Path | None, Option("--json", help="Write the record.")]
JsonRows = Annotated[Path | None, Option("--json", help="Write the rows.")]
SvgFile = Annotated[Path | None, Option("--svg", help="Draw the rows.")]
CsvRows = Annotated[Path | None, Option("--csv", help="Write the rows.")]


def conditions(
    dtype: str,
    device_name: str,
    seconds: float,
    threads: int,
    allocator: str,
    *,
    quick: bool = False,
) -> Conditions:
    """Return what the options of a command mean."""
    from fusedops.bench.runner import ALLOCATORS, Conditions

    names = words(dtype, DTYPES, "dtype")
    words(allocator, ALLOCATORS, "allocator")
    return Conditions(names, device(device_name), seconds, threads, allocator, quick)


def words(text: str, known: Iterable[str], what: str) -> list[str]:
    """Return the words of a comma-separated list; each must be known."""
    chosen = split(text)
    if not chosen:
        raise files.UserError(f"--{what} is empty; known: {', '.join(known)}")
    for word in chosen:
        check_known(word, known, what)
    return chosen


def split(text: str, separator: str = ",") -> list[str]:
    """Return the words of a list, without blanks around them; empty ones are left out."""
    return [word.strip() for word in text.split(separator) if word.strip()]


def check_known(word: str, known: Iterable[str], what: str) -> None:
    """Raise unless ``word`` is one of those known; the message has the nearest."""
    choices = list(known)
    if word in choices:
        return
    near = spelling.nearest(word, choices)
    hint = f"did you mean {near}? " if near else ""
    raise files.UserError(f"unknown {what} {word!r}: {hint}known: {', '.join(choices)}")


def sequences_and_tokens(text: str) -> tuple[int, int]:
    """Return both numbers of ``--tokens``, such as ``4x256``."""
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise files.UserError(f"--tokens must be sequences x tokens such as 4x256, got {text!r}")
    return int(sizes[0]), int(sizes[1])


def model_size(hidden: int, layers: int, tokens: str, steps: int = 1) -> ModelSize:
    """Return the size of a model of transformers that the options ask for."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise files.UserError(
            "the models come from transformers, which is not installed (pip install transformers)"
        ) from None
    from fusedops.bench.model_zoo import ModelSize

    if hidden % 16:
        raise files.UserError(f"--hidden must be a multiple of 16, got {hidden}")
    if not tokens:
        return ModelSize(hidden, layers, steps=steps)
    batch, seq_len = sequences_and_tokens(tokens)
    if seq_len < 2:
        raise files.UserError(f"--tokens must have sequences of 2 tokens or more, got {tokens!r}")
    return ModelSize(hidden, layers, batch, seq_len, steps)


def device(text: str) -> torch.device:
    """Return the device that ``text`` names, which must be here; a GPU is made the current one."""
    import torch

    check_known(text.partition(":")[0], ("cpu", "cuda"), "device")
    try:
        chosen = torch.device(text)
    except RuntimeError:
        raise files.UserError(f"unknown device {text!r}: known are cpu, cuda, cuda:N") from None
    if chosen.type == "cpu":
        if chosen.index:
            raise files.UserError(f"there is no device {text}: the CPU is one device, cpu")
        return chosen
    if not torch.cuda.is_available():
        raise files.UserError(
            "device cuda was asked for, but this torch sees no CUDA device: "
            "fusedops doctor shows what is installed; --device cpu measures the CPU"
        )
    count = torch.cuda.device_count()
    if (chosen.index or 0) >= count:
        raise files.UserError(f"there is no device {text}: this torch sees {count}, from cuda:0 on")
    torch.cuda.set_device(chosen)
    return chosen

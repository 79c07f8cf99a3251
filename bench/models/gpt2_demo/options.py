"""The options of the demo. It imports no torch: ``fusedops demo --help`` must not wait for it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fusedops.terminal.files import UserError

DTYPES = ("float32", "bfloat16")
HEAD_DIM = 64


@dataclass(frozen=True)
class Defaults:
    """What fits a device: steps large enough to mean something, a run of about two minutes."""

    layers: int
    hidden: int
    vocab: int
    seq_len: int
    batch: int
    steps: int
    more_steps: int


DEFAULTS = {
    "cpu": Defaults(4, 512, 4096, 256, 4, 40, 200),
    "cuda": Defaults(12, 768, 8192, 1024, 16, 100, 400),
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise ``UserError`` where argparse prints its usage and exits."""
        raise UserError(f"{message}; --help lists the options")


def _integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}, got {text!r}"
            )
        return value

    return parse


def make_parser(prog: str | None = None) -> Parser:
    """Return the parser of the demo's options; ``prog`` is the program that its usage names."""
    description = "Train a small GPT-2 on Python source, stock and with fusedops, and compare them."
    parser = Parser(prog, description=description)
    add = parser.add_argument
    add("--steps", type=_integer(1, 10**6), help="training steps of each model and dtype")
    add("--more-steps", type=_integer(0, 10**6), help="further steps of the generating model")
    add("--layers", type=_integer(1, 1000))
    add("--hidden", type=_integer(HEAD_DIM, 65536), help=f"a multiple of {HEAD_DIM}")
    add("--vocab", type=_integer(300, 65536), help="entries of the byte-pair vocabulary")
    add("--seq-len", type=_integer(8, 65536))
    add("--batch", type=_integer(1, 65536), help="sequences in a batch")
    add("--dtype", choices=("both", *DTYPES), default="both", help="bfloat16 is autocast")
    add("--seed", type=_integer(0, 2**31), default=0)
    add("--device", help="cpu, cuda or cuda:N (default: cuda where there is a GPU)")
    add("--corpus", type=Path, help="directory of Python files (default: the installed sympy)")
    add("--out", type=Path, default=Path("out"), help="output directory (default: out)")
    add(
        "--time-limit",
        type=_integer(1, 10**6),
        default=125,
        help="seconds; fewer steps run if needed",
    )
    add("--no-generate", action="store_true", help="do not generate sample code")
    add("--no-untuned", action="store_true", help="omit rows with the system's allocator settings")
    add("--json", action="store_true", help="print the results as JSON instead of tables")
    add("--record", action="store_true", help="store the results in bench/results/<device>")
    return parser


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, checked and complete.

    Raises:
        UserError: one of them makes no sense.
    """
    options = make_parser().parse_args(arguments)
    options.device = _device(options.device)
    defaults = DEFAULTS["cuda" if options.device.startswith("cuda") else "cpu"]
    for name, value in vars(defaults).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.hidden % HEAD_DIM:
        raise UserError(
            f"argument --hidden: must be a multiple of {HEAD_DIM}, got {options.hidden}"
        )
    return options


def _device(asked: str | None) -> str:
    import torch

    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = asked.partition(":")
    if kind not in ("cpu", "cuda") or (index and (kind == "cpu" or not index.isdigit())):
        raise UserError(f"argument --device: must be cpu, cuda or cuda:N, got {asked!r}")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(index or 0) >= found:
        raise UserError(f"argument --device: {asked} was asked for, but torch sees {found} GPUs")
    return asked

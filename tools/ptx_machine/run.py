"""Run a PTX kernel on the CPU, and print what it writes or what it does wrong.

    python tools/ptx_machine/run.py kernel.ptx --grid 4 --threads 128 --shared 4096 \
        --arg tensor:float32:64x64:random --arg int32:64 --arg output:float32:64x64 --seed 3

Arguments are in the order of the kernel: ``tensor:TYPE:SHAPE:FILL`` (random, zeros, ones, arange)
and ``output:TYPE:SHAPE`` are tensors of torch's types, ``TYPE:VALUE`` is a number. Exit code 1: an
error with one of the seeds, or an output that is not the same with all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ptx_machine import MachineError, Program
from ptx_machine.gpu import argument

FILLS: dict[str, Callable[[list[int]], torch.Tensor]] = {
    "random": lambda shape: torch.randn(shape, generator=torch.Generator().manual_seed(0)),
    "zeros": torch.zeros,
    "ones": torch.ones,
    "arange": lambda shape: torch.arange(torch.Size(shape).numel()).view(shape),
}


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise argparse.ArgumentTypeError(f"torch has no type '{name}'")
    return found


def parsed(text: str) -> tuple[str, torch.Tensor]:
    """Return whether an argument is a ``tensor``, an ``output`` or a ``number``, and its values."""
    kind, *rest = text.split(":")
    if kind not in ("tensor", "output"):
        if len(rest) != 1:
            raise argparse.ArgumentTypeError(f"'{text}' is no TYPE:VALUE")
        dtype = dtype_of(kind)
        value = float(rest[0]) if dtype.is_floating_point else int(rest[0], 0)
        return "number", torch.tensor(value, dtype=dtype)
    fill = rest[2] if len(rest) == 3 else "zeros"
    if len(rest) not in (2, 3) or fill not in FILLS:
        raise argparse.ArgumentTypeError(f"'{text}' is no tensor:TYPE:SHAPE:FILL")
    shape = [int(size) for size in rest[1].split("x")]
    dtype = dtype_of(rest[0])
    scale = 1 if dtype.is_floating_point or fill != "random" else 100
    return kind, (FILLS[fill](shape) * scale).to(dtype)


def summary(index: int, tensor: torch.Tensor) -> str:
    values = tensor.double()
    texts = [f"{x:g}" for x in values.flatten().tolist()]
    shown = ", ".join(texts if len(texts) <= 8 else [*texts[:4], "...", *texts[-4:]])
    what = f"argument {index}: {str(tensor.dtype)[6:]} {list(tensor.shape)}"
    return f"{what}, mean {values.mean():g}, {int(values.isnan().sum())} NaN: {shown}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kernel with each seed; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kernel", type=Path, help="a file of PTX with one kernel")
    parser.add_argument("--grid", default="1", help="blocks, for example 4 or 4x2")
    parser.add_argument("--threads", type=int, default=32, help="of a block")
    parser.add_argument("--shared", type=int, default=0, help="bytes of dynamic shared memory")
    parser.add_argument("--arg", type=parsed, action="append", default=[], dest="given")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    options = parser.parse_args(arguments)
    grid = [*map(int, options.grid.split("x")), 1, 1][:3]
    results: list[list[torch.Tensor]] = []
    for seed in range(options.seed, options.seed + options.seeds):
        given = [(kind, value.clone()) for kind, value in options.given]
        packed = [
            bytes(x.view(1).view(torch.uint8).tolist()) if kind == "number" else argument("*", x)
            for kind, x in given
        ]
        try:
            Program(options.kernel.read_text()).run(
                grid=grid,
                threads=options.threads,
                arguments=packed,
                tensors=[value for kind, value in given if kind != "number"],
                shared=options.shared,
                seed=seed,
            )
        except MachineError as error:
            print(f"seed {seed}: {error}")
            return 1
        results.append([value for kind, value in given if kind == "output"])
        for first, other in zip(results[0], results[-1], strict=True):
            if not torch.equal(first.view(torch.uint8), other.view(torch.uint8)):
                print(f"seed {seed}: an output differs from that of seed {options.seed}")
                return 1
    outputs = [i for i, (kind, _) in enumerate(options.given) if kind == "output"]
    for index, tensor in zip(outputs, results[0] if results else [], strict=True):
        print(summary(index, tensor))
    return 0


if __name__ == "__main__":
    sys.exit(main())

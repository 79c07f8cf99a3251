"""Run a PTX kernel on the CPU, and print what it writes or what it does wrong.

    python tools/ptx_machine/run.py kernel.ptx --grid 4 --threads 128 --shared 4096 \
        --arg tensor:float32:64x64:random --arg int32:64 --arg output:float32:64x64 --seed 3

Arguments are those of the kernel in their order: ``tensor:TYPE:SHAPE:FILL`` (random, zeros, ones or
arange) and ``output:TYPE:SHAPE`` are tensors of torch's types, ``TYPE:VALUE`` is a number. Exit code
1: the machine found something wrong, with at least one of the seeds.
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

Fill = Callable[[Sequence[int], torch.dtype], torch.Tensor]


def _random(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(list(shape), generator=generator).to(dtype)
    return torch.randint(0, 100, list(shape), generator=generator).to(dtype)


FILLS: dict[str, Fill] = {
    "random": _random,
    "zeros": lambda shape, dtype: torch.zeros(list(shape), dtype=dtype),
    "ones": lambda shape, dtype: torch.ones(list(shape), dtype=dtype),
    "arange": lambda shape, dtype: torch.arange(torch.Size(shape).numel()).to(dtype).view(*shape),
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
    return kind, FILLS[fill](shape, dtype_of(rest[0]))


def summary(index: int, tensor: torch.Tensor) -> str:
    values = tensor.double()
    ends = [f"{x:g}" for x in values.flatten().tolist()]
    shown = ", ".join(ends if len(ends) <= 8 else [*ends[:4], "...", *ends[-4:]])
    return (
        f"argument {index}: {str(tensor.dtype)[6:]} {list(tensor.shape)}, mean {values.mean():g}, "
        f"{int(values.isnan().sum())} NaN: {shown}"
    )


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
            value.view(1).view(torch.uint8).numpy().tobytes()
            if kind == "number"
            else argument("*", value)
            for kind, value in given
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

"""Measures the host's part of an AdamW step on a GPU, on a machine without one.

    python tools/adamw_host_time.py             # Triton's launches left out
    python tools/adamw_host_time.py --launches  # its launcher runs, down to a stand-in driver

The tensors are on the CPU. Left out are always: what the driver takes for a launch (two of each
mixture of dtypes, and two of a norm), what torch's own operations on single numbers cost more on a
GPU (some 10 of each mixture), and the copy of a table whose addresses changed, which is one in host
memory here. Times are of the thread's processor: other processes of the machine count only where
they take its caches.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, masters, clipped": {"master_weights": True, "max_norm": 1.0},
    "bfloat16 states": {"state_dtype": "bfloat16"},
}


class Launches:
    """Stands for a Triton kernel: keeps the arguments of the last launch, if anything."""

    def __init__(self, seen: Callable[..., None] | None = None) -> None:
        self.count = 0
        self._seen = seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1
        if self._seen is not None:
            self._seen(*args, **kwargs)


@contextlib.contextmanager
def stand_in(step: Launches | None = None) -> Iterator[None]:
    """Let the optimizer's Triton kernels serve CPU tensors, and do nothing.

    Args:
        step: what is launched for the step itself; by default nothing.
    """
    import fusedops
    from fusedops._core import env, extension
    from fusedops.kernels import adamw, square_sums

    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (extension, "triton_missing", lambda: None),
            (env, "triton_interpreted", lambda: True),
            (adamw, "_step_kernel", step or Launches()),
            (adamw, "_count_kernel", Launches()),
            (square_sums, "_parts_kernel", Launches()),
            (square_sums, "_sums_kernel", Launches()),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        patches.enter_context(fusedops.use_backend("triton"))
        yield


def measure(
    num_tensors: int, *, moving: bool = False, rounds: int = 200, **options: Any
) -> dict[str, float]:
    """Return the quartiles of the seconds of a processor that a step takes on the host.

    To be called where Triton kernels serve CPU tensors: in ``stand_in``, or in
    ``stand_in_cuda.installed`` and ``use_backend("triton")``.

    Args:
        num_tensors: parameters, of 64 elements each.
        moving: whether gradients are at other addresses in each step; they are set anew always.
        rounds: steps.
        options: of ``AdamW``.
    """
    import torch

    from fusedops.optim import AdamW

    dtype = torch.bfloat16 if options.get("master_weights") else torch.float32
    if "state_dtype" in options:
        options["state_dtype"] = getattr(torch, options["state_dtype"])
    params = [torch.nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in range(num_tensors)]
    places = torch.zeros(2, num_tensors, 64, dtype=dtype)
    optimizer = AdamW([(f"layer.{i}", parameter) for i, parameter in enumerate(params)], **options)
    seconds = []
    for number in range(rounds + 10):
        for param, grad in zip(params, places[number % 2 if moving else 0], strict=True):
            param.grad = grad
        started = time.thread_time()
        optimizer.step()
        seconds.append(time.thread_time() - started)
    quarters = statistics.quantiles(seconds[10:], n=4)
    return dict(zip(("quarter", "median", "three quarters"), quarters, strict=True))


@contextlib.contextmanager
def with_launches() -> Iterator[None]:
    """Let Triton launch on a driver that does nothing."""
    import stand_in_cuda

    import fusedops

    with (
        tempfile.TemporaryDirectory() as folder,
        stand_in_cuda.installed(Path(folder), notes=False),
        fusedops.use_backend("triton"),
    ):
        yield


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--launches", action="store_true", help="let Triton's launcher run")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with with_launches() if arguments.launches else stand_in():
        for name, options in CASES.items():
            for moving in (False, True):
                times = measure(
                    arguments.tensors, moving=moving, rounds=arguments.rounds, **options
                )
                shown = ", ".join(f"{each} {1e3 * value:.3f}" for each, value in times.items())
                print(f"{name}, gradients {'move' if moving else 'stay'}: ms {shown}")


if __name__ == "__main__":
    main()

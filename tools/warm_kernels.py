"""Compiles the Triton kernels that the GPU tests launch, on all processors, and launches none.

    python tools/warm_kernels.py --seconds 150 --record FOLDER

One process compiles a kernel in a second or two while the GPU waits; a machine with a GPU has many
processors. Each takes an op and a dtype, the most important ones first (``gpu_order.py``), makes
the calls of the op's samples with launches that only compile, and leaves the machine code in
Triton's cache on disk, where the tests find it. What the calls compute means nothing: a kernel's
output is whatever was in memory. An op that fails here, or that time does not reach, compiles in
its tests instead.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import gpu_order

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Warmed:
    """What came of an op in a dtype: kernels compiled, calls that failed, and the last reason."""

    op: str
    dtype: str
    kernels: int = 0
    failed: int = 0
    seconds: float = 0.0
    why: str = ""


def warm(op: str, dtype: str) -> Warmed:
    """Compile what the samples of an op launch in a dtype."""
    started = time.monotonic()
    sys.path.insert(0, str(ROOT))
    import torch
    from triton.runtime.jit import JITFunction

    import fusedops
    from fusedops.specs import all_specs
    from fusedops.specs.comparison import run

    launch = JITFunction.run
    seen = set()

    def compile_only(self, *args, grid, warmup, **kwargs):  # type: ignore[no-untyped-def]
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        seen.add(id(kernel))
        return kernel

    JITFunction.run = compile_only
    failed, why = 0, ""
    try:
        spec = all_specs()[op]
        with fusedops.use_backend("triton"):
            for sample in spec.samples(torch.device("cuda"), getattr(torch, dtype)):
                try:
                    run(spec.op, sample)
                except Exception as error:  # what is computed means nothing, nor does its error
                    failed, why = failed + 1, f"{type(error).__name__}: {error}".split("\n")[0]
    finally:
        JITFunction.run = launch
    return Warmed(op, dtype, len(seen), failed, time.monotonic() - started, why)


def warm_all(
    jobs: Sequence[tuple[str, str]],
    work: Callable[[str, str], Warmed],
    executor: Executor,
    say: Callable[[Warmed], None],
    seconds: float,
) -> int:
    """Run jobs in their order until the time is over; return how many were not finished."""
    futures = {executor.submit(work, *job): job for job in jobs}
    left = len(futures)
    try:
        for future in as_completed(futures, timeout=seconds):
            left -= 1
            error = future.exception()
            why = f"{type(error).__name__}: {error}" if error else ""
            say(Warmed(*futures[future], failed=1, why=why) if error else future.result())
    except TimeoutError:
        pass
    executor.shutdown(wait=False, cancel_futures=True)
    return left


def main() -> int:
    """Compile, and say what was compiled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150, help="when to stop")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--shard", default="1/1", metavar="K/N", help="as of the tests")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write warm.csv there")
    options = parser.parse_args()
    index, shards = gpu_order.parse_shard(options.shard)
    sys.path.insert(0, str(ROOT))
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: nothing to compile for")
        return 0
    from fusedops.specs import all_specs

    ops = [op for op in all_specs() if gpu_order.shard_of(op, shards) == index]
    jobs = gpu_order.ordered(ops, gpu_order.DTYPES[:3])
    folder = options.record
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with (folder / "warm.csv" if folder else Path(os.devnull)).open("w") as lines:
        lines.write("op,dtype,kernels,failed,seconds,why\n")

        def say(done: Warmed) -> None:
            print(
                f"{done.op} {done.dtype}: {done.kernels} kernels, {done.seconds:.0f} s {done.why}"
            )
            why = done.why.replace('"', "'")
            numbers = f"{done.kernels},{done.failed},{done.seconds:.1f}"
            lines.write(f'{done.op},{done.dtype},{numbers},"{why}"\n')
            lines.flush()

        executor = ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"))
        left = warm_all(jobs, warm, executor, say, options.seconds)
    print(f"{len(jobs) - left} of {len(jobs)} compiled", flush=True)
    # Processes that are still compiling are not waited for.
    for process in list((executor._processes or {}).values()):
        process.terminate()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())

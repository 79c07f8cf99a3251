"""compute-sanitizer over one sample per kernel: memcheck and racecheck, a process for each op.

    compute-sanitizer --tool memcheck python -m first_gpu.sanitized --items FILE --events FILE

An item is an op. Which of its samples launch all of its kernels is found on fake tensors first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from first_gpu import protocol, stand_in, warm
from first_gpu.supervise import Task

TOOLS = ("memcheck", "racecheck")
_FOUND = 99  # exit code of the sanitizer where it has found something
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")


def tool() -> str | None:
    """Return the path of compute-sanitizer, ``None`` where this machine has none."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_PLACES])
    return shutil.which("compute-sanitizer", path=path)


def tasks(path: str, ops: Sequence[str], environment: dict[str, str]) -> list[Task]:
    """Return a task for each op under each tool."""
    return [
        Task(
            f"{op}-{name}",
            [path, "--tool", name, "--error-exitcode", str(_FOUND), "--print-limit", "20"]
            + [sys.executable, "-m", "first_gpu.sanitized"],
            [op],
            environment,
            item_seconds=120,
            most_ends=1,
        )
        for name in TOOLS
        for op in ops
    ]


def covering(op: str, dtype: str = "bfloat16") -> list[tuple[str, int]]:
    """Return kind and number of samples of an op that launch each of its kernels once or more."""
    import fake_gpu

    kernels: set[Any] = set()

    def launched(kernel: Any, arguments: dict[str, Any], grid: Any) -> None:
        kernels.add(kernel)

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace()

    chosen = []
    with fake_gpu.present(compile=nothing, observe=launched):
        for item in warm.items([op]):
            if item.split()[1] != dtype:
                continue
            before = len(kernels)
            warm.compile_item(item)
            if len(kernels) > before:
                chosen.append((item.split()[2], int(item.split()[3])))
    for kernel in kernels:
        kernel.device_caches.clear()  # nothing was compiled
    return chosen


def call_on_gpu(op: str, kind: str, number: int) -> Callable[[], object]:
    """Return what runs a sample and its gradients on the GPU."""
    import hot_samples
    import torch

    from fusedops.specs import all_specs
    from fusedops.specs.comparison import run

    device, dtype = torch.device("cuda"), torch.bfloat16
    if kind == "hot":
        return hot_samples.made(warm.hot_calls(op, dtype)[number], dtype, device).run
    sample = all_specs()[op].samples(device, dtype)[number]
    return lambda: run(all_specs()[op].op, sample)


def main() -> int:
    """Run the samples of each item."""
    options = protocol.options(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    events = protocol.Events(options.events)
    chosen = {op: covering(op) for op in json.loads(options.items.read_text())}
    stand_in.install_if_asked()
    import torch

    import fusedops

    for op, samples in chosen.items():
        events.start(op)
        for kind, number in samples:
            with fusedops.use_backend("triton"):
                call_on_gpu(op, kind, number)()
        torch.cuda.synchronize()
        events.end(op, "passed", samples=len(samples))
    return 0


if __name__ == "__main__":
    sys.exit(main())

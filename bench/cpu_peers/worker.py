"""A process that runs some of the ways: it answers one line of JSON for each line on its input.

``{"make": [kind, number of the contest, name], "to": FILE}`` makes a way and saves its outputs,
``{"reference": [kind, number], "to": FILE}`` those of the reference, ``{"time": name, "seconds":
S}`` takes a sample of about that length, ``{"forget": true}`` frees all ways. A call that fails
answers ``{"reason": TEXT}``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from importlib import metadata
from typing import Any

import torch
import ways

import fusedops
from fusedops.runtime.timer import CpuClock, Variant

# A call that takes longer needs no untimed call before it, to warm the caches.
LONG = 0.1


class Worker:
    """Keeps the ways of the current contest."""

    def __init__(self) -> None:
        self.running: dict[str, ways.Running] = {}
        self.seconds: dict[str, float] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a line asks for."""
        if "make" in request:
            kind, number, name = request["make"]
            way = ways.contests(kind)[number].ways[name]
            running = self.running[name] = way.make()
            torch.save([each.detach().clone() for each in running.outputs], request["to"])
            self.seconds[name] = self._sample(name, 1)[0]
            return {"version": f"{way.package} {version(way.package)}"}
        if "reference" in request:
            kind, number = request["reference"]
            outputs = ways.contests(kind)[number].reference()
            torch.save([each.detach().clone() for each in outputs], request["to"])
            return {}
        if "time" in request:
            name = request["time"]
            if self.seconds[name] < LONG:
                self._sample(name, 1)
            repeat = max(1, round(request["seconds"] / self.seconds[name]))
            seconds, disturbed = self._sample(name, repeat)
            self.seconds[name] = seconds
            return {"seconds": seconds, "disturbed": disturbed}
        self.running.clear()
        torch._dynamo.reset()
        gc.collect()
        return {}

    def _sample(self, name: str, repeat: int) -> tuple[float, bool]:
        running = self.running[name]
        return CpuClock().sample(Variant(name, running.run, running.prepare), repeat)


def version(package: str) -> str:
    """Return the version of a package; fusedops runs from the source tree."""
    return fusedops.__version__ if package == "fusedops" else metadata.version(package)


def main() -> None:
    """Answer until the input ends; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    fusedops.tune_host(threads=torch.get_num_threads())
    worker = Worker()
    for line in sys.stdin:
        try:
            result = worker.answer(json.loads(line))
        except Exception as error:  # the reason is a row of the table
            text = str(error).strip() or type(error).__name__
            result = {"reason": f"{type(error).__name__}: {text.splitlines()[0][:200]}"}
        answers.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()

"""Each fuzzer for a few seconds, always the same calls: ``make fuzz`` runs others, for longer."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusedops._core import extension

from . import engine
from .calls import Arguments, Functions, Operators

SECONDS = 5.0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.skipif(extension.cpu_library() is not None, reason="it is the kernels that are tried")
@pytest.mark.parametrize("fuzzer", [Operators, Functions, Arguments], ids=lambda kind: kind.name)
def test_no_call_kills_the_process_or_is_wrong(fuzzer: type[engine.Fuzzer], tmp_path: Path) -> None:
    report = engine.run(
        fuzzer(), seed=1, calls=10**9, folder=tmp_path, seconds=SECONDS, most_findings=5
    )
    print(report)
    assert not report.findings, f"{report}\n{report.findings[0]}"
    assert report.counts["returned"] > 0


class _Deadly:
    """Calls of which some die, hang, are wrong, or raise."""

    name = "deadly"
    batch = 10

    def run(self, rng: random.Random) -> str:
        number = self._number(rng)
        if number == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 8:
            while True:
                pass
        if number == 12:
            raise engine.WrongResultError("it is 12")
        return "returned" if number % 2 else "refused"

    def describe(self, rng: random.Random) -> str:
        return f"deadly({self._number(rng)})"

    def _number(self, rng: random.Random) -> int:
        state = rng.getstate()
        return next(n for n in range(25) if engine.rng_of(7, n).getstate() == state)


def test_a_death_costs_one_call_and_is_known_by_its_number(tmp_path: Path) -> None:
    report = engine.run(_Deadly(), seed=7, calls=25, folder=tmp_path, patience=1.0, processes=2)
    found = {finding.index: finding for finding in report.findings}
    assert {index: each.outcome for index, each in found.items()} == {
        3: "dies of SIGSEGV",
        8: "hangs for 1 s",
        12: "wrong result",
    }
    assert found[12].call == "deadly(12)" and "it is 12" in found[12].log
    assert found[12].again.endswith("--seed 7 --first 12 --calls 1")
    assert report.counts == {"returned": 11, "refused": 11} and report.calls == 25

"""Each fuzzer for a few seconds, always the same calls: ``make fuzz`` runs others, for longer."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedops._core import extension

from . import engine, snippet
from .arguments import Arguments
from .functions import Functions
from .operators import Operators

SECONDS = 5.0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.ci
@pytest.mark.skipif(extension.cpu_library() is not None, reason="it is the kernels that are tried")
@pytest.mark.parametrize("fuzzer", [Operators, Functions, Arguments], ids=lambda kind: kind.name)
def test_no_call_kills_the_process_or_is_wrong(fuzzer: type[engine.Fuzzer], tmp_path: Path) -> None:
    report = engine.run(
        fuzzer(), seed=1, calls=10**9, folder=tmp_path, seconds=SECONDS, most_findings=5
    )
    print(report)
    first = "\n".join(f"{finding.snippet}\n{finding.log}" for finding in report.findings[:1])
    assert not report.findings, f"{report}\n{first}"
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
        return "returned" if number % 2 else "SomeError"

    def describe(self, rng: random.Random) -> tuple[str, str]:
        return "deadly", f"call({self._number(rng)})"

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
    assert all(each.again == each.outcome for each in report.findings)
    assert "call(12)" in found[12].snippet and "it is 12" in found[12].log
    assert "--seed 7 --first 12 --calls 1" in found[12].snippet
    assert report.counts == {"returned": 11, "other": 11} and report.calls == 25
    lines = (tmp_path / "deadly-7.jsonl").read_text().splitlines()
    assert {json.loads(line)["index"] for line in lines} == {3, 8, 12}


def test_a_snippet_makes_the_arguments_again() -> None:
    counts = torch.tensor([[3, -1], [2**40, 0]])
    strided = torch.arange(12).reshape(3, 4).t()
    repeated = torch.tensor([[float("inf")], [float("nan")]]).expand(2, 3)
    given = [counts, strided, repeated, None, 1.5, float("-inf"), "x", [True, 2], torch.bfloat16]
    code = snippet.call("record", given)
    made: list[Any] = []
    exec(code, {"record": lambda *args: made.extend(args)})
    for one, other in zip(made, given, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.stride() == other.stride()
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        else:
            assert one == other
    odd = [torch.zeros(2, 2).to_sparse(), torch.zeros(3, device="meta"), torch.ones(2).cfloat()]
    made.clear()
    exec(snippet.call("record", odd), {"record": lambda *args: made.extend(args)})
    assert [(x.shape, x.dtype, x.layout, x.device) for x in made] == [
        (x.shape, x.dtype, x.layout, x.device) for x in odd
    ]

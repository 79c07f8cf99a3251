"""Faults are planted in simulated jobs: the one that causes them is named, and no other."""

from __future__ import annotations

import random

import pytest
import torch

from fusedops.profiler import Detector, Finding, RunShape
from fusedops.profiler.timings import FIELDS, column
from tests.profiler.simulated import KINDS, Fault, draw_fault, draw_shape, steps

STEPS = 40


def findings(shape: RunShape, seed: int, fault: Fault | None) -> list[Finding]:
    detector = Detector(shape)
    rows = steps(shape, STEPS, random.Random(seed), fault)
    return [finding for step, values in rows for finding in detector.update(step, values)]


def is_named(fault: Fault, found: list[Finding]) -> bool:
    """Return whether the first finding names the fault, within ten steps."""
    if not found:
        return False
    first = found[0]
    same = first.kind == fault.kind and first.ranks == fault.ranks
    section = first.section == fault.section
    return same and section and fault.since <= first.step <= fault.since + 10


def named_share(kind: str, seeds: range) -> float:
    named = 0
    for seed in seeds:
        draw = random.Random(f"{kind} {seed}")
        shape = draw_shape(draw, kind)
        fault = draw_fault(draw, shape, kind)
        named += is_named(fault, findings(shape, seed, fault))
    return named / len(seeds)


@pytest.mark.ci(every=2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_cause_is_named(kind: str) -> None:
    assert named_share(kind, range(12)) == 1.0


@pytest.mark.slow
def test_of_five_hundred_faults_99_of_100_are_named() -> None:
    shares = [named_share(kind, range(1000, 1072)) for kind in KINDS]
    assert sum(shares) / len(shares) >= 0.99, dict(zip(KINDS, shares, strict=True))


def false_alarms(seeds: range) -> int:
    alarms = 0
    for seed in seeds:
        draw = random.Random(seed)
        alarms += bool(findings(draw_shape(draw), seed, None))
    return alarms


def test_a_healthy_job_is_left_alone() -> None:
    assert false_alarms(range(20)) == 0


@pytest.mark.slow
def test_of_healthy_jobs_at_most_one_in_a_hundred_gets_a_finding() -> None:
    assert false_alarms(range(5000, 5300)) <= 3


def test_a_finding_is_told_once_and_again_when_it_comes_back() -> None:
    shape = RunShape({"pp": 1, "dp": 4, "cp": 1, "tp": 1, "ep": 1})
    detector = Detector(shape)
    usual = torch.zeros(4, len(FIELDS))
    usual[:, column("step")] = usual[:, column("forward")] = 1.0
    slow = usual.clone()
    slow[3, column("forward")] = 1.3
    times = [usual] * 15 + [slow] * 20 + [usual] * 30 + [slow] * 20
    told = [
        (f.kind, f.step) for step, rows in enumerate(times, 1) for f in detector.update(step, rows)
    ]
    assert [kind for kind, _ in told] == ["rank", "rank"]
    assert 16 < told[0][1] <= 26 and 66 < told[1][1] <= 76

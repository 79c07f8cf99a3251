"""Host inspection and tuning: what is applied is applied, and only when called."""

from __future__ import annotations

import fresh_process
import pytest
import torch

import fusedops
from fusedops.runtime import host

LINUX_GLIBC = pytest.mark.skipif(
    host.maps_large_blocks() is None, reason="the C library's allocator is not glibc's"
)


def run(program: str) -> str:
    """Run in a process of its own: the tuning of a process cannot be undone."""
    return fresh_process.run(program, check=True).stdout


@LINUX_GLIBC
def test_only_the_call_changes_the_allocator_and_inspection_sees_it() -> None:
    out = run(
        "import fusedops\n"
        "from fusedops.runtime import host\n"
        "def good(): return {each.setting: each.good for each in host.inspect_host()}\n"
        "print(host.maps_large_blocks(), good()['allocator'])\n"
        "report = fusedops.tune_host(threads=host.physical_cores())\n"
        "print(host.maps_large_blocks(), report.allocator_tuned)\n"
        "print(good()['allocator'], good()['threads'])\n"
    )
    assert out.split() == ["True", "False", "False", "True", "True", "True"]


@pytest.mark.skipif(host._huge_page_mode() != "madvise", reason="not this kernel's mode")
@pytest.mark.parametrize("early", [True, False])
def test_huge_pages_need_an_early_call(early: bool) -> None:
    first = "" if early else "torch.ones(1)\n"
    out = run(
        "import os, torch, fusedops\n"
        "os.environ.pop('THP_MEM_ALLOC_ENABLE', None)\n"
        f"{first}"
        "change = fusedops.tune_host().changes[0]\n"
        "print(change.setting, change.applied, 'THP_MEM_ALLOC_ENABLE' in os.environ)\n"
    )
    assert out.split() == ["huge", "pages", str(early), str(early)]


def test_threads_are_set_as_asked() -> None:
    before = torch.get_num_threads()
    try:
        report = host._tune_threads(1)
        assert torch.get_num_threads() == 1
        assert report.applied and report.note.startswith("1")
    finally:
        torch.set_num_threads(before)


def test_threads_that_somebody_divided_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(host, "physical_cores", lambda: before + 3)
    monkeypatch.setenv("OMP_NUM_THREADS", str(before))
    assert host._tune_threads(None).applied
    assert torch.get_num_threads() == before
    try:
        monkeypatch.delenv("OMP_NUM_THREADS")
        host._tune_threads(None)
        assert torch.get_num_threads() == before + 3
    finally:
        torch.set_num_threads(before)


def test_wrong_number_of_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="tune_host: threads must be at least 1, got 0"):
        fusedops.tune_host(threads=0)


def test_too_many_threads_are_named_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "physical_cores", lambda: torch.get_num_threads() + 3)
    finding = host._look_at_threads()
    assert not finding.good
    assert f"OMP_NUM_THREADS={torch.get_num_threads() + 3}" in finding.cure


def test_every_slow_finding_has_a_cost() -> None:
    for finding in host.inspect_host():
        assert finding.good or finding.cost, finding


def test_cores_are_counted_once_and_within_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "allowed_cpus", lambda: set(range(8)))
    monkeypatch.setattr(host, "_siblings", lambda cpu: frozenset((cpu % 4, cpu % 4 + 4)))
    monkeypatch.setattr(host, "_cpu_quota", lambda: None)
    assert host.physical_cores() == 4
    monkeypatch.setattr(host, "_cpu_quota", lambda: 2.5)
    assert host.physical_cores() == 2
    monkeypatch.setattr(host, "_cpu_quota", lambda: 0.5)
    assert host.physical_cores() == 1


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0,2", {0, 2})]
)
def test_cpu_lists_are_read(text: str, cpus: set[int]) -> None:
    assert host._cpu_list(text) == cpus

"""Links, late ranks and clocks that differ are found in traces of several ranks."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from fusedops.cli.main import app
from fusedops.profiler.trace_links import (
    clock_offsets,
    collective_of,
    late_seconds,
    link_times,
    matched,
)
from fusedops.profiler.traces import TraceFile, merged, read_traces

RANKS, STEPS, PER_STEP = 8, 3, 12
ELEMENTS = 1 << 20


def event(name: str, begin: float, duration: float, cat: str, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": begin,
        "dur": duration,
        "tid": 7,
        "pid": 0,
        "args": args,
    }


def arguments(ranks: list[int], kind: str, name: str = "_allgather_base") -> dict[str, Any]:
    return {
        "Collective name": name,
        "In msg nelems": ELEMENTS,
        "Out msg nelems": ELEMENTS * len(ranks),
        "Group size": len(ranks),
        "dtype": "BFloat16",
        "Process Group Name": "3",
        "Process Group Description": kind,
        "Process Group Ranks": str(ranks),
    }


def write_traces(
    folder: Path, clocks: dict[int, float], late: int, late_us: float, slow_pair: int
) -> None:
    """Write traces of four groups of two ranks, and of one group of all ranks.

    A transfer of a pair takes 100 us, of ``slow_pair`` 300 us, and one of all ranks 500 us. Rank
    ``late`` arrives later by so many microseconds at each collective of all ranks.
    """
    random.seed(0)
    events: dict[int, list[Any]] = {rank: [] for rank in range(RANKS)}
    now = 0.0
    for step in range(STEPS):
        begin = now
        for _ in range(PER_STEP):
            for pair in range(RANKS // 2):
                ranks = [2 * pair, 2 * pair + 1]
                arrivals = {rank: now + random.uniform(0, 50) for rank in ranks}
                end = max(arrivals.values()) + (300 if pair == slow_pair else 100)
                for rank in ranks:
                    args = arguments(ranks, "mesh_tp", "all_reduce")
                    length = end - arrivals[rank]
                    events[rank].append(
                        event("ncclDevKernel_AllReduce", arrivals[rank], length, "kernel", **args)
                    )
            now += 1000
            arrivals = {rank: now + random.uniform(0, 20) for rank in range(RANKS)}
            arrivals[late] = now + 20 + late_us
            end = max(arrivals.values()) + 500
            for rank in range(RANKS):
                args = arguments(list(range(RANKS)), "default_pg")
                length = end - arrivals[rank]
                events[rank].append(
                    event("ncclDevKernel_AllGather", arrivals[rank], length, "kernel", **args)
                )
            now = end + 100
        for rank in range(RANKS):
            name = f"ProfilerStep#{step}"
            for cat in ("user_annotation", "gpu_user_annotation"):
                events[rank].append(event(name, begin, now - begin, cat))
    for rank, items in events.items():
        moved = [item | {"ts": item["ts"] + 1e6 * clocks.get(rank, 0.0)} for item in items]
        record = {"traceEvents": moved, "distributedInfo": {"rank": rank}}
        (folder / f"{rank}.json").write_text(json.dumps(record))


CLOCKS = {3: 4.25, 6: -2.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces")
    write_traces(path, CLOCKS, late=5, late_us=800, slow_pair=2)
    return path


def test_clocks_are_aligned_by_collectives(folder: Path) -> None:
    together = matched({trace.rank: trace.collectives for trace in read_traces(folder)})
    offsets = clock_offsets(together)
    assert set(offsets) == set(range(RANKS))
    for rank, offset in offsets.items():
        assert offset == pytest.approx(CLOCKS.get(rank, 0.0), abs=1e-6), rank


def test_the_rank_that_others_wait_for_is_named(folder: Path) -> None:
    together = matched({trace.rank: trace.collectives for trace in read_traces(folder)})
    late = late_seconds(together, clock_offsets(together))
    assert max(late, key=late.__getitem__) == 5
    # The others arrive within 20 us.
    assert late[5] == pytest.approx(PER_STEP * 810e-6, rel=0.05)
    assert all(seconds < 0.1 * late[5] for rank, seconds in late.items() if rank != 5)


def test_a_transfer_is_the_shortest_time_of_a_collective(folder: Path) -> None:
    together = matched({trace.rank: trace.collectives for trace in read_traces(folder)})
    links = {(link.kind, link.ranks): link for link in link_times(together)}
    assert len(links) == 5
    gathered = links["world", tuple(range(RANKS))]
    assert gathered.seconds == pytest.approx(PER_STEP * 500e-6, rel=1e-6)
    assert gathered.bytes == PER_STEP * 2 * ELEMENTS * (RANKS - 1)
    for pair in range(RANKS // 2):
        link = links["tp", (2 * pair, 2 * pair + 1)]
        assert link.seconds == pytest.approx(PER_STEP * (300e-6 if pair == 2 else 100e-6), rel=1e-6)
        assert link.bytes == PER_STEP * 2 * ELEMENTS  # an all-reduce of two ranks: 2 (n - 1) / n


def test_the_command_names_link_clock_and_rank(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "merged.json"
    app(["profile", str(folder), "--trace", str(trace)], standalone_mode=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "if link (tp) 4, 5 were as fast" in text
    assert "4.250 s ahead" in text and "others wait for rank 5" in text
    events = json.loads(trace.read_text())["traceEvents"]
    # By one clock all ranks leave a collective at the same moment.
    ends: dict[int, list[float]] = {}
    for item in events:
        if item["name"] == "ncclDevKernel_AllGather":
            ends.setdefault(item["pid"], []).append(item["ts"] + item["dur"])
    assert len(ends) == RANKS
    for rank in range(RANKS):
        assert ends[rank] == pytest.approx(ends[0], abs=1.0)


def test_ranks_that_are_missing_and_other_formats_do_not_stop_it(folder: Path) -> None:
    traces = [trace for trace in read_traces(folder) if trace.rank not in (0, 4)]
    together = matched({trace.rank: trace.collectives for trace in traces})
    offsets = clock_offsets(together)
    assert offsets[3] - offsets[1] == pytest.approx(4.25, abs=1e-6)
    assert len(merged([*traces, TraceFile(9)], offsets)["traceEvents"]) > 100
    assert clock_offsets(matched({})) == {} and link_times(matched({})) == []


def test_events_of_another_version_are_told(tmp_path: Path) -> None:
    good = {"traceEvents": [event("gemm", 0.0, 5.0, "kernel")]}
    (tmp_path / "rank0.json").write_text(json.dumps(good))
    bad = {"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "dur": 5.0}]}
    (tmp_path / "rank1.json").write_text(json.dumps(bad | {"distributedInfo": "rank 1"}))
    first, second = read_traces(tmp_path)
    assert first.times is not None and second.times is None
    assert "another format" in second.note


@pytest.mark.parametrize(
    ("name", "share"),
    [("allreduce", 1.5), ("_reduce_scatter_base", 0.75), ("all_to_all", 0.75), ("broadcast", 1.0)],
)
def test_bytes_that_a_rank_sends(name: str, share: float) -> None:
    args = arguments([0, 1, 2, 3], "mesh_dp", name)
    item = collective_of({"args": args}, 0.0, 1.0)
    assert item is not None and item.bytes == share * 2 * ELEMENTS and item.kind == "dp"
    assert collective_of({"args": {"stream": 7}}, 0.0, 1.0) is None


def test_long_lists_of_ranks_are_cut_by_the_profiler() -> None:
    args = arguments(list(range(4)), "default_pg") | {"Process Group Ranks": "[0, 1, ..., 1023]"}
    item = collective_of({"args": args | {"Group size": 1024}}, 0.0, 1.0)
    assert item is not None and item.ranks == ()


def _profiled(rank: int, folder: str) -> None:
    x = torch.zeros(1 << 16)

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(f"{folder}/rank{rank}.json")

    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=2),
        on_trace_ready=write,
    ) as profiler:
        for _ in range(3):
            time.sleep(0.05 * rank)  # the other rank waits
            dist.all_reduce(x)
            profiler.step()


def test_transfers_of_real_gloo_processes_are_communication(
    on_new_world: Callable[..., list[Any]], tmp_path: Path
) -> None:
    on_new_world(_profiled, str(tmp_path))
    first, second = (trace.times for trace in read_traces(tmp_path))
    assert first is not None and second is not None
    assert first.communication >= 0.04 > second.communication > 0
    assert second.free >= 0.04

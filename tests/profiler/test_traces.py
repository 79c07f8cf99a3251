"""Traces of torch's profiler: times of steps, links, late ranks and clocks that differ."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from fusedops.launch.config_table import InputError
from fusedops.profiler.trace_links import (
    clock_offsets,
    collective_of,
    late_seconds,
    link_times,
    matched,
)
from fusedops.profiler.traces import TraceFile, merged, read_traces


def event(
    name: str, begin: float, duration: float, cat: str = "kernel", tid: int = 7, **args: Any
) -> dict[str, Any]:
    times = {"ph": "X", "ts": begin, "dur": duration, "tid": tid, "pid": 0}
    return times | {"cat": cat, "name": name, "args": args}


def made(rank: int, *, slow: float = 1.0) -> dict[str, Any]:
    """Return a trace of two steps of 1,000 us on a GPU."""
    events = []
    for number in range(2):
        at = 1000.0 * number
        events += [
            event(f"ProfilerStep#{number}", at, 1000, "user_annotation", 1),
            event("gemm", at + 100, 300 * slow),
            event("ncclDevKernel_AllReduce", at + 300, 300, tid=20),  # 100 to 200 us are hidden
            event("ncclDevKernel_SendRecv", at + 700, 100, tid=20),
            event("enumerate(DataLoader)#next", at, 50, "user_annotation", 1),
        ]
    return {"traceEvents": events, "distributedInfo": {"rank": rank}}


def test_a_made_trace_has_the_times_it_was_made_with(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(made(1)))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(made(0, slow=1.5)).encode()))
    slow, usual = read_traces(tmp_path)
    assert (slow.rank, usual.rank) == (0, 1)
    assert usual.times is not None and slow.times is not None
    expected = {"step": 1000, "computing": 300, "communication": 400, "not_overlapped": 300}
    expected |= {"bubble": 100, "preparing": 50, "free": 350}
    for name, microseconds in expected.items():
        assert getattr(usual.times, name) == pytest.approx(1e-6 * microseconds), name
    assert slow.times.computing == pytest.approx(450e-6)
    assert slow.times.not_overlapped == pytest.approx(150e-6)
    assert usual.kernels["gemm"] == (pytest.approx(600e-6), 2)


def test_damaged_traces_are_told_and_the_others_read(tmp_path: Path) -> None:
    text = json.dumps(made(0))
    (tmp_path / "rank0.json").write_text(text)
    (tmp_path / "rank1.json").write_text(text[: len(text) // 2])
    (tmp_path / "rank2.json.gz").write_bytes(gzip.compress(text.encode())[:60])
    (tmp_path / "rank3.json").write_text('{"traceEvents": []}')
    other = {"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "dur": 5.0}]}
    (tmp_path / "rank4.json").write_text(json.dumps(other | {"distributedInfo": "rank 4"}))
    traces = read_traces(tmp_path)
    assert [trace.times is not None for trace in traces] == [True] + [False] * 4
    assert all(trace.note for trace in traces[1:]) and "rank1.json is damaged" in traces[1].note
    assert "another format" in traces[4].note
    (tmp_path / "rank0.json").unlink()
    with pytest.raises(InputError, match="no trace that can be read"):
        read_traces(tmp_path)
    with pytest.raises(InputError, match="has no traces"):
        read_traces(tmp_path / "nothing")


def test_the_command_shows_traces(tmp_path: Path, output_of: Callable[..., str]) -> None:
    for rank in (0, 1, 3):
        slow = 2.0 if rank == 3 else 1.0
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(made(rank, slow=slow)))
    text = output_of("profile", tmp_path)
    for words in ("3 ranks", "gemm", "no trace of ranks 2", "if rank 3 were as fast"):
        assert words in text


RANKS, STEPS, PER_STEP = 8, 3, 12
ELEMENTS = 1 << 20


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

    def add(kernel: str, arrivals: dict[int, float], transfer: float, *names: str) -> float:
        end = max(arrivals.values()) + transfer
        args = arguments(list(arrivals), *names)
        for rank, arrival in arrivals.items():
            events[rank].append(event(kernel, arrival, end - arrival, "kernel", **args))
        return end

    now = 0.0
    for step in range(STEPS):
        begin = now
        for _ in range(PER_STEP):
            for pair in range(RANKS // 2):
                ranks = 2 * pair, 2 * pair + 1
                arrivals = {rank: now + random.uniform(0, 50) for rank in ranks}
                transfer = 300 if pair == slow_pair else 100
                add("ncclDevKernel_AllReduce", arrivals, transfer, "mesh_tp", "all_reduce")
            now += 1000
            arrivals = {rank: now + random.uniform(0, 20) for rank in range(RANKS)}
            arrivals[late] = now + 20 + late_us
            now = 100 + add("ncclDevKernel_AllGather", arrivals, 500, "default_pg")
        for rank in range(RANKS):
            for cat in ("user_annotation", "gpu_user_annotation"):
                events[rank].append(event(f"ProfilerStep#{step}", begin, now - begin, cat))
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
    folder: Path, tmp_path: Path, output_of: Callable[..., str]
) -> None:
    trace = tmp_path / "merged.json"
    text = output_of("profile", folder, "--trace", trace)
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
    x, matrix = torch.zeros(1 << 16), torch.randn(64, 64)

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(f"{folder}/rank{rank}.json")

    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=2),
        on_trace_ready=write,
    ) as profiler:
        for _ in range(3):
            for _ in range(20):
                matrix @ matrix
            time.sleep(0.05 * rank)  # the other rank waits
            dist.all_reduce(x)
            profiler.step()


def test_traces_of_torchs_profiler_are_read(
    on_processes: Callable[..., list[Any]], tmp_path: Path
) -> None:
    on_processes(_profiled, 2, str(tmp_path))
    traces = read_traces(tmp_path)
    first, second = (trace.times for trace in traces)
    assert first is not None and second is not None
    assert first.communication >= 0.04 > second.communication > 0
    assert second.computing > 0 and second.free >= 0.04
    for trace in traces:
        assert trace.kernels["aten::matmul"][1] == 40

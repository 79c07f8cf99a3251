"""Traces of torch's profiler become the times of steps: exact on made ones, close on real ones."""

from __future__ import annotations

import gzip
import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedops.cli.main import app
from fusedops.launch.config_table import InputError
from fusedops.profiler.trace_links import clock_offsets, link_times, matched
from fusedops.profiler.traces import clipped, length, minus, read_traces, union


def test_communication_that_nothing_hides_is_interval_arithmetic() -> None:
    assert length(minus([(50.0, 187.0)], [(0.0, 100.0)])) == 87.0
    assert minus([(0, 10), (20, 30)], [(2, 3), (5, 22), (29, 40)]) == [(0, 2), (3, 5), (22, 29)]
    assert union([(3, 4), (0, 1), (1, 2)]) == [(0, 2), (3, 4)]
    assert clipped([(0, 10), (20, 30)], (5, 25)) == [(5, 10), (20, 25)]


def event(name: str, begin: float, duration: float, cat: str = "kernel", tid: int = 7) -> Any:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": duration, "tid": tid}


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
    traces = read_traces(tmp_path)
    assert [trace.times is not None for trace in traces] == [True, False, False, False]
    assert all(trace.note for trace in traces[1:]) and "rank1.json is damaged" in traces[1].note
    (tmp_path / "rank0.json").unlink()
    with pytest.raises(InputError, match="no trace that can be read"):
        read_traces(tmp_path)
    with pytest.raises(InputError, match="has no traces"):
        read_traces(tmp_path / "nothing")


def test_a_trace_of_the_profiler_on_the_cpu_is_read(tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile, schedule

    x = torch.randn(256, 256)

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(str(tmp_path / "rank0.json"))

    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=2),
        on_trace_ready=write,
    ) as profiler:
        for _ in range(3):
            for _ in range(20):
                x @ x
            time.sleep(0.02)
            profiler.step()
    (trace,) = read_traces(tmp_path)
    times = trace.times
    assert times is not None and times.free >= 0.015 and times.computing > 0
    assert times.computing + times.free == pytest.approx(times.step, rel=0.02)
    assert trace.kernels["aten::matmul"][1] == 40


@pytest.mark.ci
def test_a_thousand_ranks_are_read_in_a_minute(tmp_path: Path) -> None:
    events = [event(f"kernel {n % 50}", 10.0 * n, 9.0, tid=n % 3) for n in range(3000)]
    group = {"Collective name": "_allgather_base", "In msg nelems": 100, "dtype": "BFloat16"}
    group |= {"Process Group Name": "0", "Process Group Description": "default_pg"}
    group |= {"Process Group Ranks": "[0, 1, ..., 1023]", "Group size": 1024}
    for n in range(300):
        gather = event("ncclDevKernel_AllGather", 6.0 * n, 5.0, tid=20)
        events.append(gather | {"args": group})
    for rank in range(1024):
        record = made(rank)
        record["traceEvents"] += events
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(record))
    begin = time.perf_counter()
    traces = read_traces(tmp_path, processes=2)
    together = matched({trace.rank: trace.collectives for trace in traces})
    (link,) = link_times(together)
    assert len(clock_offsets(together)) == len(link.ranks) == 1024
    assert len(traces) == 1024 and time.perf_counter() - begin < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB


def test_the_command_shows_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1, 3):
        slow = 2.0 if rank == 3 else 1.0
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(made(rank, slow=slow)))
    app(["profile", str(tmp_path)], standalone_mode=False)
    text = " ".join(capsys.readouterr().out.split())
    for words in ("3 ranks", "gemm", "no trace of ranks 2", "if rank 3 were as fast"):
        assert words in text

"""Which processes may train together, which GPU each takes, and how they connect."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from fusedops.launch import processes
from fusedops.launch.config_table import InputError
from fusedops.launch.start_checks import Place, check, exchange
from fusedops.parallel.comm import host_groups

GPU_1 = Place("here", "GPU-1", 2, "")
FITTING: dict[str, list[Place]] = {
    "two GPUs of a host": [GPU_1, replace(GPU_1, gpu="GPU-2")],
    "equal names of GPUs of two hosts": [GPU_1, replace(GPU_1, host="there")],
    "the CPU": [replace(GPU_1, gpu="")] * 3,
}
REFUSED: dict[str, tuple[list[Place], str]] = {
    "one GPU twice": (
        [GPU_1, replace(GPU_1, gpu="GPU-2"), GPU_1],
        "ranks 0, 2 have one GPU of here",
    ),
    "a host without a GPU": (
        [GPU_1, replace(GPU_1, host="there", gpu="")],
        r"torch sees no GPU in rank 1 \(there\), and the others have one",
    ),
    "unequal hosts": (
        [GPU_1, replace(GPU_1, host="there", local_ranks=1)],
        "as many processes, got 2 on here, 1 on there",
    ),
    "a problem of one": ([GPU_1, replace(GPU_1, gpu="", problem="it is broken")], "it is broken"),
}


def test_places_that_fit_are_accepted() -> None:
    for places in FITTING.values():
        check(places)


@pytest.mark.parametrize("case", REFUSED)
def test_places_that_do_not_fit_are_refused(case: str) -> None:
    places, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        check(places)


def test_places_are_exchanged_as_often_as_asked() -> None:
    store, size = dist.HashStore(), 3
    for attempt in ("first", "second"):
        given = [replace(GPU_1, host=f"{attempt} {rank}") for rank in range(size)]
        with ThreadPoolExecutor(size) as pool:
            exchanged = pool.map(exchange, given, [store] * size, range(size), [size] * size)
        assert list(exchanged) == [given] * size


def test_a_process_that_sees_one_gpu_may_be_any_of_its_node() -> None:
    assert not processes._device_problem("auto", "cuda", local=3, count=1)
    assert not processes._device_problem("auto", "cuda", local=1, count=2)
    problem = processes._device_problem("auto", "cuda", local=3, count=2)
    assert "4 processes on a machine need as many GPUs there" in problem


def test_nccl_connects_at_once_and_hosts_have_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    world, hosts = object(), object()
    monkeypatch.setattr(dist, "init_process_group", lambda kind, **how: calls.append((kind, how)))
    monkeypatch.setattr(
        dist, "new_group", lambda backend, **_: hosts if backend == "gloo" else None
    )
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    companions: dict[object, object] = {}
    monkeypatch.setattr(host_groups, "_companions", companions)
    device = torch.device("cuda", 1)
    processes.connect(device, dist.HashStore(), 1, 4)
    processes.connect(device, dist.HashStore(), 0, 1)
    (kind, given), (alone, _) = calls
    assert kind == "nccl" and given["device_id"] == device and companions == {world: hosts}
    assert alone == "cpu:gloo,cuda:nccl"


def test_the_only_gpu_that_is_seen_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(processes.env, "launched", lambda: (3, 4, 3))
    monkeypatch.setattr(processes, "join_job", lambda: None)
    monkeypatch.setattr(processes, "_store", dist.HashStore)
    properties = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def stop(*args: Any, **options: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(processes, "exchange", stop)
    with pytest.raises(InterruptedError), processes.initialize_distributed("auto"):
        pass
    assert taken == [torch.device("cuda", 0)]

"""Which GPU a process takes, with processes that see a GPU of their own or that of another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from fusedops.launch import processes
from fusedops.launch.config_table import InputError


class Together(processes.Ranks):
    """A rank of three, of which the others say these places."""

    places: tuple[Any, ...] = ()

    def gathered(self, value: Any) -> list[Any]:
        return [value, *self.places]


def ranks_on(device: str, *places: Any) -> Together:
    ranks = Together(0, 3, torch.device(device), dist.HashStore())
    ranks.places = places
    return ranks


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.socket, "gethostname", lambda: "here")
    properties = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.usefixtures("gpu")
def test_each_process_has_a_gpu_of_its_own() -> None:
    processes._check_gpus(ranks_on("cuda:0", ("here", "GPU-2"), ("there", "GPU-1")))
    with pytest.raises(InputError, match="ranks 0, 2 have one GPU of here"):
        processes._check_gpus(ranks_on("cuda:0", ("here", "GPU-2"), ("here", "GPU-1")))
    processes._check_gpus(ranks_on("cpu", ("here", "GPU-1"), ("here", "GPU-1")))


def test_a_process_that_sees_one_gpu_may_be_any_of_its_node() -> None:
    processes._check_device("auto", "cuda", local=3, count=1)
    processes._check_device("auto", "cuda", local=1, count=2)
    with pytest.raises(InputError, match="4 processes on a machine need as many GPUs there"):
        processes._check_device("auto", "cuda", local=3, count=2)


def test_the_only_gpu_that_is_seen_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(processes.env, "launched", lambda: (3, 4, 3))
    monkeypatch.setattr(processes, "join_job", lambda: None)
    monkeypatch.setattr(processes, "_store", dist.HashStore)

    def stop(*args: Any, **options: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(dist, "init_process_group", stop)
    with pytest.raises(InterruptedError), processes.initialize_distributed("auto"):
        pass
    assert taken == [torch.device("cuda", 0)]

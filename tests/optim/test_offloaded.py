"""The offloaded optimizer: the synchronous one's bits, whatever happens between backward and step.

The "device" is host memory; all but the copies is what runs beside a GPU.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from optim_testing import Hook, TinyModel, masters, train
from torch import nn

from fusedops.optim import OffloadedAdamW, offloaded
from fusedops.optim._overlap import Bucket
from fusedops.runtime import host_memory

SMALL = {"bucket_bytes": 300, "threads": 2}  # several buckets of the tiny model
OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_norm": 0.05},
    {"max_norm": 1e6, "amsgrad": True, "bias_correction": False},
    {"skip_non_finite": True, "state_dtype": torch.bfloat16},
    {"device_fraction": 0.4, "max_norm": 0.05, "maximize": True},
]
each_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda each: "-".join(each) or "none")


def overlapped(params: Any, **options: Any) -> OffloadedAdamW:
    return OffloadedAdamW(params, **SMALL, **options)


@each_option
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_its_bits_are_those_of_the_synchronous_optimizer(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    options = {"dtype": dtype, "steps": 6, **options}
    expected = train(masters, **options)
    assert_same_bits(train(overlapped, **options), expected)
    assert_same_bits(train(overlapped, overlap=False, **options), expected)


def spoil(value: float) -> Hook:
    """Return what makes the gradients of two steps not finite."""

    def spoils(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step in (1, 3):
            model.layers[2].weight.grad[0] = value

    return spoils


def clipped(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def replaced(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = param.grad * 2 if param.grad is not None else None


def removed(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    list(model.parameters())[step % 3].grad = None


def scheduled(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] += 0.1


SKIPPING = {"skip_non_finite": True, "max_norm": 0.1}
RUNS: dict[str, dict[str, Any]] = {
    "several backwards": {"passes": 3},
    "gradient scaler": {"scaler": True},
    "infinity": SKIPPING | {"between": spoil(float("inf"))},
    "nan": SKIPPING | {"between": spoil(float("nan"))},
    **{each.__name__: {"between": each} for each in (clipped, replaced, removed, scheduled)},
}


@pytest.mark.parametrize("case", RUNS)
def test_what_happens_around_the_backward_is_seen(case: str) -> None:
    """A step that is skipped leaves no trace, and several backwards make one step."""
    options = {"steps": 6, **RUNS[case]}
    assert_same_bits(train(overlapped, **options), train(masters, **options))


@pytest.mark.parametrize("passes", [1, 2])
def test_steps_begin_in_the_last_backward_and_are_not_made_again(
    passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    begin = OffloadedAdamW._begin

    def note(self: OffloadedAdamW, bucket: Bucket, factor: float, *, steps: bool) -> None:
        begun.append(steps)
        begin(self, bucket, factor, steps=steps)

    monkeypatch.setattr(OffloadedAdamW, "_begin", note)
    model = TinyModel()
    optimizer = overlapped(model.parameters(), max_norm=1e6)
    buckets = len(optimizer._buckets)
    assert buckets > 1
    for step in range(4):
        optimizer.zero_grad()
        begun.clear()
        for index in range(passes):
            assert not begun or step == 0  # then it is not known how many backwards there are
            model.loss(2 * step + index).backward()
        assert begun == [True] * buckets
        optimizer.step()
        assert begun == [True] * buckets or (step, passes) == (0, 2)


def test_states_go_to_torch_and_come_back() -> None:
    model = TinyModel(torch.float32)
    ours = overlapped(model.parameters())
    model.train(ours, 0, 1)
    saved, weights = copy.deepcopy([ours.state_dict(), model.state_dict()])
    model.train(ours, 2, 3)
    expected = copy.deepcopy([ours.state_dict(), model.state_dict()])
    model.load_state_dict(weights)
    model.loss(0).backward()  # what it begins must not reach the state that is loaded
    ours.load_state_dict(copy.deepcopy(saved))
    assert_same_bits(ours.state_dict(), saved)
    model.train(ours, 2, 3)
    assert_same_bits([ours.state_dict(), model.state_dict()], expected)
    ours.close()
    stock = torch.optim.AdamW(model.parameters())
    stock.load_state_dict(copy.deepcopy(saved))
    for name in ("step", "exp_avg", "exp_avg_sq"):
        theirs, mine = (
            [each[name] for each in state["state"].values()]
            for state in (stock.state_dict(), saved)
        )
        assert_same_bits(theirs, mine)


@pytest.mark.parametrize(
    ("overlap", "options", "dtype", "bytes_of_a_parameter"),
    [
        (True, {}, torch.float32, 2 * 12 + 4),
        (True, {}, torch.bfloat16, 2 * 12 + 2),
        (True, {"state_dtype": torch.bfloat16}, torch.bfloat16, 2 * 8 + 2),
        (False, {}, torch.float32, 12 + 4),
        (False, {}, torch.bfloat16, 12 + 2),
        (False, {"amsgrad": True}, torch.bfloat16, 16 + 2),
        (False, {"device_fraction": 0.5}, torch.bfloat16, 7),
    ],
)
def test_the_host_memory_that_it_takes(
    overlap: bool, options: dict[str, Any], dtype: torch.dtype, bytes_of_a_parameter: int
) -> None:
    params = [nn.Parameter(torch.ones(1 << 12, dtype=dtype)) for _ in range(16)]
    optimizer = OffloadedAdamW(params, overlap=overlap, bucket_bytes=1, **options)
    staging = 2 * 4 * (1 << 12) if overlap else 0  # two workers, a parameter each
    steps = 4 * 16 * (1 - optimizer._device_fraction)
    assert optimizer.host_bytes == bytes_of_a_parameter * (1 << 16) + staging + steps


def test_too_little_memory_is_told_with_the_numbers_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offloaded, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(torch, "zeros_like", None)
    with pytest.raises(MemoryError, match=r"take 0\.\d\d GiB.*and 0\.00 GiB are available"):
        OffloadedAdamW([nn.Parameter(torch.ones(1 << 18))])


def test_the_memory_that_is_available_is_the_least_of_machine_and_container(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = tmp_path / "meminfo"
    machine.write_text("MemTotal: 900 kB\nMemAvailable:   500 kB\n")
    monkeypatch.setattr(host_memory, "_MEMORY", machine)
    monkeypatch.setattr(host_memory, "_GROUP", tmp_path)
    assert host_memory.available_bytes() == 500 * 1024
    for name, text in (
        ("memory.current", "300000\n"),
        ("memory.stat", "anon 1\ninactive_file 100000\n"),
        ("memory.max", "max\n"),
    ):
        (tmp_path / name).write_text(text)
    assert host_memory.available_bytes() == 500 * 1024
    (tmp_path / "memory.max").write_text("400000\n")
    assert host_memory.available_bytes() == 200000
    machine.unlink()
    assert host_memory.available_bytes() is None


def test_what_it_cannot_do_is_said() -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="bucket_bytes"):
        OffloadedAdamW([weight], bucket_bytes=0)
    optimizer = OffloadedAdamW([weight])
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
    optimizer.close()
    weight.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="after close"):
        optimizer.step()

"""Several ranks: sharded saving and loading, other numbers of ranks, and one that fails or dies."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoint_runs import Run, on_ranks, steps_in
from one_process import full_tensor
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fusedops.checkpoint import Checkpointer, CheckpointError, tensors
from fusedops.checkpoint import folder as folders

pytestmark = pytest.mark.distributed
STEPS = 6
OnRanks = Callable[..., list[Any]]


def _shard(model: nn.Module) -> None:
    fully_shard(model)


def _train(world: Any, root: str, steps: int, block: bool = True) -> str:
    run = Run(Path(root), wrap=_shard)
    torch.manual_seed(world.rank)  # each rank drops other elements
    return run.train(steps, block=block)


@pytest.mark.parametrize("block", [True, False])
def test_a_sharded_run_that_is_resumed_gives_the_same_bits(
    tmp_path: Path, on_two_ranks: OnRanks, block: bool
) -> None:
    whole = on_two_ranks(_train, str(tmp_path / "whole"), STEPS, block)
    on_two_ranks(_train, str(tmp_path / "parts"), 3, block)
    assert on_two_ranks(_train, str(tmp_path / "parts"), STEPS, block) == whole
    newest = folders.checkpoints(tmp_path / "parts")[0]
    names = {path.name for path in newest.iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", "rank-00000.pt", "rank-00001.pt"} < names


def _weights(rank: int, root: str) -> tuple[list[list[float]], int]:
    run = Run(Path(root), wrap=_shard if dist.get_world_size() > 1 else lambda model: None)
    restored = run.checkpointer.load()
    assert restored is not None
    values = run.model.first.weight, next(iter(run.optimizer.state.values()))["exp_avg"]
    return [full_tensor(value).tolist() for value in values], restored.step


def test_other_numbers_of_ranks_load_the_same_weights(
    tmp_path: Path, on_two_ranks: OnRanks, caplog: pytest.LogCaptureFixture
) -> None:
    on_two_ranks(_train, str(tmp_path), 2)
    ((one, step),) = on_ranks(1, _weights, str(tmp_path))
    assert step == 2
    for values, *_ in on_ranks(4, _weights, str(tmp_path)):
        assert values == one
    # and without any process group
    run = Run(tmp_path)
    run.checkpointer.load()
    assert run.model.first.weight.tolist() == one[0]
    assert "saved by 2 ranks and loaded by 1: random numbers are others" in caplog.text


def _in_other_groups(rank: int, root: str) -> list[int]:
    """Save and load on all ranks and on two of them, of which one is in a group of its own."""
    _, pair = dist.new_group([0]), dist.new_group([0, 1])
    steps = []
    for name, group in (("all", None), ("pair", pair)):
        if group is None or rank < 2:
            with Checkpointer(Path(root, name), nn.Linear(2, 2), group=group) as checkpointer:
                checkpointer.save(1)
                restored = checkpointer.load()
                assert restored is not None
                steps.append(restored.step)
    return steps


def test_ranks_may_be_in_other_groups(tmp_path: Path) -> None:
    assert on_ranks(3, _in_other_groups, str(tmp_path)) == [[1, 1], [1, 1], [1]]


def _with_other_steps(world: Any, root: str) -> list[str]:
    messages = []
    with Checkpointer(Path(root), nn.Linear(2, 2)) as checkpointer:
        for step in (5, 6):
            checkpointer.save(step)
        for call in (checkpointer.save, checkpointer.load, checkpointer.rollback):
            with pytest.raises(ValueError) as caught:
                call(5 + world.rank)
            messages.append(str(caught.value))
    return messages


def test_ranks_that_give_other_steps_all_raise(tmp_path: Path, on_two_ranks: OnRanks) -> None:
    message = "Checkpointer: step must be the same on all ranks, got 5 on rank 0, 6 on rank 1"
    assert on_two_ranks(_with_other_steps, str(tmp_path)) == [[message] * 3] * 2
    assert steps_in(tmp_path) == [6, 5]


def _save_with_a_full_disk(world: Any, root: str) -> str:
    run = Run(Path(root), wrap=_shard)
    run.checkpointer.load()
    error = OSError(errno.ENOSPC, "No space left on device")
    patch = mock.patch.object(folders, "write", side_effect=error)
    with pytest.raises(CheckpointError) as caught, patch if world.rank else nullcontext():
        run.checkpointer.save(9)
    return str(caught.value)


def test_a_rank_that_cannot_write_is_an_error_on_all(tmp_path: Path, on_two_ranks: OnRanks) -> None:
    on_two_ranks(_train, str(tmp_path), 2)
    for says in on_two_ranks(_save_with_a_full_disk, str(tmp_path)):
        assert "step 9 was not written: rank 1: No space left on device; the last good" in says
    assert steps_in(tmp_path) == [2, 1]


def _die_while_saving(rank: int, root: str) -> str:
    run = Run(Path(root), wrap=_shard)
    run.checkpointer.load()
    if rank == 1:
        write = tensors.write

        def dies(*arguments: Any) -> None:
            write(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        tensors.write = dies
    try:
        run.checkpointer.save(9)
    except Exception as error:
        return type(error).__name__
    return "saved"


def test_a_rank_that_is_killed_leaves_the_last_checkpoint(
    tmp_path: Path, on_two_ranks: OnRanks
) -> None:
    on_two_ranks(_train, str(tmp_path), 3)
    first, second = on_ranks(2, _die_while_saving, str(tmp_path))
    assert second == "died" and first != "saved"
    restored = Run(tmp_path).checkpointer.load()
    assert restored is not None and restored.step == 3 and restored.passed_over == ()
    whole = on_two_ranks(_train, str(tmp_path / "whole"), STEPS)
    assert on_two_ranks(_train, str(tmp_path), STEPS) == whole


class _Stage(nn.Module):
    """A pipeline's stage: layers that only this rank has."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(4, 4) for layer in layers})


def _stages(world: Any, root: str, save: bool) -> dict[str, list[float]]:
    rank = world.rank
    torch.manual_seed(rank if save else 50)
    model = _Stage([0, 1] if rank == 0 else [2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + rank)
    checkpointer = Checkpointer(Path(root), model, optimizer)
    if save:
        sum(layer(torch.ones(1, 4)).sum() for layer in model.layers.values()).backward()
        optimizer.step()
        checkpointer.save(1)
        checkpointer.close()
    else:
        assert checkpointer.load() is not None and optimizer.param_groups[0]["lr"] == 0.1 + rank
    return _values(model, optimizer)


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    """Return the parameters and the first moments, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = full_tensor(parameter).flatten().tolist()
        moment = optimizer.state[parameter]["exp_avg"]
        found[f"{name}.exp_avg"] = full_tensor(moment).flatten().tolist()
    return found


def test_stages_of_a_pipeline_have_other_parameters(tmp_path: Path, on_two_ranks: OnRanks) -> None:
    saved = on_two_ranks(_stages, str(tmp_path), True)
    assert on_two_ranks(_stages, str(tmp_path), False) == saved
    # All of them, in one process.
    model = _Stage([0, 1, 2])
    optimizer = torch.optim.AdamW(model.parameters())
    Checkpointer(tmp_path, model, optimizer).load()
    assert _values(model, optimizer) == saved[0] | saved[1]


def _refused_on_one_rank(world: Any, root: str) -> list[str]:
    run = Run(Path(root), wrap=_shard)
    said = []
    for action in (
        lambda: run.checkpointer.save(1, data=object() if world.rank else None),
        lambda: Checkpointer(Path(root), nn.Linear(2, 2 + world.rank)).load(),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            action()
        said.append(str(caught.value))
    return said


def test_what_one_rank_refuses_all_refuse(tmp_path: Path, on_two_ranks: OnRanks) -> None:
    on_two_ranks(_train, str(tmp_path), 1)
    first, second = on_two_ranks(_refused_on_one_rank, str(tmp_path))
    assert first == second
    assert first[0].startswith("rank 1: Checkpointer: data must hold numbers")
    assert "rank 0: " in first[1] and "is of another model" in first[1]


WRAPPERS = ("tensor", "data", "compiled", "plain")


def _wrapped(world: Any, root: str, kind: str, save: bool) -> list[list[float]]:
    torch.manual_seed(7 if save else 8)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    if kind == "tensor":
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    elif kind in ("data", "compiled"):
        model = nn.parallel.DistributedDataParallel(model)
        if kind == "compiled":
            model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    with Checkpointer(Path(root), model, optimizer) as checkpointer:
        if save:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            checkpointer.save(1)
        else:
            assert checkpointer.load() is not None and len(optimizer.state) == 4
    return list(_values(model, optimizer).values())


def _load_as_others(world: Any, root: str, saved_as: str) -> list[list[list[float]]]:
    return [_wrapped(world, root, kind, False) for kind in WRAPPERS if kind != saved_as]


@pytest.mark.parametrize("saved_as", WRAPPERS)
def test_any_wrapper_loads_what_another_saved(
    tmp_path: Path, on_two_ranks: OnRanks, saved_as: str
) -> None:
    wanted, same = on_two_ranks(_wrapped, str(tmp_path), saved_as, True)
    assert wanted == same
    assert on_two_ranks(_load_as_others, str(tmp_path), saved_as) == [[wanted] * 3] * 2

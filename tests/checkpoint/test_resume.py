"""A run that was stopped and resumed ends with the bits of one that never stopped."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_runs import Net, Run, steps_in, uninterrupted
from comparing import assert_same_bits
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusedops import UnsupportedError
from fusedops.checkpoint import Checkpointer, CheckpointError, tensors
from fusedops.optim import AdamW, OffloadedAdamW

STEPS = 8


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("stop", [1, 4, STEPS])
def test_a_resumed_run_gives_the_same_bits(tmp_path: Path, stop: int, block: bool) -> None:
    Run(tmp_path).train(stop, block=block)
    torch.manual_seed(99)  # what happens meanwhile does not matter
    after = Run(tmp_path)
    assert after.train(STEPS, block=block) == uninterrupted(STEPS)
    assert len(after.losses) == STEPS - stop


def test_what_is_saved_in_a_thread_is_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.step(0)
    wanted = {name: each.clone() for name, each in run.model.state_dict().items()}
    go, write = threading.Event(), tensors.write

    def later(*args: Any) -> None:
        assert go.wait(30)
        write(*args)

    monkeypatch.setattr(tensors, "write", later)
    folder = run.checkpointer.save(1, block=False)
    run.step(1)
    assert not folder.exists() and not torch.equal(wanted["first.weight"], run.model.first.weight)
    go.set()
    run.checkpointer.wait()
    assert folder.exists()
    fresh = Run(tmp_path)
    restored = fresh.checkpointer.load()
    assert restored is not None and restored.folder == folder
    for name, each in fresh.model.state_dict().items():
        assert torch.equal(each, wanted[name]), name
    state = fresh.optimizer.state_dict()["state"]
    assert all(int(each["step"]) == 1 for each in state.values())


def test_the_copy_of_a_sharded_tensor_is_on_the_host_whatever_its_mesh_is(tmp_path: Path) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        # What a mesh of GPUs has, without one: tensors of another device than the host's.
        mesh, meta = DeviceMesh("meta", [0]), TensorMeta(torch.Size([2, 3]), (3, 1), torch.float32)
        values = torch.arange(6.0).view(2, 3)
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
        sharded = DTensor(values, spec, requires_grad=False)
        copies = tensors.copied({"model": {"weight": sharded, "others": [sharded, values]}})
        copy = copies["model"]["weight"]
        assert copy.to_local().device.type == "cpu" and copy.placements == sharded.placements
        assert copy.to_local().data_ptr() != values.data_ptr()
        tensors.write(copies, tmp_path, None)
        loaded = {"model": {"weight": torch.zeros(2, 3)}}
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(loaded["model"]["weight"], values)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW, OffloadedAdamW])
def test_moments_of_frozen_parameters_come_back(tmp_path: Path, kind: Any) -> None:
    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, layers: int = 4) -> None:
        for step in steps:
            model[:layers](torch.full((2, 8), 1.0 + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(5)]
        layers[1] = nn.Tanh()
        model = nn.Sequential(*layers)  # the last one is not reached
        model[2].requires_grad_(False)  # of neither there is a state
        return model, kind(model.parameters(), lr=1e-2)

    model, optimizer = begin()
    train(model, optimizer, range(2))
    model[0].requires_grad_(False)
    train(model, optimizer, range(2, 4))
    Checkpointer(tmp_path, model, optimizer).save(4)

    resumed, its_optimizer = begin()
    resumed[0].requires_grad_(False)
    assert Checkpointer(tmp_path, resumed, its_optimizer).load() is not None
    assert len(its_optimizer.state) == len(optimizer.state)
    for its_model, its in ((model, optimizer), (resumed, its_optimizer)):
        frozen = [name for name, p in its_model.named_parameters() if not p.requires_grad]
        assert frozen == ["0.weight", "0.bias", "2.weight", "2.bias"]
        its_model.requires_grad_(True)
        train(its_model, its, range(4, 6), layers=5)
    assert_same_bits(list(resumed.parameters()), list(model.parameters()))


def test_everything_that_was_given_comes_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    data = {"file": "a.bin", "offset": 12, "order": torch.arange(3), "done": (1, 2.5, None, True)}
    with Checkpointer(tmp_path, model) as checkpointer:
        assert checkpointer.load() is None
        folder = checkpointer.save(7, data=data, extra=["note", 3])
        restored = checkpointer.load()
    assert restored is not None
    assert (restored.step, restored.folder, restored.extra) == (7, folder, ["note", 3])
    assert restored.data["order"].tolist() == [0, 1, 2]
    assert {k: v for k, v in restored.data.items() if k != "order"} == {
        k: v for k, v in data.items() if k != "order"
    }
    assert restored.passed_over == ()


def test_the_last_good_ones_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    for number in range(4):
        run.checkpointer.save(number)
    assert steps_in(tmp_path) == [3, 2]
    # A damaged one counts for nothing.
    (tmp_path / "step-0000000003.0" / "manifest.json").write_text("{}")
    run.checkpointer.save(4)
    assert steps_in(tmp_path) == [4, 3, 2]


def test_steps_are_saved_again_and_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpointer.save(4, extra="before")
    first = run.checkpointer.save(5, extra="old")
    second = run.checkpointer.save(5, extra="new")
    assert first != second and not first.exists()
    restored = run.checkpointer.load()
    assert restored is not None and (restored.folder, restored.extra) == (second, "new")
    restored = run.checkpointer.load(step=4)
    assert restored is not None and restored.extra == "before"
    with pytest.raises(CheckpointError, match="has no checkpoint of step 3; it has 4, 5"):
        run.checkpointer.load(step=3)


def test_states_of_mixed_precision_come_back_as_they_were(tmp_path: Path) -> None:
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4).bfloat16()).float().sum().backward()
    optimizer.step()
    wanted = [each["momentum_buffer"].clone() for each in optimizer.state.values()]
    Checkpointer(tmp_path, model, optimizer).save(1)
    other = nn.Linear(4, 4).bfloat16()
    again = torch.optim.SGD(other.parameters(), lr=0.3, momentum=0.9)
    Checkpointer(tmp_path, other, again).load()
    assert_same_bits([each["momentum_buffer"] for each in again.state.values()], wanted)
    assert again.param_groups[0]["lr"] == 0.1


def test_float32_weights_continue_from_masters_and_masters_from_float32_weights(
    tmp_path: Path,
) -> None:
    """A run with another layout stores its masters as weights; neither direction rounds them."""

    def make(dtype: torch.dtype) -> tuple[nn.Module, AdamW, Checkpointer]:
        model = nn.Linear(8, 8).to(dtype)
        optimizer = AdamW(model.named_parameters(), lr=0.01, master_weights=True)
        return model, optimizer, Checkpointer(tmp_path, model, optimizer)

    def step(model: nn.Module, optimizer: AdamW) -> None:
        dtype = next(model.parameters()).dtype
        model(torch.ones(2, 8, dtype=dtype)).float().square().sum().backward()
        optimizer.step()

    half, optimizer, checkpointer = make(torch.bfloat16)
    step(half, optimizer)
    checkpointer.save(1)
    masters = [optimizer.state[parameter]["master"].clone() for parameter in half.parameters()]
    single, optimizer, checkpointer = make(torch.float32)
    assert checkpointer.load() is not None
    for parameter, master in zip(single.parameters(), masters, strict=True):
        assert torch.equal(parameter, master) and not torch.equal(master, master.bfloat16().float())
    step(single, optimizer)
    checkpointer.save(2)
    half, optimizer, checkpointer = make(torch.bfloat16)
    assert checkpointer.load() is not None
    for parameter, weight in zip(half.parameters(), single.parameters(), strict=True):
        assert torch.equal(optimizer.state[parameter]["master"], weight)
        assert torch.equal(parameter, weight.bfloat16())


@pytest.mark.parametrize("stop", [0, 1])
def test_saving_before_the_first_step_changes_nothing(tmp_path: Path, stop: int) -> None:
    # torch counts the making of empty states as a step.
    before = Run(tmp_path)
    before.optimizer.param_groups[0]["lr"] = 0.5
    before.checkpointer.save(0, data={"position": 0})
    assert not before.optimizer.state
    before.checkpointer.close()
    after = Run(tmp_path)
    for number in range(stop):
        after.step(number)
    assert after.checkpointer.load() is not None
    assert not after.optimizer.state and after.optimizer.param_groups[0]["lr"] == 0.5
    after.optimizer.param_groups[0]["lr"] = 1e-2
    for number in range(STEPS):
        after.step(number)
    assert after.digest() == uninterrupted(STEPS)


def test_two_optimizers_of_which_one_has_not_stepped(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        kinds = (torch.optim.AdamW, torch.optim.SGD)
        pairs = zip(kinds, model, strict=True)
        return model, [kind(each.parameters(), lr=0.1, weight_decay=0.2) for kind, each in pairs]

    model, optimizers = make()
    model(torch.ones(1, 2)).sum().backward()
    optimizers[0].step()
    optimizers[1].param_groups[0]["lr"] = 0.7
    Checkpointer(tmp_path, model, optimizers).save(1)
    other, again = make()
    Checkpointer(tmp_path, other, again).load()
    assert [len(each.state) for each in again] == [2, 0]
    assert again[1].param_groups[0]["lr"] == 0.7
    assert torch.equal(other[1].weight, model[1].weight)
    with pytest.raises(ValueError, match=r"groups of its optimizers \[1, 1\] for \[1\]"):
        Checkpointer(tmp_path, other, again[0]).load()


def test_weights_alone_can_be_loaded(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(2)
    model = Net()
    restored = Checkpointer(tmp_path, model).load()
    assert restored is not None and restored.step == 2
    assert torch.equal(model.first.weight, run.model.first.weight)


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    Run(tmp_path).train(2)
    other = Run(tmp_path, width=32)
    before = other.model.first.weight.clone()
    with pytest.raises(ValueError, match=r"of another model or optimizer: other shapes: .*first"):
        other.checkpointer.load()
    assert torch.equal(before, other.model.first.weight)
    with pytest.raises(ValueError, match=r"lacks model\.2\.bias.*it also has model\.first\.bias"):
        Checkpointer(tmp_path, nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2))).load()
    with pytest.raises(ValueError, match="has no state of scaler; in addition to model"):
        Checkpointer(tmp_path, Net(), scaler=torch.amp.GradScaler("cpu")).load()


def test_what_cannot_be_loaded_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, nn.Linear(2, 2))
    with pytest.raises(TypeError, match="data must hold numbers, texts, tensors"):
        checkpointer.save(1, data=object())
    with pytest.raises(TypeError, match="extra must hold"):
        checkpointer.save(1, extra={"path": Path("a")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"keep": 0}, ValueError, "keep must be at least 1, got 0"),
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
        ({"optimizer": [3]}, TypeError, "optimizer must be a torch.optim.Optimizer, got int"),
        ({"loader": 3}, TypeError, "loader must be something with state_dict and load_state_dict"),
    ],
)
def test_wrong_arguments_are_told(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Checkpointer(**{"root": tmp_path, "model": nn.Linear(2, 2)} | arguments)


def test_a_model_of_fsdp1_is_refused(tmp_path: Path) -> None:
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    with pytest.raises(UnsupportedError, match=r"use fully_shard \(FSDP2\)"):
        Checkpointer(tmp_path, nn.Sequential(nn.Linear(2, 2), wrapped))


def test_an_optimizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    Checkpointer(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1)).save(1)
    with pytest.raises(ValueError, match="groups of its optimizers lack amsgrad, betas"):
        Checkpointer(tmp_path, model, torch.optim.AdamW(model.parameters())).load()


def test_steps_are_whole_numbers(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        checkpointer.save(-1)
    with pytest.raises(TypeError, match="step must be an int, got str"):
        checkpointer.save("1")  # type: ignore[arg-type]

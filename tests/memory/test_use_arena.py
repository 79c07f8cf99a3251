"""Training steps in an arena keep every bit, and no tensor that a user keeps changes."""

from __future__ import annotations

import copy
import os
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import encoder, encoder_loss, gpt2, tokens
from torch import nn
from torch._subclasses import FakeTensorMode

from fusedops import memory
from fusedops._core import extension
from fusedops._core.checks import UnsupportedError
from fusedops.memory.arena import StepArena

pytestmark = pytest.mark.skipif(
    extension.cpu_library() is not None, reason="the compiled library is not built"
)
STEPS = 6


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers)


def batch(step: int, rows: int = 32) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(step))


def mlp_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step)).square().mean()


def gpt2_loss(model: nn.Module, step: int) -> torch.Tensor:
    ids = (tokens() + step) % 256
    return model(input_ids=ids, labels=ids).loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], torch.Tensor]]] = {
    "mlp": (mlp, mlp_loss),
    "encoder": (encoder, lambda model, step: encoder_loss(model) * (step + 1)),
    "gpt2": (lambda: gpt2(layers=2), gpt2_loss),
}


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int], torch.Tensor],
    *,
    zero_first: bool = False,
    bfloat16: bool = False,
    microbatches: int = 1,
) -> list[torch.Tensor]:
    """Return losses, gradients and weights of some steps, as copies outside of any step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values: list[torch.Tensor] = []
    for step in range(STEPS):
        torch.manual_seed(step)
        if zero_first:
            optimizer.zero_grad(set_to_none=True)
        for part in range(microbatches):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
                loss = loss_of(model, step * microbatches + part)
            loss.backward()
        values += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad(set_to_none=True)
    return [*values, *(parameter.detach().clone() for parameter in model.parameters())]


def assert_equal_bits(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))


def used(arena: StepArena) -> float:
    """Return the share of the last step's bytes that were in the block."""
    report = arena.report()
    return report.served_bytes / report.step_bytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"zero_first": True}, {"bfloat16": True}], ids=str)
def test_steps_keep_their_bits(name: str, options: dict[str, bool]) -> None:
    make, loss = MODELS[name]
    expected = train(make(), loss, **options)
    model = make()
    arena = memory.use_arena(model)
    assert_equal_bits(train(model, loss, **options), expected)
    report = arena.report()
    assert report.plans == 1 and not report.note
    assert report.block_bytes <= 1.02 * report.bound_bytes
    # The test itself keeps copies of losses and gradients; all else is in the block.
    assert report.outside_bytes["occupied"] == report.outside_bytes["kept"] == 0
    assert report.served_bytes > 0.5 * report.step_bytes
    arena.remove()


def test_gradients_that_live_into_the_next_step_are_in_the_block() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arena = memory.use_arena(model)
    for step in range(STEPS):
        loss = mlp_loss(model, step)
        optimizer.zero_grad(set_to_none=True)  # after the forward
        loss.backward()
        optimizer.step()
    assert all(arena.holds(p.grad) for p in model.parameters() if p.grad.nbytes >= 1024)  # type: ignore[arg-type,union-attr]
    assert used(arena) > 0.9
    arena.remove()


def test_gradient_accumulation_is_one_step() -> None:
    expected = train(mlp(), mlp_loss, microbatches=3)
    model = mlp()
    arena = memory.use_arena(model)
    assert_equal_bits(train(model, mlp_loss, microbatches=3), expected)
    assert arena.report().steps == STEPS - 1  # the last one ends with the next forward
    assert used(arena) > 0.5
    arena.remove()


def test_tensors_that_are_kept_never_change() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    arena = memory.use_arena(model)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    in_block = []

    def keep(tensor: torch.Tensor) -> None:
        in_block.append(arena.holds(tensor))
        kept.append((tensor, torch.from_numpy(tensor.detach().numpy().copy())))

    for step in range(30):
        hidden = model[:4](batch(step))
        output = model(batch(step))
        if step % 4 == 3:  # not in the first steps, which are recorded
            keep(hidden.detach())
            keep(output)
            keep(output.detach()[3:5])  # a view
        output.square().mean().backward()
        if step % 7 == 5:
            keep(next(model.parameters()).grad)  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert all(torch.equal(tensor.detach(), copy) for tensor, copy in kept)
    assert any(in_block) and not all(in_block) and used(arena) > 0.5
    assert len(kept) > 20
    arena.remove()
    train(mlp(), mlp_loss)  # other memory is used, that of the kept ones is not
    assert all(torch.equal(tensor.detach(), copy) for tensor, copy in kept)


def test_outputs_of_the_recorded_pattern_that_are_always_kept_live_outside() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arena = memory.use_arena(model)
    outputs = []
    for step in range(STEPS):
        outputs.append(model(batch(step)).detach())
        model(batch(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not any(arena.holds(output) for output in outputs)
    assert arena.report().outside_bytes["escape"] >= outputs[0].nbytes
    arena.remove()


def test_an_average_of_the_weights_and_a_deep_copy_keep_their_values() -> None:
    model = mlp()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arena = memory.use_arena(model)
    reference = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(STEPS):
        mlp_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, plain, new in zip(
                average.parameters(), reference, model.parameters(), strict=True
            ):
                mean.copy_(mean * 0.5 + new * 0.5)
                plain.copy_(torch.from_numpy(plain.numpy() * 0.5 + new.numpy() * 0.5))
        double = copy.deepcopy(model)  # its hook belongs to no arena
        double(batch(step)).sum().backward()
        assert pickle.loads(pickle.dumps(model)) is not model
    for mean, plain in zip(average.parameters(), reference, strict=True):
        assert torch.equal(mean, plain)
    arena.remove()


def test_steps_of_other_shapes_have_plans_of_their_own() -> None:
    def run(arena: bool) -> tuple[list[torch.Tensor], StepArena | None]:
        model = mlp()
        using = memory.use_arena(model) if arena else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(16):
            torch.manual_seed(step)
            loss = model(batch(step, (32, 16, 24)[step // 2 % 3])).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        return [*losses, *model.parameters()], using

    expected, _ = run(False)
    actual, arena = run(True)
    assert_equal_bits(actual, expected)
    assert arena is not None
    assert arena.report().plans == 3 and used(arena) > 0.8
    arena.remove()


class Changing(nn.Module):
    """A graph that is another one in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        width = 16 + 8 * (self.runs * 7 % 23)
        y = self.linear(x)
        return (y.repeat(1, width)[:, : 13 * width] * float(self.runs)).sin().mean()


def test_a_graph_that_changes_in_each_step_is_reported_and_right() -> None:
    def run(arena: bool) -> tuple[list[torch.Tensor], StepArena | None]:
        torch.manual_seed(0)
        model = Changing()
        using = memory.use_arena(model) if arena else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(14):
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters()), using

    expected, _ = run(False)
    with pytest.warns(UserWarning, match="steps of the same input shapes allocate different"):
        actual, arena = run(True)
    assert_equal_bits(actual, expected)
    assert arena is not None
    assert "without the arena" in arena.report().note
    arena.remove()


def test_a_step_that_differs_once_is_right_and_the_plan_stays() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arena = memory.use_arena(model)
    for step in range(10):
        if step == 6:
            extra = [torch.full((64, 40 + i), float(i)) for i in range(30)]
        mlp_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 6:
            assert all((tensor == i).all() for i, tensor in enumerate(extra))
    assert used(arena) > 0.9 and not arena.report().note
    arena.remove()


def test_an_exception_in_a_step_leaves_the_next_ones_right() -> None:
    expected = train(mlp(), mlp_loss)
    model = mlp()
    arena = memory.use_arena(model)

    def failing(model: nn.Module, step: int) -> torch.Tensor:
        state = torch.get_rng_state()
        if step in (1, 4):
            handle = model[5].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                mlp_loss(model, step)
            handle.remove()
        torch.set_rng_state(state)
        return mlp_loss(model, step)

    assert_equal_bits(train(model, failing), expected)
    arena.remove()


def test_evaluation_between_steps_is_right() -> None:
    def run(arena: bool) -> list[torch.Tensor]:
        model = mlp()
        using = memory.use_arena(model) if arena else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = []
        for step in range(STEPS):
            mlp_loss(model, step).backward()
            model.eval()
            with torch.no_grad():
                values.append(model(batch(99, 48)))
            model.train()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                values.append(model(batch(98)))
        if using is not None:
            assert used(using) > 0
            using.remove()
        return values

    torch.manual_seed(3)
    expected = run(False)
    torch.manual_seed(3)
    assert_equal_bits(run(True), expected)


def test_explicit_steps_are_planned_and_keyed() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arena = memory.use_arena(model)
    for step in range(STEPS):
        x = batch(step)
        with arena.step(x.shape):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    report = arena.report()
    assert report.steps == STEPS and used(arena) > 0.95
    assert len(report.boxes) > 10 and "fragmentation" in str(report)
    with pytest.raises(TypeError, match="key must be hashable"), arena.step([1]):  # type: ignore[arg-type]
        pass
    with (
        arena.step(),
        pytest.raises(RuntimeError, match="open already"),
        arena.step(),
    ):
        pass
    arena.remove()
    with pytest.raises(RuntimeError, match="it was removed"), arena.step():
        pass


def test_two_models_alternate_and_train_in_each_other() -> None:
    def run(arena: bool) -> list[torch.Tensor]:
        generator, critic = mlp(), mlp()
        arenas = [memory.use_arena(model) for model in (generator, critic) if arena]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (generator, critic)]
        for step in range(STEPS):
            torch.manual_seed(step)
            (critic(generator(batch(step)).detach()) - critic(batch(step + 50))).mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            critic(generator(batch(step))).mean().backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        for one in arenas:
            one.remove()
        return [*generator.parameters(), *critic.parameters()]

    assert_equal_bits(run(True), run(False))


def test_a_model_after_another_one_has_its_own_steps() -> None:
    first, second = mlp(), mlp()
    arenas = [memory.use_arena(model) for model in (first, second)]
    train(first, mlp_loss)  # its last step ends with no further forward
    train(second, mlp_loss)
    assert used(arenas[1]) > 0.5 and arenas[0].report().steps == STEPS
    for arena in arenas:
        arena.remove()


def test_threads_train_models_of_their_own() -> None:
    expected = train(mlp(), lambda model, step: model(batch(step)).square().mean())
    results: list[list[torch.Tensor]] = [[] for _ in range(3)]
    arenas = []

    def work(index: int) -> None:
        model = mlp_without_dropout()
        arena = memory.use_arena(model)
        arenas.append(arena)
        results[index] = train(model, mlp_loss)

    def mlp_without_dropout() -> nn.Module:
        return nn.Sequential(
            *(layer for layer in models.pop() if not isinstance(layer, nn.Dropout))
        )

    models = [mlp() for _ in range(4)]
    expected = train(mlp_without_dropout(), mlp_loss)
    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for values in results:
        assert_equal_bits(values, expected)
    for arena in arenas:
        assert used(arena) > 0.5
        arena.remove()


def test_other_threads_get_other_memory() -> None:
    model = mlp()
    arena = memory.use_arena(model)
    made: list[torch.Tensor] = []
    for _ in range(4):
        with arena.step():
            here = torch.ones(1000)
            thread = threading.Thread(target=lambda: made.append(torch.full((1000,), 2.0)))
            thread.start()
            thread.join()
            assert (here == 1).all()
            in_block = arena.holds(here)
            del here
    assert in_block and not any(arena.holds(tensor) for tensor in made)
    assert all((tensor == 2).all() for tensor in made)
    arena.remove()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_uses_memory_of_its_own() -> None:
    model = mlp()
    arena = memory.use_arena(model)
    for _ in range(4):
        with arena.step():
            mine = torch.full((4096,), 7.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                child = os.fork()
            if child == 0:
                other = torch.full((4096,), 3.0)
                fine = (mine == 7).all() and (other == 3).all() and not arena.holds(other)
                os._exit(0 if fine else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert (mine == 7).all()
            del mine
    arena.remove()


def test_misuse_gets_one_sentence() -> None:
    model = mlp()
    with pytest.raises(TypeError, match="model must be"):
        memory.use_arena("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seconds must be at least"):
        memory.use_arena(model, seconds=-1.0)
    arena = memory.use_arena(model)
    with pytest.raises(ValueError, match="has an arena already"):
        memory.use_arena(model)
    with pytest.raises(ValueError, match="inside or around"):
        memory.use_arena(nn.Sequential(model))
    with pytest.raises(ValueError, match="inside or around"):
        memory.use_arena(model[0])
    arena.remove()
    memory.use_arena(model).remove()


def test_a_model_that_is_dropped_takes_its_arena_along() -> None:
    model = mlp()
    arena = memory.use_arena(model)
    train(model, mlp_loss)
    kept = torch.ones(0)
    for step in range(3):
        kept = model(batch(step))
    value = kept.detach().numpy().copy()
    del model, arena
    train(mlp(), mlp_loss)
    assert (kept.detach().numpy() == value).all()


POLICIES: dict[str, Any] = {
    "recompute": lambda: memory.Policy(memory.recompute("*")),
    "offload": lambda: memory.Policy(memory.offload("*")),
    "both": lambda: memory.Policy(memory.recompute("*"), memory.offload("*")),
    "by op": lambda: memory.Policy(memory.recompute(ops=["layer_norm", "add_layer_norm"])),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_of_activations_keep_their_bits(policy: str) -> None:
    def run(arena: bool) -> list[torch.Tensor]:
        model = encoder(layers=2)
        memory.apply(model, POLICIES[policy]())
        using = memory.use_arena(model) if arena else None
        values = train(model, lambda model, step: encoder_loss(model) * (step + 1))
        if using is not None:
            # Offloaded tensors return when another thread has time, which changes the order.
            assert used(using) > (0.4 if policy not in ("offload", "both") else 0.2)
            using.remove()
        return values

    assert_equal_bits(run(True), run(False))


def test_the_checkpoint_of_torch_keeps_its_bits() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.layers, x, use_reentrant=False)

    expected = train(Checkpointed(), mlp_loss)
    model = Checkpointed()
    arena = memory.use_arena(model)
    assert_equal_bits(train(model, mlp_loss), expected)
    assert used(arena) > 0.5
    arena.remove()


def test_plans_do_not_change_while_a_step_follows_one() -> None:
    native = torch.classes.fusedops_native.StepArena()
    changes: dict[str, Callable[[], Any]] = {
        "set_plan": lambda: native.set_plan(0, [4096], [0], [], 4096),
        "drop_plan": lambda: native.drop_plan(0),
        "renew": lambda: native.renew(),
    }
    changes["set_plan"]()
    assert native.begin(0)
    for name, change in changes.items():
        with pytest.raises(RuntimeError, match=f"StepArena.{name}: no step may be open, and one"):
            change()
    kept = torch.empty(1024)  # is served by the plan, which is still there
    assert native.contains(kept.data_ptr())
    assert native.end()
    for change in changes.values():
        change()
    native.close()


def test_steps_go_on_where_there_is_no_memory_for_a_block() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arena = memory.use_arena(model)
    native = arena._native

    class WithoutMemory:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def set_plan(self, *plan: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    arena._native = WithoutMemory()
    try:
        with pytest.warns(UserWarning, match="has no memory for the block"):
            for _ in range(3):
                model(torch.ones(256, 1024)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert "no memory" in arena.report().note
    finally:
        arena.remove()


@pytest.mark.parametrize(
    "devices, expected",
    [
        (("cuda:0", "cuda:1"), "parameters must be on one device, got 0.weight on cuda:0 and"),
        (("cpu", "cuda:0"), "parameters must be on one device"),
        (("xpu", "xpu"), "parameters must be on the CPU or a GPU of CUDA, got 0.weight on xpu"),
        (("cuda:0", "cuda:0"), "it needs the compiled library: this torch sees no CUDA device"),
    ],
)
def test_other_devices_are_refused(devices: tuple[str, str], expected: str) -> None:
    if expected.startswith("it needs") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with FakeTensorMode():
        for layer, device in zip(model, devices, strict=True):
            layer.weight = nn.Parameter(torch.empty(2, 2, device=device))
    with pytest.raises(UnsupportedError, match=re.escape(expected)):
        memory.use_arena(model)

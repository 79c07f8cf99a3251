"""Training steps in an arena keep every bit, and no tensor that a user keeps changes."""

from __future__ import annotations

import copy
import os
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from small_models import POLICIES, encoder, encoder_loss, gpt2, tokens
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fusedops import memory
from fusedops._core import extension
from fusedops._core.checks import UnsupportedError
from fusedops.memory.arena import StepArena

pytestmark = pytest.mark.skipif(extension.cpu_library() is not None, reason="no library")
STEPS = 6
Use = Callable[[nn.Module], StepArena]


@pytest.fixture
def use() -> Iterator[Use]:
    """``memory.use_arena``, whose arenas are removed behind the test."""
    arenas: list[StepArena] = []

    def made(model: nn.Module) -> StepArena:
        arenas.append(memory.use_arena(model))
        return arenas[-1]

    yield made
    for arena in arenas:
        arena.remove()


def mlp(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    kinds = (lambda: nn.Linear(64, 64), nn.GELU, lambda: nn.Dropout(dropout))
    return nn.Sequential(*(kind() for _ in range(3) for kind in kinds))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def update(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def batch(step: int, rows: int = 32) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(step))


def mlp_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step)).square().mean()


def gpt2_loss(model: nn.Module, step: int) -> torch.Tensor:
    ids = (tokens() + step) % 256
    return model(input_ids=ids, labels=ids).loss


def copied_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Run a copy of the model before it, whose hooks belong to no arena."""
    copy.deepcopy(model)(batch(step)).sum().backward()
    pickle.loads(pickle.dumps(model))
    return mlp_loss(model, step)


def loss_of_other_shapes(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step, (32, 16, 24)[step // 2 % 3])).square().mean()


def loss_and_evaluation(model: nn.Module, step: int) -> torch.Tensor:
    """Evaluate the model between the steps, and between a forward and its backward."""

    @torch.no_grad()
    def evaluated(rows: int) -> torch.Tensor:
        model.eval()
        output = model(batch(99, rows)).mean()
        model.train()
        return output

    before = evaluated(32)
    return mlp_loss(model, step) + before + evaluated(48)


def scaled_encoder_loss(model: nn.Module, step: int) -> torch.Tensor:
    return encoder_loss(model) * (step + 1)


def failing_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Let a forward fail before the one of some steps."""
    state = torch.get_rng_state()
    if step in (1, 4):
        handle = model[5].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mlp_loss(model, step)
        handle.remove()
    torch.set_rng_state(state)
    return mlp_loss(model, step)


class Checkpointed(nn.Module):
    """Recomputed by torch's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


def with_policy(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = encoder(layers=2)
        memory.apply(model, memory.Policy(*POLICIES[name]("*")))
        return model

    return make


# What makes a model, its loss, options of ``train`` and the least share that the block serves.
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], float]] = {
    **{
        f"{name} {options or ''}": (make, loss, options, 0.5)
        for name, make, loss in (
            ("mlp", mlp, mlp_loss),
            ("encoder", encoder, scaled_encoder_loss),
            ("gpt2", lambda: gpt2(layers=2), gpt2_loss),
        )
        for options in ({}, {"zero_first": True}, {"bfloat16": True})
    },
    "gradient accumulation": (mlp, mlp_loss, {"microbatches": 3}, 0.5),
    "exceptions": (mlp, failing_loss, {}, 0.0),
    "other shapes": (mlp, loss_of_other_shapes, {"steps": 16}, 0.6),
    "evaluation": (mlp, loss_and_evaluation, {}, 0.2),
    "copies of the model": (lambda: mlp(dropout=0.0), copied_loss, {}, 0.2),
    "torch's checkpoint": (Checkpointed, mlp_loss, {}, 0.5),
    # Offloaded tensors return when another thread has time, which changes the order.
    **{
        name: (with_policy(name), scaled_encoder_loss, {}, least)
        for name, least in (("recompute", 0.4), ("by op", 0.4), ("offload", 0.2), ("both", 0.2))
    },
}


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int], torch.Tensor],
    *,
    zero_first: bool = False,
    bfloat16: bool = False,
    microbatches: int = 1,
    steps: int = STEPS,
) -> list[torch.Tensor]:
    """Return losses, gradients and weights of some steps, as copies outside of any step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values: list[torch.Tensor] = []
    for step in range(steps):
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


def used(arena: StepArena) -> float:
    """Return the share of the last step's bytes that were in the block."""
    report = arena.report()
    return report.served_bytes / report.step_bytes


@pytest.mark.parametrize("name", MODELS)
def test_steps_keep_their_bits(use: Use, name: str) -> None:
    make, loss, options, least = MODELS[name]
    expected = train(make(), loss, **options)
    model = make()
    arena = use(model)
    values = train(model, loss, **options)
    report, share = arena.report(), used(arena)  # before the comparison allocates
    assert_same_bits(values, expected)
    assert share >= least
    if least == 0.5:
        assert report.steps == STEPS - 1  # the last one ends with the next forward
        assert report.plans == 1 and not report.note
        assert report.block_bytes <= 1.02 * report.bound_bytes
        # The test itself keeps copies of losses and gradients; all else is in the block.
        assert report.outside_bytes["occupied"] == report.outside_bytes["kept"] == 0


@pytest.mark.parametrize("first", [True, False], ids=["arena first", "compile first"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_steps_keep_their_bits(use: Use, backend: str, first: bool) -> None:
    values = []
    for planned in (True, False):
        torch._dynamo.reset()
        model = mlp(dropout=0.0)
        run: Any = torch.compile(model, backend=backend)
        arena = use(model if first else run) if planned else None
        values.append(train(run, mlp_loss))
        assert arena is None or used(arena) > 0.3
    assert_same_bits(*values)


def test_gradients_that_live_into_the_next_step_are_in_the_block(use: Use) -> None:
    model = mlp()
    optimizer = sgd(model)
    arena = use(model)
    for step in range(STEPS):
        loss = mlp_loss(model, step)
        optimizer.zero_grad(set_to_none=True)  # after the forward
        loss.backward()
        optimizer.step()
    assert all(arena.holds(p.grad) for p in model.parameters() if p.grad.nbytes >= 1024)  # type: ignore[arg-type,union-attr]
    assert used(arena) > 0.9


def test_tensors_that_are_kept_never_change(use: Use) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    arena = use(model)
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
    arena.remove()
    train(mlp(), mlp_loss)  # other memory is used, that of the kept ones is not
    assert all(torch.equal(tensor.detach(), copy) for tensor, copy in kept)


def test_outputs_of_the_recorded_pattern_that_are_always_kept_live_outside(use: Use) -> None:
    model = mlp()
    optimizer = sgd(model)
    arena = use(model)
    outputs = []
    for step in range(STEPS):
        outputs.append(model(batch(step)).detach())
        model(batch(step)).sum().backward()
        update(optimizer)
    assert not any(arena.holds(output) for output in outputs)
    assert arena.report().outside_bytes["escape"] >= outputs[0].nbytes


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


def test_a_graph_that_changes_in_each_step_is_reported_and_right(use: Use) -> None:
    def run(model: nn.Module) -> list[nn.Parameter]:
        optimizer = sgd(model)
        for step in range(14):
            model(batch(step)).backward()
            update(optimizer)
        return list(model.parameters())

    model = Changing()
    plain = copy.deepcopy(model)
    arena = use(model)
    with pytest.warns(UserWarning, match="steps of the same input shapes allocate different"):
        actual = run(model)
    assert_same_bits(actual, run(plain))
    assert "without the arena" in arena.report().note


def test_explicit_steps_are_planned_and_keyed(use: Use) -> None:
    model = mlp()
    optimizer = sgd(model)
    arena = use(model)
    for step in range(STEPS):
        x = batch(step)
        with arena.step(x.shape):
            model(x).sum().backward()
            update(optimizer)
    report = arena.report()
    assert report.steps == STEPS and used(arena) > 0.95
    assert len(report.boxes) > 10 and "fragmentation" in str(report)
    with pytest.raises(TypeError, match="key must be hashable"), arena.step([1]):  # type: ignore[arg-type]
        pass
    with arena.step(), pytest.raises(RuntimeError, match="open already"), arena.step():
        pass
    arena.remove()
    with pytest.raises(RuntimeError, match="it was removed"), arena.step():
        pass


def test_two_models_alternate_and_train_in_each_other(use: Use) -> None:
    def run(prepare: Callable[[nn.Module], object]) -> list[torch.Tensor]:
        generator, critic = mlp(), mlp()
        optimizers = [sgd(model, 0.01) for model in (generator, critic)]
        for model in (generator, critic):
            prepare(model)
        for step in range(STEPS):
            torch.manual_seed(step)
            (critic(generator(batch(step)).detach()) - critic(batch(step + 50))).mean().backward()
            update(optimizers[1])
            critic(generator(batch(step))).mean().backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return [*generator.parameters(), *critic.parameters()]

    assert_same_bits(run(use), run(lambda model: None))


def test_a_model_after_another_one_has_its_own_steps(use: Use) -> None:
    first, second = mlp(), mlp()
    arenas = [use(model) for model in (first, second)]
    train(first, mlp_loss)  # its last step ends with no further forward
    train(second, mlp_loss)
    assert used(arenas[1]) > 0.5 and arenas[0].report().steps == STEPS


def test_threads_train_models_of_their_own(use: Use) -> None:
    models = [mlp(dropout=0.0) for _ in range(4)]
    expected = train(models.pop(), mlp_loss)
    arenas = [use(model) for model in models]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda model: train(model, mlp_loss), models))
    for values, arena in zip(results, arenas, strict=True):
        assert_same_bits(values, expected)
        assert used(arena) > 0.5


def test_other_threads_get_other_memory(use: Use) -> None:
    model = mlp()
    arena = use(model)
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_uses_memory_of_its_own(use: Use) -> None:
    model = mlp()
    arena = use(model)
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


def test_misuse_gets_one_sentence(use: Use) -> None:
    model = mlp()
    with pytest.raises(TypeError, match="model must be"):
        memory.use_arena("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seconds must be at least"):
        memory.use_arena(model, seconds=-1.0)
    arena = use(model)
    for other, says in (
        (model, "has an arena already"),
        (nn.Sequential(model), "inside or around"),
        (model[0], "inside or around"),
    ):
        with pytest.raises(ValueError, match=says):
            memory.use_arena(other)
    arena.remove()
    use(model)


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


def test_steps_go_on_where_there_is_no_memory_for_a_block(use: Use) -> None:
    model = mlp()
    optimizer = sgd(model)
    arena = use(model)
    native = arena._native

    class WithoutMemory:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def set_plan(self, *plan: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    arena._native = WithoutMemory()
    with pytest.warns(UserWarning, match="has no memory for the block"):
        for step in range(3):
            mlp_loss(model, step).backward()
            update(optimizer)
    assert "no memory" in arena.report().note


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

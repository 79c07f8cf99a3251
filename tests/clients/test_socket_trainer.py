"""Sockets of transformers and accelerate: one line, and models train as the stock ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BERT, DENSE, IDS, Family, transformers
from harness import BATCH, STEPS, rows
from patch_testing import assert_close, counted, gradients, losses_of, make_trainer
from torch import nn

import fusedops
from fusedops import memory
from fusedops.memory.apply import policy_state_of
from fusedops.optim import AdamW, OffloadedAdamW

pytest.importorskip("accelerate", reason="accelerate is not installed")

import accelerate

from fusedops.integrations import describe, kernels
from fusedops.integrations.accelerate import prepare
from fusedops.integrations.trainer import FusedOpsCallback, use_fused_kernels

pytestmark = pytest.mark.usefixtures("own_products")


LLAMA = DENSE["Llama"]


def llama() -> nn.Module:
    return LLAMA.model()


def trainer(folder: Path, model: Any = None, **options: Any) -> Any:
    options |= {"max_steps": STEPS, "per_device_train_batch_size": BATCH}
    options |= {"gradient_accumulation_steps": 2}
    return make_trainer(model or llama(), folder, rows(), logging_nan_inf_filter=False, **options)


@pytest.fixture(scope="module")
def stock_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[float]]:
    """Return the losses of a given model, and of one that ``model_init`` makes."""
    folder = tmp_path_factory.mktemp("stock")
    return {anew: losses_of(trainer(folder, llama if anew else llama())) for anew in (False, True)}


def assert_same_losses(losses: list[float], expected: list[float]) -> None:
    assert len(losses) == len(expected) == STEPS and min(expected) < expected[0]
    assert_close(torch.tensor(losses), torch.tensor(expected))


@pytest.mark.parametrize(
    ("way", "anew"),
    [("model", False), *((way, anew) for way in ("line", "callback") for anew in (False, True))],
)
def test_the_trainer_trains_to_the_same_losses(
    way: str, anew: bool, stock_losses: dict[bool, list[float]], tmp_path: Path
) -> None:
    """Also with a model that ``model_init`` makes anew for the training."""
    callback = FusedOpsCallback()
    callbacks = [callback] if way == "callback" else None
    fused = trainer(tmp_path, llama if anew else llama(), callbacks=callbacks)
    report, first = callback.report, fused.model
    if way != "callback":
        report = use_fused_kernels(fused.model if way == "model" else fused)
    assert report is not None and report.level == "O2" and not report.failed
    with counted() as calls:
        losses = losses_of(fused)
    assert (fused.model is not first) == anew
    assert calls["cross_entropy_backward"] == 2 * STEPS
    assert calls["linear_glu_backward"] == 4 * STEPS
    assert_same_losses(losses, stock_losses[anew])


def test_model_init_keeps_its_argument(tmp_path: Path) -> None:
    fused = trainer(tmp_path, lambda trial: llama())
    use_fused_kernels(fused, level="O1")
    assert describe(fused.call_model_init("a trial")).counts["rms_norm"] == 5


def test_the_level_and_strictness_reach_patch(tmp_path: Path) -> None:
    assert "linear_glu" not in use_fused_kernels(trainer(tmp_path), level="O1").counts
    with pytest.raises(fusedops.UnsupportedError, match="strict"):
        use_fused_kernels(nn.Tanh(), strict=True)
    with pytest.raises(ValueError, match="level"):
        FusedOpsCallback(level="02")


def test_what_is_no_trainer_and_what_is_wrapped_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="transformers.Trainer"):
        use_fused_kernels("llama")
    wrapped = trainer(tmp_path)
    wrapped.model_wrapped = nn.DataParallel(wrapped.model)
    with pytest.raises(fusedops.UnsupportedError, match="before train"):
        use_fused_kernels(wrapped)


def test_accelerate_prepares_a_patched_model() -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator, stock, model = accelerate.Accelerator(cpu=True), llama(), llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(rows(BATCH), batch_size=BATCH)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    assert isinstance(optimizer, accelerate.optimizer.AcceleratedOptimizer)
    (batch,) = loader
    with counted() as calls:
        loss = model(**batch).loss
        accelerator.backward(loss)
    assert calls["linear_glu_backward"] == 2
    assert_close(loss, stock(**batch).loss)


def test_prepare_wants_an_accelerator_and_a_model() -> None:
    with pytest.raises(TypeError, match=r"accelerate\.Accelerator"):
        prepare(llama())
    with pytest.raises(ValueError, match="a model"):
        prepare(accelerate.Accelerator(cpu=True), [1])


# A policy for activations and an offloaded optimizer, as in docs/memory.md: the plain bits.

SAVED_STEPS = 6


def test_a_resumed_run_has_the_losses_of_one_without_interruption(tmp_path: Path) -> None:
    """A new process loads and patches the model again, then resumes from the checkpoint."""
    saving = {"save_strategy": "steps", "save_steps": STEPS // 2, "lr_scheduler_type": "constant"}
    patched = llama()
    fusedops.patch(patched)
    expected = losses_of(trainer(tmp_path, patched, **saving))
    resumed = llama()
    fusedops.patch(resumed)
    again = trainer(tmp_path, resumed, **saving)
    with counted() as calls:
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    losses = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
    assert losses == expected and len(losses) == STEPS
    assert calls["cross_entropy_backward"] == 2 * (STEPS - STEPS // 2)


def _trained(folder: Path, with_policy: bool, optimizer_class: Any) -> tuple[Any, list[float]]:
    model = llama()
    fusedops.patch(model)
    if with_policy:
        memory.apply(
            model,
            memory.Policy(memory.recompute("model.layers.0"), memory.offload("model.layers.*")),
            offload_settings=memory.OffloadSettings(least_bytes=1, check=True),
        )
    optimizer = optimizer_class(model.named_parameters(), lr=3e-3, max_norm=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rows = [(torch.arange(16) * 3 + start) % 97 for start in range(0, 704, 11)]
    trainer = make_trainer(
        model,
        folder,
        [{"input_ids": row, "labels": row} for row in rows],
        optimizers=(optimizer, schedule),
        bf16=True,
        max_grad_norm=0.0,  # the optimizer clips
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        max_steps=SAVED_STEPS,
        save_strategy="steps",
        save_steps=SAVED_STEPS // 2,
    )
    losses = losses_of(trainer)
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.close()
    return model, losses


def test_the_trainer_with_a_policy_and_an_offloaded_optimizer_keeps_every_bit(
    tmp_path: Path,
) -> None:
    plain, expected = _trained(tmp_path / "plain", False, AdamW)
    model, losses = _trained(tmp_path / "memory", True, OffloadedAdamW)
    assert losses == expected and len(losses) == SAVED_STEPS
    assert losses[-1] < losses[0]
    assert all(
        torch.equal(mine, parameter)
        for mine, parameter in zip(model.parameters(), plain.parameters(), strict=True)
    )
    (offloader,) = policy_state_of(model).offloaders.values()
    assert offloader.moved_bytes > 0
    # What the Trainer saved on its way, torch's own optimizer goes on with.
    saved = torch.load(tmp_path / "memory" / f"checkpoint-{SAVED_STEPS // 2}" / "optimizer.pt")
    stock = torch.optim.AdamW(model.parameters())
    stock.load_state_dict(saved)
    assert {float(state["step"]) for state in stock.state.values()} == {SAVED_STEPS / 2}


# Models that are built after ``kernels.register`` are patched models, to the bit.


@pytest.fixture
def unregistered() -> Iterator[None]:
    """Undo the registration of the kernels at the end."""
    stock = transformers.PreTrainedModel.post_init
    yield
    kernels.unregister()
    assert transformers.PreTrainedModel.post_init is stock


unregisters = pytest.mark.usefixtures("unregistered")
each_family = pytest.mark.parametrize("family", [LLAMA, BERT], ids=["Llama", "BERT"])


def assert_same_model(model: nn.Module, patched: nn.Module, family: Family) -> None:
    """The same classes, losses and gradients, bit for bit."""
    assert str(describe(model)) == str(describe(patched))
    with counted() as calls:
        found = gradients(model, family.loss)
    assert calls["cross_entropy_backward"] == 1 and calls["attention_backward"] == 2
    for name, expected in gradients(patched, family.loss).items():
        assert torch.equal(found[name], expected), name


@each_family
@unregisters
def test_a_model_built_by_its_class_is_a_patched_one(family: Family) -> None:
    patched = family.model()
    fusedops.patch(patched)
    kernels.register()
    assert_same_model(family.model(), patched, family)


@each_family
@unregisters
def test_a_loaded_model_is_a_patched_one(family: Family, tmp_path: Path) -> None:
    stock = family.model()
    stock.save_pretrained(tmp_path)
    kernels.register()
    loaded = type(stock).from_pretrained(tmp_path).train()
    made = transformers.AutoModel.from_config(stock.config)
    kernels.unregister()
    fusedops.patch(stock)
    assert_same_model(loaded, stock, family)
    expected = transformers.AutoModel.from_config(stock.config)
    assert describe(expected).num_replaced == 0
    assert str(describe(made)) == str(fusedops.patch(expected)).replace(" at level O2", "")


@unregisters
def test_models_before_and_after_are_stock() -> None:
    before = LLAMA.model()
    kernels.register()
    between = LLAMA.model()
    kernels.unregister()
    after = LLAMA.model()
    assert describe(before).num_replaced == describe(after).num_replaced == 0
    assert describe(between).num_replaced > 0
    fusedops.unpatch(between)
    expected = gradients(before, LLAMA.loss)
    for model in (between, after):
        for name, value in gradients(model, LLAMA.loss).items():
            assert torch.equal(value, expected[name]), name


@unregisters
def test_hidden_states_are_recorded_before_during_and_after() -> None:
    shapes = []
    for change in (None, kernels.register, kernels.unregister):
        if change is not None:
            change()
        output = LLAMA.model()(input_ids=IDS, output_hidden_states=True)
        shapes.append([list(hidden_state.shape) for hidden_state in output.hidden_states])
    assert shapes[0] == shapes[1] == shapes[2] == [[2, 12, 32]] * 3


@unregisters
def test_registering_again_changes_the_level() -> None:
    kernels.register()
    kernels.register(level="O1")
    counts = describe(LLAMA.model()).counts
    assert "linear_glu" not in counts and counts["rms_norm"] > 0
    with pytest.raises(ValueError, match="level"):
        kernels.register(level="fast")

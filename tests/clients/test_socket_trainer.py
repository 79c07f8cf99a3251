"""One line for Hugging Face's Trainer, trl's and accelerate: the losses of the stock model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_families import DENSE
from harness import BATCH, STEPS, rows
from patch_testing import ARGUMENTS, assert_close, counted, losses_of, make_trainer
from torch import nn

import fusedops

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import accelerate
import transformers

from fusedops.integrations.accelerate import prepare
from fusedops.integrations.trainer import FusedOpsCallback, use_fused_kernels

pytestmark = pytest.mark.usefixtures("own_products")

OPTIONS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "logging_nan_inf_filter": False,
}


def llama() -> nn.Module:
    return DENSE["Llama"].model()


def trainer(folder: Path, model: Any = None, callbacks: Any = None) -> Any:
    return make_trainer(model or llama(), folder, rows(), callbacks=callbacks, **OPTIONS)


def assert_same_losses(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected) == STEPS and min(expected) < expected[0]
    assert_close(torch.tensor(found), torch.tensor(expected))


@pytest.mark.parametrize("way", ["line", "callback", "model"])
def test_the_trainer_trains_to_the_same_losses(way: str, tmp_path: Path) -> None:
    expected = losses_of(trainer(tmp_path))
    callback = FusedOpsCallback()
    fused = trainer(tmp_path, callbacks=[callback] if way == "callback" else None)
    if way == "line":
        report = use_fused_kernels(fused)
    elif way == "model":
        report = use_fused_kernels(fused.model)
    else:
        report = callback.report
    assert report is not None and report.level == "O2" and not report.failed
    with counted() as calls:
        found = losses_of(fused)
    assert calls["cross_entropy_backward"] == STEPS and calls["linear_glu_backward"] == 2 * STEPS
    assert_same_losses(found, expected)


@pytest.mark.parametrize("way", ["line", "callback"])
def test_a_model_made_anew_for_training_is_fused_too(way: str, tmp_path: Path) -> None:
    expected = losses_of(trainer(tmp_path, llama))
    callback = FusedOpsCallback()
    callbacks = [callback] if way == "callback" else None
    fused = trainer(tmp_path, llama, callbacks)
    if way == "line":
        use_fused_kernels(fused)
    first = fused.model
    with counted() as calls:
        found = losses_of(fused)
    assert fused.model is not first and calls["linear_glu_backward"] == 2 * STEPS
    assert_same_losses(found, expected)


def test_model_init_keeps_its_argument(tmp_path: Path) -> None:
    fused = trainer(tmp_path, lambda trial: llama())
    use_fused_kernels(fused, level="O1")
    assert fusedops.integrations.describe(fused.call_model_init("a trial")).counts["rms_norm"] == 5


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


def sft(folder: Path, **options: Any) -> Any:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    lists = [{"input_ids": row["input_ids"].tolist()} for row in rows()]
    tokens = tokenizer()
    return trl.SFTTrainer(
        llama(),
        args=trl.SFTConfig(
            output_dir=str(folder), max_length=None, bf16=False, **(ARGUMENTS | OPTIONS)
        ),
        train_dataset=datasets.Dataset.from_list(lists),
        processing_class=tokens,
        **options,
    )


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = {str(index): index for index in range(97)}
    model = tokenizers.models.WordLevel(words, unk_token="0")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), eos_token="1", pad_token="2", unk_token="0"
    )


@pytest.mark.parametrize("adapters", [False, True])
def test_the_trainer_of_trl_trains_to_the_same_losses(adapters: bool, tmp_path: Path) -> None:
    options = {}
    if adapters:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        options["peft_config"] = peft.LoraConfig(
            target_modules=["q_proj", "gate_proj"], task_type="CAUSAL_LM"
        )
    torch.manual_seed(0)
    expected = losses_of(sft(tmp_path, **options))
    torch.manual_seed(0)
    fused = sft(tmp_path, **options)
    report = use_fused_kernels(fused)
    with counted() as calls:
        found = losses_of(fused)
    assert calls["rms_norm_backward"] > 0 and calls["attention_backward"] == 2 * STEPS
    name = "swiglu" if adapters else "linear_glu"  # a projection with an adapter is called
    assert calls[f"{name}_backward"] == 2 * STEPS and report.num_replaced > 0
    assert_same_losses(found, expected)


def looped(fuse: bool) -> list[float]:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(rows(STEPS * BATCH), batch_size=BATCH)
    ready = (model, optimizer, loader)
    ready = prepare(accelerator, *ready) if fuse else accelerator.prepare(*ready)
    model, optimizer, loader = ready
    values = []
    for batch in loader:
        loss = model(**batch).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        values.append(loss.item())
    return values


def test_accelerate_trains_to_the_same_losses() -> None:
    expected = looped(False)
    with counted() as calls:
        found = looped(True)
    assert calls["linear_glu_backward"] == 2 * STEPS == 2 * len(found)
    assert_same_losses(found, expected)


def test_prepare_wants_an_accelerator_and_a_model() -> None:
    with pytest.raises(TypeError, match=r"accelerate\.Accelerator"):
        prepare(llama())
    with pytest.raises(ValueError, match="a model"):
        prepare(accelerate.Accelerator(cpu=True), [1])

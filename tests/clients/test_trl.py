"""trl's SFT and DPO trainers."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
from datasets import Dataset
from harness import BATCH, LEARNING_RATE, OPS, STEPS, Table, Trained, Trial, rows, weights
from patch_testing import ARGUMENTS, losses_of
from torch import nn

from fusedops.integrations.trainer import use_fused_kernels
from fusedops.integrations.trl import use_fused_heads


def tokenizer() -> Any:
    """Return a tokenizer of 97 words, of which the last two begin and end a text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w96", pad_token="w95")


def text(ids: torch.Tensor) -> str:
    return " ".join(f"w{int(each) % 95}" for each in ids)


def options(folder: str) -> dict[str, Any]:
    descent = {"optim": "sgd", "learning_rate": LEARNING_RATE, "max_steps": STEPS}
    descent |= {"bf16": False, "per_device_train_batch_size": BATCH}
    return ARGUMENTS | descent | {"gradient_checkpointing": False, "output_dir": folder}


def sft(model: nn.Module, adapters: bool = False, fused: bool = False, **more: Any) -> Trained:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"text": text(row["input_ids"])} for row in rows()])
    chosen: dict[str, Any] = {"model": model}
    if adapters:
        targets = ["q_proj", "gate_proj"]
        chosen["peft_config"] = LoraConfig(target_modules=targets, task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        return _train(SFTTrainer, SFTConfig(**(options(folder) | more)), data, fused, **chosen)


def dpo(model: nn.Module) -> Trained:
    from trl import DPOConfig, DPOTrainer

    def row(ids: torch.Tensor) -> dict[str, str]:
        prompt, chosen = ids.tensor_split([8])
        return {
            "prompt": text(prompt),
            "chosen": " " + text(chosen),
            "rejected": " " + text(chosen.flip(0)),
        }

    data = Dataset.from_list([row(each["input_ids"]) for each in rows()])
    with tempfile.TemporaryDirectory() as folder:
        models = {"model": model, "ref_model": copy.deepcopy(model)}
        return _train(DPOTrainer, DPOConfig(**options(folder)), data, **models)


def _train(kind: Any, arguments: Any, data: Dataset, fused: bool = False, **models: Any) -> Trained:
    trainer = kind(args=arguments, train_dataset=data, processing_class=tokenizer(), **models)
    if fused:
        use_fused_kernels(trainer)
    return Trained(losses_of(trainer), weights(models["model"]))


# Both compute their losses from the logits or from the head themselves.
NO_LOSS = {**OPS, "cross_entropy": 0}
TRIALS = {
    "SFTTrainer": Trial(sft, ops=NO_LOSS),
    "SFTTrainer, packing": Trial(sft, {"packing": True, "max_length": 24}, ops=NO_LOSS),
    "SFTTrainer, gradient checkpointing": Trial(sft, {"gradient_checkpointing": True}, ops=NO_LOSS),
    "DPOTrainer": Trial(dpo, ops=NO_LOSS),
}


@pytest.mark.parametrize("mode", TRIALS)
def test_one_process(mode: str, table: Table) -> None:
    table.compare(TRIALS[mode], "trl", mode)


@pytest.mark.distributed
def test_ddp(table: Table) -> None:
    table.compare(Trial(sft, ops=NO_LOSS), "trl", "SFTTrainer, DDP", processes=2)


def test_fused_heads_are_those_of_trl() -> None:
    from trl.trainer import grpo_trainer, utils

    logits, index = torch.randn(3, 7, 500), torch.randint(500, (3, 7))
    names = {"selective_log_softmax": (logits, index), "entropy_from_logits": (logits,)}
    want = {name: getattr(utils, name)(*args) for name, args in names.items()}
    restore = use_fused_heads()
    for name, args in names.items():
        torch.testing.assert_close(getattr(grpo_trainer, name)(*args), want[name])
    restore()
    assert not hasattr(grpo_trainer.entropy_from_logits, "original")


def test_one_line_patches_its_model() -> None:
    Trial(sft, ops=NO_LOSS, by_socket=True).compare()


def test_one_line_patches_its_model_with_adapters(table: Table) -> None:
    # A projection with an adapter is called. Adapters are drawn in the dtype of the model.
    ops = {"attention": 2, "swiglu": 2}
    trial = Trial(sft, {"adapters": True}, ops=ops, exactly=None, by_socket=True)
    table.compare(trial, "trl", "SFTTrainer with peft_config (LoRA on q_proj, gate_proj)")

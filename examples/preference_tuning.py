"""Preference tuning with trl (DPO); docs/tutorials/preference_tuning.md explains each step."""

# %%
import copy
import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from fusedops.integrations.trainer import use_fused_kernels

# %%
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana"]
THINGS = ["tea", "soup", "bread", "plums", "rice", "cake", "milk", "honey"]
POLITE, RUDE = "with pleasure my friend", "no go away now"
words = sorted({*NAMES, *THINGS, *f"asks for : {POLITE} {RUDE}".split()})
vocabulary = {word: index for index, word in enumerate(["<pad>", "<end>", "<unk>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
)

random.seed(0)
pairs = [
    {"prompt": f"{name} asks for {thing} :", "chosen": f" {POLITE}", "rejected": f" {RUDE}"}
    for name in NAMES
    for thing in THINGS
]
random.shuffle(pairs)
train_rows, test_rows = Dataset.from_list(pairs[:48]), Dataset.from_list(pairs[48:])
print(train_rows[0])

# %%
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    pad_token_id=0,
    eos_token_id=1,
)
start = LlamaForCausalLM(config)


def make_trainer(folder):
    """Return a DPO trainer of a copy of the model."""
    arguments = DPOConfig(
        folder,
        max_steps=24,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        beta=0.1,
        logging_steps=8,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=0,
    )
    return DPOTrainer(
        copy.deepcopy(start),
        ref_model=copy.deepcopy(start),
        args=arguments,
        train_dataset=train_rows,
        eval_dataset=test_rows,
        processing_class=tokenizer,
    )


def losses_of(trainer):
    """Return the losses that a trainer has logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# %%
stock = make_trainer("stock")
stock.train()

# %%
trainer = make_trainer("fused")
print(use_fused_kernels(trainer))  # after the trainer is made, before train()
trainer.train()

# %%
for expected, loss in zip(losses_of(stock), losses_of(trainer), strict=True):
    print(f"loss: stock {expected:.5f}, fused {loss:.5f}")

# %%
accuracy = trainer.evaluate()["eval_rewards/accuracies"]
print(f"the polite answer is preferred in {accuracy:.0%} of prompts that were not trained on")

"""Fine-tune in transformers' Trainer; docs/tutorials/trainer.md explains the steps."""

# %%
import statistics
import time

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    logging,
    set_seed,
)

import fusedops

logging.disable_progress_bar()
fusedops.tune_host()

# %%
set_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    pad_token_id=0,
)
LlamaForCausalLM(config).save_pretrained("base")

# %%
texts = [
    f"{number} times {factor} is {number * factor}." for number in range(99) for factor in range(9)
]


def collate(rows):
    """Return a batch of byte tokens, padded on the right; padding has the label -100."""
    rows = [torch.tensor(list(row["text"].encode())) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    mask = (ids != 0).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


dataset = [{"text": " ".join(texts[start : start + 12])} for start in range(0, 880, 12)]
batch = collate(dataset[:8])
print({name: list(tensor.shape) for name, tensor in batch.items()})

# %%
stock = AutoModelForCausalLM.from_pretrained("base")
model = AutoModelForCausalLM.from_pretrained("base")
model.train()  # from_pretrained returns a model in evaluation mode
with torch.autocast("cpu", dtype=torch.bfloat16):  # as the Trainer will with bf16=True
    report = fusedops.patch(model, example=batch, calibrate=True)
print(report)


# %%
class StepTimes(TrainerCallback):
    """Keeps the seconds of each step."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *args, **kwargs):
        self.begin = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(time.perf_counter() - self.begin)


def fine_tune(model, folder):
    """Return the losses and the median seconds of a step."""
    arguments = TrainingArguments(
        folder,
        bf16=True,  # autocast
        use_cpu=True,
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        disable_tqdm=True,
        log_level="error",
    )
    times = StepTimes()
    trainer = Trainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=dataset,
        callbacks=[times],
    )
    trainer.remove_callback(PrinterCallback)  # no line for each step
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, statistics.median(times.seconds[2:])


expected, stock_seconds = fine_tune(stock, "stock")
losses, seconds = fine_tune(model, "patched")
for step in (0, 10, 19):
    print(f"step {step:2}  loss: stock {expected[step]:.4f}, patched {losses[step]:.4f}")
print(f"a patched step is {stock_seconds / seconds:.2f} times as fast")

# %%
model.save_pretrained("tuned")  # the files of a stock model
loaded = AutoModelForCausalLM.from_pretrained("tuned")  # a stock model
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):  # as in the Trainer
    difference = loaded(**batch).loss - model.eval()(**batch).loss
print(f"difference of the losses: {difference.item():.0e}")
fusedops.unpatch(model)

"""fusedops in Hugging Face's Trainer: one line between its construction and `train`.

python hf_trainer.py [stock]
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fusedops.integrations.trainer import use_fused_kernels

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(256, (8, 32)).repeat(10, 1)]
arguments = TrainingArguments(
    "runs/hf_trainer",
    max_steps=10,
    optim="sgd",
    learning_rate=0.1,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,  # remove it on a GPU
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=rows)
if "stock" not in sys.argv:
    print(use_fused_kernels(trainer))
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"loss {entry['loss']:.6f}")

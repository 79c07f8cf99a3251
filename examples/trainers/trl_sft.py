"""fusedops in trl's SFTTrainer: one line between its construction and `train`.

python trl_sft.py [stock]
"""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from fusedops.integrations.trainer import use_fused_kernels

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=256, num_attention_heads=4, pad_token_id=0, **sizes)
model = LlamaForCausalLM(config)
rows = Dataset.from_dict({"input_ids": torch.randint(1, 256, (8, 32)).repeat(10, 1).tolist()})
arguments = SFTConfig(
    "runs/trl_sft",
    max_steps=10,
    optim="sgd",
    learning_rate=0.1,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,  # without these four on a GPU
    bf16=False,
    gradient_checkpointing=False,
    disable_tqdm=True,
)
words = Tokenizer(WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0")
trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
if "stock" not in sys.argv:
    print(use_fused_kernels(trainer))
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"loss {entry['loss']:.6f}")

"""Bytes that a model with LoRA adapters keeps for its backward, stock and patched.

    python bench/models/lora_memory.py  # needs peft

Parameters do not count. Llama and GPT-2 of 4 layers, width 512, 4 x 256 tokens, on the CPU.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import fusedops

LLAMA = LlamaConfig(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
)
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = GPT2Config(vocab_size=8192, n_embd=512, n_layer=4, n_head=8, **NO_DROPOUT)
CASES = {
    "Llama, q_proj and v_proj": (LlamaForCausalLM, LLAMA, ["q_proj", "v_proj"]),
    "Llama, all linear layers": (LlamaForCausalLM, LLAMA, "all-linear"),
    "GPT-2, c_attn": (GPT2LMHeadModel, GPT2, ["c_attn"]),
    "GPT-2, all linear layers": (GPT2LMHeadModel, GPT2, "all-linear"),
}


def kept(model: nn.Module, tokens: torch.Tensor) -> float:
    """Return the MiB of all storages that a step saves for its backward."""
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    return sum(storages.values()) / 2**20


def main() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(8192, (4, 256))
    for name, (kind, config, targets) in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            adapters = LoraConfig(
                r=8,
                target_modules=targets,
                task_type="CAUSAL_LM",
                fan_in_fan_out=kind != LlamaForCausalLM,
            )
            model = get_peft_model(kind(config).to(dtype), adapters)
            stock = kept(model, tokens)
            fusedops.patch(model)
            print(f"{name}, {dtype}: stock {stock:.0f} MiB, patched {kept(model, tokens):.0f} MiB")


if __name__ == "__main__":
    main()

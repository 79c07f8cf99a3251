"""A step of LoRA on a Llama of 100 M parameters: frozen weights in bfloat16, or quantised.

8 layers, 768 wide, 12 heads, feed-forward 2048, 32,000 words, random weights; adapters of rank 16
in float32 on all linear layers but the head (peft), 4 x 128 tokens, AdamW of torch. The loss and
the gradients of the adapters are compared with those of the frozen model in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from ways import Contest, Running, Way

import fusedops

WORDS, BATCH, TOKENS, LAYERS, HIDDEN = 32_000, 4, 128, 8, 768


def llama() -> nn.Module:
    """Return the model; the weights are the same in all processes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def swap_linears(model: Any, new: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace the linear layers of a model, apart from the head."""
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            setattr(model.model.get_submodule(parent), leaf, new(module))


def with_bitsandbytes(model: Any, bits: int) -> None:
    """Quantise with bitsandbytes: NF4, or int8 by rows."""
    import bitsandbytes

    def new(linear: nn.Linear) -> nn.Module:
        sizes = linear.in_features, linear.out_features, False
        if bits == 4:
            layer = bitsandbytes.nn.Linear4bit(
                *sizes, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            layer.weight = bitsandbytes.nn.Params4bit(
                linear.weight.data, requires_grad=False, quant_type="nf4"
            )
        else:
            layer = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
            layer.weight = bitsandbytes.nn.Int8Params(
                linear.weight.data, requires_grad=False, has_fp16_weights=False
            )
        return layer.to("cpu")

    swap_linears(model, new)
    if bits == 8:
        model.is_loaded_in_8bit = True
    else:
        model.is_loaded_in_4bit = True


def with_torchao(model: Any) -> None:
    """Quantise with torchao: int8 by rows, weights only."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    # The head stays as it is, as in the others.
    quantize_(model.model, Int8WeightOnlyConfig())


def training_step(
    dtype: torch.dtype, change: Callable[[Any], object] | None = None, patched: bool = False
) -> Running:
    """Return the step; ``change`` quantises the model in place before it gets adapters."""
    import peft

    model: Any = llama().to(dtype)
    if change is not None:
        change(model)
    config = peft.LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config).train()
    adapters = [each for each in model.parameters() if each.requires_grad]
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # peft begins with zeros, whose gradients tell nothing
        for adapter in adapters:
            adapter.copy_(0.02 * torch.randn(adapter.shape, generator=generator))
    if patched:
        fusedops.patch(model)
    optimizer = torch.optim.AdamW(adapters, lr=1e-5)
    ids = torch.randint(WORDS, (BATCH, TOKENS), generator=generator)
    mask = torch.ones_like(ids)

    def gradients() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        return loss

    def run(_: object = None) -> None:
        gradients()
        optimizer.step()

    loss = gradients()
    flat = torch.cat([each.grad.float().flatten() for each in adapters])
    return Running(run, [loss.detach(), flat])


def contests() -> list[Contest]:
    """Return one contest: all ways train adapters of the same model."""
    step = partial(training_step, torch.bfloat16)
    four, eight = partial(with_bitsandbytes, bits=4), partial(with_bitsandbytes, bits=8)
    found = {"patched": Way(partial(step, patched=True), "fusedops")}
    ours = dict.fromkeys(("int8", "nf4"), "patched")
    if hasattr(fusedops, "quantize"):
        for name in ours:
            ours[name] = f"patched, {name}"
            make = partial(step, partial(fusedops.quantize, weights=name), patched=True)
            found[ours[name]] = Way(make, "fusedops", name)
    peer = partial(Way, package="bitsandbytes", process="bitsandbytes")
    found |= {
        "transformers, peft": Way(step, "peft"),
        "bitsandbytes, NF4": peer(partial(step, four), dtype="nf4", against=ours["nf4"]),
        "bitsandbytes, int8": peer(partial(step, eight), dtype="int8", against=ours["int8"]),
        "torchao, int8": Way(
            partial(step, with_torchao), "torchao", "int8", ours["int8"], process="torchao"
        ),
    }
    work = f"LoRA step of a Llama of 105 M, {BATCH} x {TOKENS} tokens"
    return [Contest(work, "bfloat16", _reference, found, "patched")]


def _reference() -> Any:
    return training_step(torch.float32).outputs

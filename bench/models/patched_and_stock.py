"""Losses of a stock and a patched Llama over several hundred steps, on the same batches.

    python bench/models/patched_and_stock.py [steps] [float32|bfloat16]

Weights, data and learning rate are the same; the model has no dropout. A third model, also stock,
sums each gradient over two halves of the batch: it differs by rounding alone. The corpus is the
source of the installed sympy package, read as bytes (docs/numerics.md has what was measured).
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import sympy
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops

BATCH, LENGTH = 8, 128
SHOWN = (1, 10, 25, 50, 100, 200, 300, 400, 500)


def corpus() -> torch.Tensor:
    """Return the bytes of all files, in the order of their names."""
    files = sorted(Path(sympy.__file__).parent.rglob("*.py"))
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


def main(steps: int = 500, dtype: str = "float32") -> None:
    fusedops.tune_host()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    stock = LlamaForCausalLM(config)
    models = {"stock": (stock, 1), "patched": (copy.deepcopy(stock), 1)}
    models["stock, two halves"] = (copy.deepcopy(stock), 2)
    print(str(fusedops.patch(models["patched"][0])).splitlines()[0])
    data, generator = corpus(), torch.Generator().manual_seed(1)
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, (model, _) in models.items()
    }
    print("step", *models, sep=" | ")
    for step in range(1, steps + 1):
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        tokens = torch.stack([data[start : start + LENGTH] for start in starts]).long()
        losses = []
        for name, (model, parts) in models.items():
            total = 0.0
            for part in tokens.chunk(parts):
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                    loss = model(part, labels=part).loss / parts
                loss.backward()
                total += loss.item()
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses.append(total)
        if step in SHOWN:
            print(step, *(f"{loss:.7f}" for loss in losses), sep=" | ", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])

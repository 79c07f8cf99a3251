"""Times torch's products and a training step of plain torch, with and without ``fusedops.cpu``.

    python bench/models/torch_products.py --record

Each row is the median of turns of torch and of fusedops in one process. The environment variables
of ``bench/README.md`` hold both to another instruction set, which the file's name then says.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fusedops
from fusedops import cpu
from fusedops.bench import machine
from fusedops.terminal import files

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((1, 2048, 2048), (4, 1024, 1024), *((size, size, size) for size in (256, 512, 1024)))
# Weights [in, out], weights [out, in] as those of linear layers, and the gradient of a weight.
PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x @ w": lambda x, w: x @ w,
    "x @ w.T": lambda x, w: x @ w.T,
    "x.T @ y": lambda x, w: x.T @ w,
}


class Block(nn.Module):
    """A layer of a GPT as plain torch code."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after this layer."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def model() -> nn.Module:
    """Return a GPT of 4 layers, 256 wide, with 2,048 words."""
    torch.manual_seed(0)
    blocks = [Block(256, 4) for _ in range(4)]
    head = nn.Linear(256, 2048, bias=False)
    return nn.Sequential(nn.Embedding(2048, 256), *blocks, nn.LayerNorm(256), head)


def train(model: nn.Module, tokens: torch.Tensor) -> None:
    """Run forward and backward."""
    model.zero_grad()
    F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()


def milliseconds(run: Callable[[], object], least: float = 0.05) -> float:
    """Return the time of a call, of as many as take ``least`` seconds."""
    start = time.perf_counter()
    run()
    count = max(1, round(least / (time.perf_counter() - start)))
    if count > 1:
        start = time.perf_counter()
        for _ in range(count):
            run()
    return (time.perf_counter() - start) / count * 1e3


def compare(run: Callable[[], object], turns: int) -> dict[str, Any]:
    """Return the medians of torch and of fusedops, and the ratio of each turn."""
    times: dict[str, list[float]] = {"torch": [], "fusedops": []}
    for _ in range(turns):
        times["torch"].append(milliseconds(run))
        with cpu.enabled():
            times["fusedops"].append(milliseconds(run))
    ratios = [one / other for one, other in zip(*times.values(), strict=True)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"ms": medians, "speed_ups": ratios, "speed_up": statistics.median(ratios)}


def cases() -> dict[str, dict[str, Callable[[], object]]]:
    """Return for each case what runs, by dtype."""
    found: dict[str, dict[str, Callable[[], object]]] = {}
    for rows, depth, columns in SIZES:
        for name, product in PRODUCTS.items():
            if name == "x.T @ y" and rows < depth:
                continue
            x, w = torch.randn(rows, depth), torch.randn(depth, columns)
            w = torch.randn(columns, depth) if name == "x @ w.T" else w
            found[f"{name}, {rows} x {depth} x {columns}"] = {
                str(dtype)[6:]: functools.partial(product, x.to(dtype), w.to(dtype))
                for dtype in DTYPES
            }
    tokens, plain = torch.randint(2048, (4, 128)), model()
    found["training step of a GPT, 4 x 128 tokens"] = {
        str(dtype)[6:]: functools.partial(train, copy.deepcopy(plain).to(dtype), tokens)
        for dtype in DTYPES
    }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line for each row, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=5, help="of torch and of fusedops")
    parser.add_argument("--out", type=Path, default=Path("out"), help="output directory")
    parser.add_argument("--record", action="store_true", help="keep it in bench/results/<device>")
    options = parser.parse_args(arguments)
    fusedops.tune_host()
    device = torch.device("cpu")
    isa = torch.ops.fusedops_native.isa_in_use()
    record = machine.provenance(device) | {"isa": isa, "replaced": cpu.state()}
    results: dict[str, dict[str, Any]] = {}
    for name, runs in cases().items():
        for dtype, run in runs.items():
            result = results.setdefault(name, {})[dtype] = compare(run, options.turns)
            ms = result["ms"]
            print(
                f"{name}, {dtype}: torch {ms['torch']:.3f} ms, fusedops {ms['fusedops']:.3f} ms, "
                f"{result['speed_up']:.2f}",
                flush=True,
            )
    folder = options.out
    if options.record:
        folder = Path(__file__).resolve().parents[1] / "results" / machine.machine(device).slug
    target = files.make_folder(folder) / f"torch_products-{isa}.json"
    files.write_json(target, record | {"turns": options.turns, "cases": results})
    print(f"wrote {target}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

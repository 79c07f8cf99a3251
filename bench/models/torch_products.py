"""Times torch's products and a training step of plain torch, with and without ``fusedops.cpu``.

    python bench/models/torch_products.py --record
    python bench/models/torch_products.py --record --only 4096  # its rows again, and no others

Each row is the median of turns in one process: in a turn run all dtypes, by torch and by fusedops.
torch takes a minute for one float16 product of 2,048, so above 1,024 only its float32 is measured.
The environment variables of ``bench/README.md`` hold both to another instruction set, which the
file's name then says.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
SQUARES = (256, 512, 1024, 2048, 4096)
SIZES = ((1, 2048, 2048), (4, 1024, 1024), *((size, size, size) for size in SQUARES))
# Weights [in, out], weights [out, in] as those of linear layers, and the gradient of a weight.
PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x @ w": lambda x, w: x @ w,
    "x @ w.T": lambda x, w: x @ w.T,
    "x @ w.T + bias": lambda x, w: F.linear(x, w, x.flatten()[: w.shape[0]]),
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


Runs = dict[str, Callable[[], object]]


def compare(runs: Runs, turns: int, *, with_torch: bool) -> dict[str, dict[str, Any]]:
    """Return for each dtype the medians of torch and of fusedops in milliseconds.

    ``of_float32`` is the median over the turns of the time of fusedops, divided by torch's in
    float32. Without ``with_torch`` torch is measured in float32 only.
    """
    times: dict[str, dict[str, list[float]]] = {dtype: {} for dtype in runs}
    for _ in range(turns):
        for dtype, run in runs.items():
            if with_torch or dtype == "float32":
                times[dtype].setdefault("torch", []).append(milliseconds(run))
            with cpu.enabled():
                times[dtype].setdefault("fusedops", []).append(milliseconds(run))
    exact = times["float32"]["torch"]
    return {
        dtype: {
            "ms": {name: statistics.median(values) for name, values in of_dtype.items()},
            "of_float32": statistics.median(
                one / other for one, other in zip(of_dtype["fusedops"], exact, strict=True)
            ),
        }
        for dtype, of_dtype in times.items()
    }


def cases() -> Iterator[tuple[str, bool, Callable[[], Runs]]]:
    """Yield for each case its name, whether torch is fast enough, and what makes the runs."""
    for rows, depth, columns in SIZES:
        for name, product in PRODUCTS.items():
            if rows >= depth or name in ("x @ w", "x @ w.T"):
                label = f"{name}, {rows} x {depth} x {columns}"
                make = functools.partial(_products, product, rows, depth, columns, ".T" in name)
                yield label, rows <= 1024, make
    yield "training step of a GPT, 4 x 128 tokens", True, _training


def _products(
    product: Callable[..., torch.Tensor], rows: int, depth: int, columns: int, transposed: bool
) -> Runs:
    x = torch.randn(rows, depth)
    w = torch.randn(columns, depth) if transposed else torch.randn(depth, columns)
    return {
        str(dtype)[6:]: functools.partial(product, x.to(dtype), w.to(dtype)) for dtype in DTYPES
    }


def _training() -> Runs:
    tokens, plain = torch.randint(2048, (4, 128)), model()
    return {
        str(dtype)[6:]: functools.partial(train, copy.deepcopy(plain).to(dtype), tokens)
        for dtype in DTYPES
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line for each row, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=5, help="of torch and of fusedops")
    parser.add_argument("--only", nargs="+", help="measure rows with one of these texts again")
    parser.add_argument("--out", type=Path, default=Path("out"), help="output directory")
    parser.add_argument("--record", action="store_true", help="keep it in bench/results/<device>")
    options = parser.parse_args(arguments)
    fusedops.tune_host()
    device = torch.device("cpu")
    isa = torch.ops.fusedops_native.isa_in_use()
    record = machine.provenance(device) | {"isa": isa, "replaced": cpu.state()}
    folder = options.out
    if options.record:
        folder = Path(__file__).resolve().parents[1] / "results" / machine.machine(device).slug
    target = files.make_folder(folder) / f"torch_products-{isa}.json"
    results: dict[str, dict[str, Any]] = {}
    if options.only and target.exists():
        results = json.loads(target.read_text())["cases"]
    for name, with_torch, make in cases():
        if options.only and not any(text in name for text in options.only):
            continue
        results[name] = compare(make(), options.turns, with_torch=with_torch)
        for dtype, result in results[name].items():
            ms = ", ".join(f"{who} {value:.3f} ms" for who, value in result["ms"].items())
            print(f"{name}, {dtype}: {ms}, {result['of_float32']:.2f} of float32", flush=True)
    results = {name: results[name] for name, *_ in cases() if name in results}
    files.write_json(target, record | {"turns": options.turns, "cases": results})
    print(f"wrote {target}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Times dispatch + combine against torch's own permutation and all-to-all, over gloo.

    python bench/distributed/moe_exchange.py --ranks 2 --csv bench/results/cpu-zen5/moe_exchange.csv

Every variant starts from the same router's choices, already sorted, and ends with the weighted sum
of what identity experts return. Variants:

* ``rows``: index_select, counts, rows by all_to_all_single, and back; the sum at home.
  Probabilities and expert ids do not travel: less than what experts need, and the fewest bytes.
* ``same_bytes``: the same, and probabilities and ids travel in two more all_to_all_single.
* ``fusedops``: moe_dispatch and moe_combine. ``fusedops_float8``: with the float8 payload.

Rounds are interleaved, in the same random order on all ranks; a sample begins at a barrier and
lasts until the slowest rank is done. Medians, and the median of the ratios round by round.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fusedops
from fusedops.bench import machine
from fusedops.bench.tables import csv_text, load_rows
from fusedops.parallel import moe_combine, moe_dispatch
from fusedops.runtime.timer import Spread
from fusedops.terminal import files

# tokens per rank, hidden size, choices, experts
SIZES = {
    "2048x2048 top-2 of 8": (2048, 2048, 2, 8),
    "1024x2048 top-8 of 64": (1024, 2048, 8, 64),
    "64x1024 top-2 of 8": (64, 1024, 2, 8),
}
BASELINE = "same_bytes"
Exchange = Callable[[torch.Tensor, fusedops.RoutingPlan], torch.Tensor]


class _AllToAll(torch.autograd.Function):
    """all_to_all_single with its gradient, as the field writes it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        ctx.splits = receive, send
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _AllToAll.apply(grad, *ctx.splits), None, None


def torch_exchange(
    x: torch.Tensor, plan: fusedops.RoutingPlan, *, everything: bool
) -> torch.Tensor:
    """Permute, exchange, return, sum: torch alone."""
    ranks = dist.get_world_size()
    counts = plan.tokens_per_expert.view(ranks, -1)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    send, receive = counts.sum(1).tolist(), arriving.sum(1).tolist()
    slots = plan.permutation.long()
    rows = _AllToAll.apply(x.index_select(0, slots // plan.top_k), send, receive)
    if everything:
        _AllToAll.apply(plan.probs.flatten().index_select(0, slots), send, receive)
        _AllToAll.apply(plan.expert_ids.flatten().index_select(0, slots), send, receive)
    back = _AllToAll.apply(rows, receive, send)
    mine = back.index_select(0, plan.positions.flatten().long()).view(*plan.probs.shape, -1)
    return (mine * plan.probs.unsqueeze(2).to(mine.dtype)).sum(1)


def fused_exchange(
    x: torch.Tensor, plan: fusedops.RoutingPlan, *, payload: str | None
) -> torch.Tensor:
    """The same with the packed payload."""
    rows, _, handle = moe_dispatch(x, plan, dist.group.WORLD, payload=payload)
    return moe_combine(rows, handle, weighted=True)


VARIANTS: dict[str, Exchange] = {
    "rows": lambda x, plan: torch_exchange(x, plan, everything=False),
    "same_bytes": lambda x, plan: torch_exchange(x, plan, everything=True),
    "fusedops": lambda x, plan: fused_exchange(x, plan, payload=None),
    "fusedops_float8": lambda x, plan: fused_exchange(x, plan, payload="float8"),
}


def _inputs(
    size: tuple[int, int, int, int], dtype: torch.dtype, rank: int
) -> tuple[torch.Tensor, fusedops.RoutingPlan, torch.Tensor]:
    tokens, hidden, top_k, experts = size
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    scores = torch.rand(tokens, experts, generator=generator).softmax(1)
    probs, ids = scores.topk(top_k)
    plan = fusedops.RoutingPlan.from_choices(ids, probs, experts)
    plan = plan.with_probs(plan.probs.detach().requires_grad_())
    return x, plan, torch.randn(tokens, hidden, generator=generator).to(dtype)


def _sample(exchange: Exchange, inputs: Any, backward: bool) -> float:
    x, plan, grad = inputs
    dist.barrier()
    begin = time.perf_counter()
    output = exchange(x, plan)
    if backward:
        torch.autograd.grad(output, [x, plan.probs], grad)
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _rank(rank: int, arguments: argparse.Namespace, store: str, results: Any) -> None:
    torch.set_num_threads(arguments.threads)
    fusedops.tune_host()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, arguments.ranks), rank=rank, world_size=arguments.ranks
    )
    order = random.Random(0)
    rows = []
    for label in arguments.sizes:
        inputs = _inputs(SIZES[label], torch.bfloat16, rank)
        for backward in (False, True):
            samples: dict[str, list[float]] = {name: [] for name in VARIANTS}
            for turn in range(arguments.rounds + 2):
                names = list(VARIANTS)
                order.shuffle(names)
                for name in names:
                    seconds = _sample(VARIANTS[name], inputs, backward)
                    if turn >= 2:
                        samples[name].append(seconds)
            rows += _rows(label, "both" if backward else "forward", samples)
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def _rows(label: str, direction: str, samples: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for name, seconds in samples.items():
        ratios = [a / b for a, b in zip(samples[BASELINE], seconds, strict=True)]
        spread, ratio = Spread.of(seconds), Spread.of(ratios)
        rows.append(
            {
                "case": label,
                "dtype": "bfloat16",
                "direction": direction,
                "variant": name,
                "speedup": ratio.median,
                "speedup_q1": ratio.q1,
                "speedup_q3": ratio.q3,
                "median_us": 1e6 * spread.median,
                "q1_us": 1e6 * spread.q1,
                "q3_us": 1e6 * spread.q3,
                "samples": spread.count,
            }
        )
    return rows


def main() -> None:
    """Run the ranks, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(
            _rank,
            (arguments, str(Path(folder) / "store"), results),
            nprocs=arguments.ranks,
        )
        rows = results.get()
    print(f"{arguments.ranks} ranks, {arguments.threads} thread(s) each, gloo; x {BASELINE}")
    for row in rows:
        print(
            f"{row['case']:24}{row['direction']:9}{row['variant']:17}"
            f"{row['median_us'] / 1e3:9.2f} ms  x{row['speedup']:.2f}"
            f" ({row['speedup_q1']:.2f}-{row['speedup_q3']:.2f})"
        )
    if arguments.csv:
        _write(arguments.csv, arguments, rows)


def _write(path: Path, arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    here = machine.machine(torch.device("cpu"))
    about = {
        "ranks": arguments.ranks,
        "threads": arguments.threads,
        "device": here.name,
        "torch": torch.__version__,
        "commit": machine.git_commit().get("commit", ""),
        "created": machine.now(),
    }
    files.make_folder(path.parent)
    before = load_rows(path) if path.exists() else []
    columns = [*rows[0], *about]
    files.write_text(path, csv_text([*before, *({**row, **about} for row in rows)], columns))


if __name__ == "__main__":
    main()

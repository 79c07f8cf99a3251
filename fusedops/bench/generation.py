"""Tokens per second of decoding, compared with transformers: ``fusedops bench generate``.

One architecture, one set of random weights, three ways to continue the same prompts: our model, and
that of transformers, patched and unpatched. They are interleaved in one process, and each is
compared with ours round by round, so that noise on the machine affects all of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusedops.bench.small_models import InterleavedRow, SmallModel
from fusedops.generation import generate
from fusedops.models import Transformer, save_huggingface
from fusedops.runtime import host, timer
from fusedops.runtime.timer import CpuClock, TimingPlan, Variant

OURS, PATCHED, STOCK = "fusedops", "patched transformers", "transformers"
PRESETS = ("gpt2", "llama3-8b", "mixtral-8x7b", "qwen3-8b")
_LEAST_TURNS, _MOST_TURNS = 5, 10_000


@dataclass(frozen=True)
class GenerationWork(SmallModel):
    """What is generated."""

    dtype: str  # of the model's weights
    sequences: int  # side by side
    prompt: int  # tokens of each to begin with
    tokens: int  # new ones of each


@dataclass(kw_only=True)
class GenerationRow(InterleavedRow):
    """What a way of generating reached; a turn has the prompt too."""

    work: GenerationWork  # what was generated
    name: str  # which way
    same: float = 1.0  # the share of its tokens that are ours


def measure(
    work: GenerationWork, seconds: float, threads: int, report: Callable[[str], None] = print
) -> list[GenerationRow]:
    """Measure the ways of generating, interleaved, for about so many seconds each.

    Ours is the first row. ``report`` is called with what is being done.
    """
    host.tune_host(threads=threads)
    report(f"making {work.preset} in {work.dtype}")
    ways = _ways(work)
    made = work.sequences * work.tokens
    rows = [GenerationRow(tokens=made, work=work, name=name) for name in ways]
    tokens = {name: run() for name, run in ways.items()}
    for row in rows:
        row.same = (tokens[row.name] == tokens[OURS]).double().mean().item()
    report(f"timing {work.preset} in {work.dtype}")
    variants = [Variant(name, lambda _, run=run: run()) for name, run in ways.items()]  # type: ignore[misc]
    plan = TimingPlan(_LEAST_TURNS, _MOST_TURNS, seconds * len(rows))
    rounds = timer.measure(variants, CpuClock(), plan).rounds
    for row in rows:
        row.seconds = rounds[row.name]
        row.ratios = [own / ours for own, ours in zip(row.seconds, rounds[OURS], strict=True)]
    return rows


def _ways(work: GenerationWork) -> dict[str, Callable[[], torch.Tensor]]:
    """Return functions that generate and return the new tokens, ``[sequences, tokens]``."""
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, work.dtype)
    model = Transformer(work.config(work.prompt + work.tokens), dtype=dtype)
    prompts = torch.randint(work.vocab_size, (work.sequences, work.prompt))

    def ours() -> torch.Tensor:
        results = generate(model, prompts, tokens=work.tokens)
        return torch.tensor([result.tokens for result in results])

    from fusedops.integrations import patch

    with tempfile.TemporaryDirectory() as folder:
        save_huggingface(model, folder)
        stock, patched = _transformers(folder, dtype), _transformers(folder, dtype)
    patch(patched)
    return {
        OURS: ours,
        PATCHED: _theirs(patched, prompts, work),
        STOCK: _theirs(stock, prompts, work),
    }


def _transformers(folder: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _theirs(model: Any, prompts: torch.Tensor, work: GenerationWork) -> Callable[[], torch.Tensor]:
    options = {"min_new_tokens": work.tokens, "max_new_tokens": work.tokens, "do_sample": False}
    mask = torch.ones_like(prompts)

    def run() -> torch.Tensor:
        sequences = model.generate(prompts, attention_mask=mask, pad_token_id=0, **options)
        return sequences[:, prompts.shape[1] :]

    return run

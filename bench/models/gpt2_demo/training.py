"""Train contenders on the same batches in turns, and keep what they lost, took and held.

All contenders start from one ``state_dict`` and see the same batches with the same learning rates.
They take turns in one process, a few steps each and each first as often as the other, so that a
drifting clock or a neighbour on the machine meets all of them alike.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import fusedops
from fusedops.integrations import PatchReport
from fusedops.runtime import timer
from fusedops.runtime.peak import peak_bytes

from .corpus import Corpus

BLOCK = 4  # steps of one contender before the next has its turn
UNTIMED = 3  # first steps of each contender that do not count: page faults, caches, compilation
COMPARED = 20  # steps after which rounding, amplified by training, may tell the losses apart


@dataclass(frozen=True)
class Settings:
    """The model and how it is trained; equal for all contenders.

    Dropout is 0, as in today's pre-training: a fused dropout draws other random bits than torch's,
    and only without it can the losses be equal step by step.
    """

    layers: int
    hidden: int
    heads: int
    vocab_size: int
    seq_len: int
    batch_size: int
    steps: int
    seed: int
    device: str
    learning_rate: float = 6e-4
    warmup: int = 20
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    validation_batches: int = 8

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one batch."""
        return self.batch_size * self.seq_len


@dataclass(frozen=True)
class Contender:
    """What is compared: a name, and what is done to the model before training.

    Attributes:
        name: key in the results.
        prepare: changes the model in place; may return a report of it.
    """

    name: str
    prepare: Callable[[nn.Module], PatchReport | None]


STOCK = Contender("stock", lambda model: None)
FUSED = Contender("fusedops", fusedops.patch)


def build_model(settings: Settings) -> GPT2LMHeadModel:
    """Return a GPT-2 with random weights from its configuration; nothing is downloaded."""
    torch.manual_seed(settings.seed)
    config = GPT2Config(
        vocab_size=settings.vocab_size,
        n_positions=settings.seq_len,
        n_embd=settings.hidden,
        n_layer=settings.layers,
        n_head=settings.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).to(settings.device)


class Trainer:
    """One contender's model, its optimiser and what they went through."""

    def __init__(
        self, contender: Contender, model: GPT2LMHeadModel, settings: Settings, dtype: str
    ) -> None:
        self.name = contender.name
        self.settings = settings
        self.dtype = dtype
        self.model = copy.deepcopy(model).train()
        self.report = contender.prepare(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.losses: list[float] = []

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which this contender's forward runs."""
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(torch.device(self.settings.device).type, torch.bfloat16)

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            return self.model(batch, labels=batch).loss

    def step(self, batch: torch.Tensor, rate: float) -> None:
        """Train on one batch at ``rate`` times the learning rate; note the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * rate
        loss = self._loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    @torch.no_grad()
    def evaluate(self, batches: Sequence[torch.Tensor]) -> float:
        """Return the mean loss per token over batches of one length."""
        self.model.eval()
        total = sum(self._loss(batch).item() * len(batch) for batch in batches)
        self.model.train()
        return total / sum(len(batch) for batch in batches)

    def peak_memory(self, batch: torch.Tensor) -> int:
        """Return the bytes of all tensors at the peak of a step; the model stays as it is."""

        def forward_and_backward() -> None:
            self._loss(batch).backward()
            self.optimizer.zero_grad()

        held = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimizer.state.values():
            held += [value for value in state.values() if isinstance(value, torch.Tensor)]
        step = peak_bytes(forward_and_backward, batch.device)
        return step + sum(tensor.nbytes for tensor in held)


@dataclass
class Comparison:
    """What the contenders of one dtype did.

    Attributes:
        dtype: ``"float32"`` or ``"bfloat16"`` (autocast).
        settings: of all of them.
        losses: per contender and step.
        timing: seconds per timed step, turn by turn.
        reports: of the patched ones.
        validation_losses: per contender, after the last step (``inspect``).
        peak_memory: bytes per contender (``inspect``).
    """

    dtype: str
    settings: Settings
    losses: dict[str, list[float]]
    timing: timer.Timing
    reports: dict[str, PatchReport] = field(default_factory=dict)
    validation_losses: dict[str, float] = field(default_factory=dict)
    peak_memory: dict[str, int] = field(default_factory=dict)

    def tokens_per_second(self, name: str) -> float:
        """Return the speed of a contender's median step."""
        return self.settings.tokens_per_step / self.timing.spread(name).median

    def loss_differences(self, base: str, other: str) -> list[float]:
        """Return the relative difference of two contenders' losses, step by step."""
        pairs = zip(self.losses[base], self.losses[other], strict=True)
        return [abs(a - b) / abs(a) for a, b in pairs]


def warm_up(step: int, settings: Settings) -> float:
    """Return the share of the learning rate at ``step``: a ramp, then constant."""
    return min(1.0, (step + 1) / settings.warmup)


def timed(run: Callable[[], None], device: str) -> tuple[float, bool]:
    """Return the seconds of a call, and whether its threads had to wait for a core."""
    if torch.device(device).type == "cpu":
        return timer.CpuClock().sample(timer.Variant("step", lambda _: run()), 1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start, False


def turns(steps: int, names: Sequence[str]) -> list[tuple[str, range]]:
    """Return who trains which steps, in order: blocks, each contender first in its turn.

    Example:
        >>> turns(6, ["a", "b"])
        [('a', range(0, 4)), ('b', range(0, 4)), ('b', range(4, 6)), ('a', range(4, 6))]
    """
    order, plan = list(names), []
    for start in range(0, steps, BLOCK):
        block = range(start, min(start + BLOCK, steps))
        plan += [(name, block) for name in order]
        order = order[1:] + order[:1]
    return plan


def compare(
    contenders: Sequence[Contender],
    corpus: Corpus,
    settings: Settings,
    dtype: str,
    *,
    seconds: float = math.inf,
    on_step: Callable[[str, float], None] = lambda name, loss: None,
) -> tuple[Comparison, dict[str, Trainer]]:
    """Train the contenders in turns and measure them.

    Args:
        contenders: from one set of weights.
        corpus: gives the batches.
        settings: of all.
        dtype: ``"float32"``, or ``"bfloat16"`` for autocast.
        seconds: no new round of turns begins after this time, once the losses of ``COMPARED``
            steps are there.
        on_step: called after each step with contender and loss.

    Returns:
        The measurement, and the trainers as they are after it.

    Raises:
        FloatingPointError: a loss is not finite.
    """
    model = build_model(settings)
    trainers = {
        contender.name: Trainer(contender, model, settings, dtype) for contender in contenders
    }
    del model
    names = list(trainers)
    timing = timer.Timing({name: [] for name in names}, {name: [] for name in names})
    shape = {"batch_size": settings.batch_size, "seq_len": settings.seq_len}
    deadline = time.monotonic() + seconds
    for name, block in turns(settings.steps, names):
        trainer = trainers[name]
        begins_round = all(len(each.losses) == block.start for each in trainers.values())
        if begins_round and block.start >= COMPARED and time.monotonic() > deadline:
            break
        for step in block:
            batch = corpus.batch(step, seed=settings.seed, **shape).to(settings.device)
            rate = warm_up(step, settings)
            took, waited = timed(partial(trainer.step, batch, rate), settings.device)
            if not math.isfinite(trainer.losses[-1]):
                raise FloatingPointError(f"{name}, {dtype}: the loss of step {step} is not finite")
            if step >= UNTIMED:
                timing.rounds[name].append(took)
                timing.contended[name].append(waited)
            on_step(name, trainer.losses[-1])
    losses = {name: list(trainers[name].losses) for name in names}
    reports = {name: each.report for name, each in trainers.items() if each.report is not None}
    return Comparison(dtype, settings, losses, timing, reports), trainers


def inspect(comparison: Comparison, trainers: dict[str, Trainer], corpus: Corpus) -> None:
    """Add the validation loss and the peak memory of each trainer to the comparison."""
    settings = comparison.settings
    batches = corpus.validation_batches(
        batch_size=settings.batch_size,
        seq_len=settings.seq_len,
        max_batches=settings.validation_batches,
    )
    batches = [batch.to(settings.device) for batch in batches]
    for name, trainer in trainers.items():
        comparison.validation_losses[name] = trainer.evaluate(batches)
        comparison.peak_memory[name] = trainer.peak_memory(batches[0])


def train_on(
    trainer: Trainer,
    corpus: Corpus,
    steps: int,
    *,
    on_step: Callable[[str, float], None] = lambda name, loss: None,
) -> None:
    """Train one contender further, its learning rate falling to zero."""
    settings = trainer.settings
    done = len(trainer.losses)
    for step in range(done, done + steps):
        batch = corpus.batch(
            step, seed=settings.seed, batch_size=settings.batch_size, seq_len=settings.seq_len
        )
        ramp = warm_up(step, settings)
        trainer.step(batch.to(settings.device), ramp * (1 - (step - done) / steps))
        on_step(trainer.name, trainer.losses[-1])


def generate(trainer: Trainer, corpus: Corpus, prompt: str, tokens: int) -> str:
    """Return ``prompt`` and what the model writes after it (sampled, seeded).

    Of a prompt that takes more than half of the context only the end is kept.
    """
    model, settings = trainer.model, trainer.settings
    prompt_ids = corpus.tokenizer.encode(prompt).ids[-(settings.seq_len // 2) :]
    ids = torch.tensor([prompt_ids], device=settings.device)
    model.eval()
    torch.manual_seed(settings.seed)
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=min(tokens, settings.seq_len - ids.shape[1]),
        do_sample=True,
        temperature=0.7,
        top_k=40,
        use_cache=True,
        pad_token_id=0,
    )
    model.train()
    return corpus.tokenizer.decode(written[0].tolist())

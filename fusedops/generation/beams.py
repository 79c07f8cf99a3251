"""Beam search: the most probable sequences of each prompt continue, side by side.

Each step ranks all tokens after all beams of a prompt by the log-probability of it all. What ends
among the best of them is finished, with that number divided by ``length ** length_penalty`` as its
score; the best that do not end are the next beams. A prompt is done when as many are finished as
there are beams and the best beam, were it to end here, would not score more than the worst of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from fusedops._core.device_tensors import device_tensor
from fusedops.generation.decoder import device_of, start
from fusedops.generation.options import Generated, NonFiniteLogitsError, Options
from fusedops.generation.sampling import penalized, tokens_seen
from fusedops.models import TrainEngine


@dataclass
class _Prompt:
    """The beams of a prompt."""

    number: int  # of the prompt
    beams: list[list[int]]  # new tokens of each
    scores: list[float]  # their log-probabilities
    # Score, new tokens and reason of those that ended, the best first
    finished: list[tuple[float, list[int], str]] = field(default_factory=list)
    done: bool = False  # whether no better one can come
    failed: bool = False  # whether a log-probability was NaN

    def advance(self, ranked: list[tuple[float, int, int]], options: Options) -> list[int]:
        """Take the best of (log-probability, beam, token); return the beams that they continue."""
        size, length = options.beams, len(self.beams[0]) + 1
        # The best is NaN where any is, and infinite where a model allows no word at all.
        if not math.isfinite(ranked[0][0]):
            self.done = self.failed = True
            return []
        last = length == options.tokens
        before = self.beams
        chosen: list[tuple[float, int, int]] = []
        for place, (score, beam, token) in enumerate(ranked):
            ends = token in options.stop
            if (ends or last) and place < size:
                reason = "stop" if ends else "length"
                tokens = [*before[beam], token]
                self.finished.append((score / length**options.length_penalty, tokens, reason))
            elif not ends and len(chosen) < size:
                chosen.append((score, beam, token))
        self.finished.sort(key=lambda beam: -beam[0])
        del self.finished[size:]
        if last or not chosen:  # every word may be one that ends
            self.done = True
            return []
        self.beams = [[*before[beam], token] for _, beam, token in chosen]
        self.scores = [score for score, *_ in chosen]
        if len(self.finished) == size:
            self.done = self.scores[0] / length**options.length_penalty <= self.finished[-1][0]
        return [beam for _, beam, _ in chosen]

    def result(self) -> Generated | int:
        """Return the best sequence, or after how many tokens the search failed."""
        if self.failed:
            return len(self.beams[0])
        score, tokens, reason = self.finished[0]
        return Generated(self.number, tokens, reason, score)


@torch.no_grad()
def search(engine: TrainEngine, prompts: list[torch.Tensor], options: Options) -> list[Generated]:
    """Return the best sequence of each prompt."""
    size, vocab_size = options.beams, engine.model.config.vocab_size
    device = device_of(engine.model)
    batch, decoder, logits_RV = start(engine, prompts, options, size)
    row_prompts = [prompts[number] for number in batch.prompts for _ in range(size)]
    seen_RV = tokens_seen(row_prompts, options, vocab_size, device)
    # At first the beams are the same: all but one are out of the question.
    begin = [0.0, *[-torch.inf] * (size - 1)]
    mine = [_Prompt(number, [[] for _ in range(size)], begin) for number in batch.prompts]
    alive = mine
    # One more for each token that ends, so that as many stay as there are beams.
    count = min((1 + max(1, len(set(options.stop)))) * size, size * vocab_size)
    for _ in range(options.tokens):
        best = torch.empty(len(alive), count, device=device)
        indices = torch.empty(len(alive), count, dtype=torch.int64, device=device)
        if batch.chooses:
            scores_RV = penalized(
                logits_RV.float().log_softmax(-1), seen_RV, options.repetition_penalty
            )
            before_R1 = device_tensor([s for p in alive for s in p.scores], torch.float32, device)
            totals = (scores_RV + before_R1.unsqueeze(-1)).reshape(len(alive), size * vocab_size)
            best, indices = totals.topk(count)
        best, indices = batch.from_last_stage(best), batch.from_last_stage(indices)
        kept = []
        for number, prompt in enumerate(alive):
            pairs = zip(best[number].tolist(), indices[number].tolist(), strict=True)
            ranked = [(score, *divmod(index, vocab_size)) for score, index in pairs]
            parents = prompt.advance(ranked, options)
            if not prompt.done:
                kept += [number * size + beam for beam in parents]
        alive = [prompt for prompt in alive if not prompt.done]
        if not batch.any(bool(alive)):
            break
        rows = device_tensor(kept, torch.int64, device)
        decoder.select(rows)
        tokens_R = device_tensor(
            [beam[-1] for prompt in alive for beam in prompt.beams], torch.int64, device
        )
        if seen_RV is not None:
            seen_RV = seen_RV[rows]
            seen_RV[torch.arange(len(rows), device=device), tokens_R] = True
        logits_RV = decoder.step(tokens_R)
    results = batch.gather([prompt.result() for prompt in mine])
    for number, result in enumerate(results):
        if isinstance(result, int):
            raise NonFiniteLogitsError(number, len(prompts[number]) + result)
    return results

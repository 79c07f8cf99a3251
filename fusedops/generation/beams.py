"""Beam search: of each prompt the likeliest sequences are gone on with, side by side.

Each step ranks all words after all beams of a prompt by the log-probability of the whole. What ends
among the best of them is finished, with that number divided by ``length ** length_penalty`` as its
score; the best that do not end are the next beams. A prompt is done when as many are finished as
there are beams and the best beam, were it to end here, would not score more than the worst of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from fusedops.generation.decoder import decoder_for, device_of
from fusedops.generation.options import Generated, NonFiniteLogitsError, Options
from fusedops.generation.ranks import Shares
from fusedops.generation.sampling import penalised, seen_by
from fusedops.models import TrainEngine


@dataclass
class _Prompt:
    """The beams of a prompt.

    Attributes:
        number: of the prompt.
        beams: new tokens of each.
        scores: their log-probabilities.
        finished: score, new tokens and reason of those that ended, the best first.
        done: whether no better one can come.
        failed: whether a log-probability was NaN.
    """

    number: int
    beams: list[list[int]]
    scores: list[float]
    finished: list[tuple[float, list[int], str]] = field(default_factory=list)
    done: bool = False
    failed: bool = False

    def go_on(self, ranked: list[tuple[float, int, int]], options: Options) -> list[int]:
        """Take the best continuations; returns the beam that each of the next ones goes on.

        Args:
            ranked: log-probability, beam and token of each, the best first.
            options: of the search.
        """
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
        self.finished.sort(key=lambda each: -each[0])
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
    model = engine.model
    size, words = options.beams, model.config.vocab_size
    device = device_of(model)
    shares = Shares(engine, len(prompts), device)
    mine = [prompts[each] for each in shares.mine]
    most = max(len(each) for each in prompts) + options.tokens
    decoder = decoder_for(engine, most, options)
    logits_RV = decoder.prefill(mine)
    rows = torch.arange(len(mine), device=device).repeat_interleave(size)
    decoder.select(rows)
    logits_RV = logits_RV[rows]
    seen_RV = None
    if options.repetition_penalty != 1.0:
        seen_RV = seen_by(mine, words, device)[rows]
    # At first the beams are the same: all but one are out of the question.
    begin = [0.0, *[-torch.inf] * (size - 1)]
    alive = [_Prompt(number, [[] for _ in range(size)], begin) for number in shares.mine]
    done = [each for each in alive if each.done]
    # One more for each token that ends, so that as many stay as there are beams.
    some = min((1 + max(1, len(set(options.stop)))) * size, size * words)
    for _ in range(options.tokens):
        best = torch.empty(len(alive), some, device=device)
        places = torch.empty(len(alive), some, dtype=torch.int64, device=device)
        if shares.chooses:
            scores_RV = penalised(
                logits_RV.float().log_softmax(-1), seen_RV, options.repetition_penalty
            )
            before_R1 = torch.tensor([s for each in alive for s in each.scores], device=device)
            totals = (scores_RV + before_R1.unsqueeze(-1)).reshape(len(alive), size * words)
            best, places = totals.topk(some)
        best, places = shares.of_last(best), shares.of_last(places)
        kept = []
        for index, each in enumerate(alive):
            ranked = [
                (score, place // words, place % words)
                for score, place in zip(best[index].tolist(), places[index].tolist(), strict=True)
            ]
            parents = each.go_on(ranked, options)
            if not each.done:
                kept += [index * size + beam for beam in parents]
        done += [each for each in alive if each.done]
        alive = [each for each in alive if not each.done]
        if not shares.any(bool(alive)):
            break
        rows = torch.tensor(kept, dtype=torch.int64, device=device)
        decoder.select(rows)
        tokens_R = torch.tensor(
            [beam[-1] for each in alive for beam in each.beams], dtype=torch.int64, device=device
        )
        if seen_RV is not None:
            seen_RV = seen_RV[rows]
            seen_RV[torch.arange(len(rows), device=device), tokens_R] = True
        logits_RV = decoder.step(tokens_R)
    found = shares.gather([each.result() for each in sorted(done, key=lambda each: each.number)])
    for number, each in enumerate(found):
        if isinstance(each, int):
            raise NonFiniteLogitsError(number, len(prompts[number]) + each)
    return found

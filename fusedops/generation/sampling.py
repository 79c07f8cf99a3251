"""Which token follows, given the logits: the likeliest one, or one that is drawn.

Draws are counter-based: the key of Philox is the seed, its counter the position of the new token,
the number of the sample and the number of the prompt. A draw depends on nothing else, and the
streams of two prompts or samples are independent. A draw picks from the cumulative probabilities of
the tokens that are left, the likeliest first.

Where ``tp`` divides the words, the likeliest of all are found among the likeliest of each rank:
logits are not gathered, unless all of them are drawn from.

Letters of shapes: R rows, V words, W words of this rank, K words that are left, P places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedops._core.philox import philox4x32
from fusedops.generation.options import Options, Stream
from fusedops.parallel.tensor.vocabulary import VocabParallelProjection, largest

_LOW = 0xFFFFFFFF
# Draws are made for so many places at once: a hundred small operations each time.
_PLACES = 256
# Stands for a token where the logits leave none to choose: every rank gets it with the tokens.
NO_TOKEN = -2
_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny  # what is less is 0 in float32


class Chooser:
    """The next tokens of some rows.

    Args:
        options: temperature and the like.
        prompts: the tokens of each row so far, int64.
        streams: of random numbers, one for each row.
        words: of the vocabulary.
        device: of the logits.
        split: how ranks divide the words of the logits; ``None``: each has all.
    """

    def __init__(
        self,
        options: Options,
        prompts: Sequence[torch.Tensor],
        streams: Sequence[Stream],
        words: int,
        device: torch.device,
        split: VocabParallelProjection | None = None,
    ) -> None:
        self._options, self._split = options, split
        self._lengths = [len(each) for each in prompts]
        self._streams = list(streams)
        self._device = device
        self._rows = torch.arange(len(prompts), device=device)
        self._step = 0
        self._drawn = torch.empty(len(prompts), 0, dtype=torch.float64, device=device)
        self._seen = None
        if options.repetition_penalty != 1.0:
            self._seen = seen_by(prompts, words, device)

    @torch.no_grad()
    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows."""
        kept = rows.tolist()
        self._lengths = [self._lengths[each] for each in kept]
        self._streams = [self._streams[each] for each in kept]
        self._drawn = self._drawn[rows]
        self._rows = self._rows[: len(kept)]
        if self._seen is not None:
            self._seen = self._seen[rows]

    @torch.no_grad()
    def choose(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the next token of each row, ``[R]`` int64; ``NO_TOKEN`` where none can be chosen.

        Args:
            logits_RV: after the rows so far; with ``split`` of this rank's words alone.
        """
        options, seen_RV = self._options, self._seen
        if seen_RV is not None:
            if self._split is not None:
                words = self._split.vocab
                seen_RV = seen_RV[:, words.start : words.stop]
            logits_RV = penalised(logits_RV.float(), seen_RV, options.repetition_penalty)
        if options.temperature == 0.0:
            tokens_R = checked(*likeliest(logits_RV, 1, self._split))
        else:
            tokens_R = draw(logits_RV, self._draws(), options, self._split)
        self._step += 1
        if self._seen is not None:
            self._seen[self._rows, tokens_R] = True
        return tokens_R

    def _draws(self) -> torch.Tensor:
        """Return the draws of this step, ``[R]``."""
        place = self._step % _PLACES
        if place == 0:
            firsts = [each + self._step for each in self._lengths]
            self._drawn = uniforms(self._streams, firsts, _PLACES, self._device)
        return self._drawn[:, place]


def uniforms(
    streams: Sequence[Stream], firsts: Sequence[int], places: int, device: torch.device
) -> torch.Tensor:
    """Return numbers in [0, 1), ``[R, P]`` float64.

    Args:
        streams: of each row.
        firsts: position in its sequence of each row's first draw.
        places: how many follow one another.
        device: of the result.
    """

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device).reshape(-1, 1)

    seeds = column([each.seed for each in streams])
    samples = column([each.sample for each in streams])
    prompts = column([each.prompt for each in streams])
    place_RP = column(firsts) + torch.arange(places, device=device)
    counter = place_RP & _LOW, place_RP >> 32, samples, prompts
    high, low, *_ = philox4x32(counter, (seeds & _LOW, seeds >> 32))
    # The 53 bits that float64 has.
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def gathers(options: Options, split: VocabParallelProjection) -> bool:
    """Whether tokens are chosen from the logits of all words, rather than from the best of each."""
    if options.beams > 1:
        return True
    count = 1 if options.temperature == 0.0 else options.top_k or split.vocab_size
    # What is sent of a candidate is as large as four logits.
    return 4 * count >= split.max_local_size


def likeliest(
    values_RV: torch.Tensor, count: int, split: VocabParallelProjection | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values of each row, the largest first, and the words that have them."""
    return largest(values_RV, count) if split is None else split.topk(values_RV, count)


def checked(largest_R1: torch.Tensor, tokens_R1: torch.Tensor) -> torch.Tensor:
    """Return the tokens, ``[R]``; ``NO_TOKEN`` where the largest logit is NaN or infinite."""
    return torch.where(largest_R1.isfinite(), tokens_R1, NO_TOKEN).squeeze(-1)


def draw(
    logits_RV: torch.Tensor,
    draws_R: torch.Tensor,
    options: Options,
    split: VocabParallelProjection | None = None,
) -> torch.Tensor:
    """Return the token that each row's draw picks, ``[R]`` int64, as ``Chooser.choose`` does."""
    words = logits_RV.shape[-1] if split is None else split.vocab_size
    wide_RV = logits_RV.float()
    some = min(options.top_k or words, words)
    if some < words or options.top_p < 1.0:
        left_RK, tokens_RK = likeliest(wide_RV, some, split)
    else:
        left_RK, tokens_RK = wide_RV, None
    # Relative to the largest, which stays 0: a temperature next to 0 makes the others -inf, where
    # a quotient of logits would be infinite and the softmax NaN.
    temperature = max(options.temperature, _LEAST_TEMPERATURE)
    largest_R1 = left_RK.amax(-1, keepdim=True)
    likely_RK = ((left_RK - largest_R1) / temperature).softmax(-1)
    below_RK = likely_RK.cumsum(-1, dtype=torch.float64)
    if options.top_p < 1.0:
        # A token stays unless those before it have enough together: the first one always does.
        likely_RK = likely_RK.masked_fill(below_RK - likely_RK >= options.top_p, 0.0)
        below_RK = likely_RK.cumsum(-1, dtype=torch.float64)
    wanted_R1 = (draws_R * below_RK[:, -1]).unsqueeze(-1)
    picked_R1 = torch.searchsorted(below_RK, wanted_R1, right=True).clamp_(max=some - 1)
    found_R1 = picked_R1 if tokens_RK is None else tokens_RK.gather(-1, picked_R1)
    return checked(largest_R1, found_R1)


def seen_by(prompts: Sequence[torch.Tensor], words: int, device: torch.device) -> torch.Tensor:
    """Return which words each prompt has, ``[R, V]`` bool."""
    seen_RV = torch.zeros(len(prompts), words, dtype=torch.bool, device=device)
    for row, each in enumerate(prompts):
        seen_RV[row, each.to(device)] = True
    return seen_RV


def penalised(
    scores_RV: torch.Tensor, seen_RV: torch.Tensor | None, penalty: float
) -> torch.Tensor:
    """Return scores of which those of words that were seen are less."""
    if seen_RV is None:
        return scores_RV
    less_RV = torch.where(scores_RV < 0, scores_RV * penalty, scores_RV / penalty)
    return torch.where(seen_RV, less_RV, scores_RV)

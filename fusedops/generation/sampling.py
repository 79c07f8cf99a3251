"""The next token, given the logits: the most probable one, or one that is sampled.

Draws are counter-based: the key of Philox is the seed, its counter the position of the new token,
the number of the sample and the number of the prompt. A draw depends on nothing else, and the
streams of two prompts or samples are independent. A draw picks from the cumulative probabilities of
the tokens that are kept, the most probable first.

Where ``tp`` shards the vocabulary, the top tokens are found among the top tokens of each shard:
logits are not gathered, unless all of them are sampled from.

Letters of shapes: R rows, V vocabulary, K tokens that are kept, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedops._core.device_tensors import device_tensor
from fusedops._core.philox import philox4x32
from fusedops.generation.options import Options
from fusedops.parallel.tensor.vocabulary import VocabParallelProjection, largest

_LOW = 0xFFFFFFFF
# Positions whose random numbers are drawn at once: it takes a hundred small operations.
_POSITIONS = 256
# The token where the logits leave none to choose: every rank gets it with the tokens.
NO_TOKEN = -2
_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny  # what is less is 0 in float32


class Sampler:
    """The next tokens of some rows.

    Args:
        options: temperature and the like.
        prompts: the tokens of each row so far, int64.
        streams: of random numbers, one for each row, as of ``Options.stream``.
        vocab_size: of the whole vocabulary.
        device: of the logits.
        projection: of the shard of the vocabulary whose logits a rank has; ``None``: of all.
    """

    def __init__(
        self,
        options: Options,
        prompts: Sequence[torch.Tensor],
        streams: Sequence[tuple[int, int, int]],
        vocab_size: int,
        device: torch.device,
        projection: VocabParallelProjection | None = None,
    ) -> None:
        self._options, self._projection = options, projection
        self._lengths_R = device_tensor([len(prompt) for prompt in prompts], torch.int64, device)
        self._streams_R3 = device_tensor(streams, torch.int64, device).reshape(-1, 3)
        self._rows = torch.arange(len(prompts), device=device)
        self._step = 0
        self._drawn = torch.empty(len(prompts), 0, dtype=torch.float64, device=device)
        self._seen = tokens_seen(prompts, options, vocab_size, device)

    @torch.no_grad()
    def select(self, rows: torch.Tensor) -> None:
        """Continue with these rows."""
        self._lengths_R, self._streams_R3 = self._lengths_R[rows], self._streams_R3[rows]
        self._drawn = self._drawn[rows]
        self._rows = self._rows[: len(rows)]
        if self._seen is not None:
            self._seen = self._seen[rows]

    @torch.no_grad()
    def sample(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the next token of each row, ``[R]`` int64; ``NO_TOKEN`` where none can be chosen.

        Args:
            logits_RV: after the rows so far; with ``projection`` of this rank's shard alone.
        """
        options, seen_RV = self._options, self._seen
        if seen_RV is not None:
            if self._projection is not None:
                vocab = self._projection.vocab
                seen_RV = seen_RV[:, vocab.start : vocab.stop]
            logits_RV = penalized(logits_RV.float(), seen_RV, options.repetition_penalty)
        if options.temperature == 0.0:
            tokens_R = or_no_token(*top_tokens(logits_RV, 1, self._projection))
        else:
            tokens_R = draw(logits_RV, self._draws(), options, self._projection)
        self._step += 1
        if self._seen is not None:
            self._seen[self._rows, tokens_R] = True
        return tokens_R

    def _draws(self) -> torch.Tensor:
        """Return the draws of this step, ``[R]``."""
        index = self._step % _POSITIONS
        if index == 0:
            self._drawn = uniforms(self._streams_R3, self._lengths_R + self._step, _POSITIONS)
        return self._drawn[:, index]


def uniforms(streams_R3: torch.Tensor, first_R: torch.Tensor, positions: int) -> torch.Tensor:
    """Return numbers in [0, 1), ``[R, P]`` float64.

    Args:
        streams_R3: seed, prompt and sample of each row, int64.
        first_R: position in its sequence of each row's first draw, int64.
        positions: number of consecutive draws of each row.
    """
    seed_R1, prompt_R1, sample_R1 = streams_R3.split(1, -1)
    position_RP = first_R.unsqueeze(-1) + torch.arange(positions, device=first_R.device)
    counter = position_RP & _LOW, position_RP >> 32, sample_R1, prompt_R1
    high, low, *_ = philox4x32(counter, (seed_R1 & _LOW, seed_R1 >> 32))
    # The 53 bits that float64 has.
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def gathers_logits(options: Options, projection: VocabParallelProjection | None) -> bool:
    """Whether ranks need all logits, rather than choose from the top tokens of each shard."""
    if options.beams > 1 or projection is None:
        return True
    count = 1 if options.temperature == 0.0 else options.top_k or projection.vocab_size
    # What is sent of a candidate is as large as four logits.
    return 4 * count >= projection.max_local_size


def top_tokens(
    values_RV: torch.Tensor, count: int, projection: VocabParallelProjection | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values of each row, the largest first, and their tokens."""
    if projection is None:
        return largest(values_RV, count)
    return projection.topk(values_RV, count)


def or_no_token(largest_R1: torch.Tensor, tokens_R1: torch.Tensor) -> torch.Tensor:
    """Return the tokens, ``[R]``; ``NO_TOKEN`` where the largest logit is NaN or infinite."""
    return torch.where(largest_R1.isfinite(), tokens_R1, NO_TOKEN).squeeze(-1)


def draw(
    logits_RV: torch.Tensor,
    draws_R: torch.Tensor,
    options: Options,
    projection: VocabParallelProjection | None = None,
) -> torch.Tensor:
    """Return the token that each row's draw picks, ``[R]`` int64, as ``Sampler.sample`` does."""
    vocab_size = logits_RV.shape[-1] if projection is None else projection.vocab_size
    wide_RV = logits_RV.float()
    count = min(options.top_k or vocab_size, vocab_size)
    if count < vocab_size or options.top_p < 1.0:
        kept_RK, tokens_RK = top_tokens(wide_RV, count, projection)
    else:
        kept_RK, tokens_RK = wide_RV, None
    # Relative to the largest, which stays 0: a temperature next to 0 makes the others -inf, where
    # a quotient of logits would be infinite and the softmax NaN.
    temperature = max(options.temperature, _LEAST_TEMPERATURE)
    largest_R1 = kept_RK.amax(-1, keepdim=True)
    probs_RK = ((kept_RK - largest_R1) / temperature).softmax(-1)
    cumulative_RK = probs_RK.cumsum(-1, dtype=torch.float64)
    if options.top_p < 1.0:
        # A token stays unless those before it have enough together: the first one always does.
        probs_RK = probs_RK.masked_fill(cumulative_RK - probs_RK >= options.top_p, 0.0)
        cumulative_RK = probs_RK.cumsum(-1, dtype=torch.float64)
    target_R1 = (draws_R * cumulative_RK[:, -1]).unsqueeze(-1)
    picked_R1 = torch.searchsorted(cumulative_RK, target_R1, right=True).clamp_(max=count - 1)
    sampled_R1 = picked_R1 if tokens_RK is None else tokens_RK.gather(-1, picked_R1)
    return or_no_token(largest_R1, sampled_R1)


def tokens_seen(
    prompts: Sequence[torch.Tensor], options: Options, vocab_size: int, device: torch.device
) -> torch.Tensor | None:
    """Return which tokens each prompt has, ``[R, V]`` bool; ``None`` without a penalty for them."""
    if options.repetition_penalty == 1.0:
        return None
    seen_RV = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        seen_RV[row, prompt.to(device)] = True
    return seen_RV


def penalized(
    scores_RV: torch.Tensor, seen_RV: torch.Tensor | None, penalty: float
) -> torch.Tensor:
    """Return scores with those of tokens that were seen reduced."""
    if seen_RV is None:
        return scores_RV
    reduced_RV = torch.where(scores_RV < 0, scores_RV * penalty, scores_RV / penalty)
    return torch.where(seen_RV, reduced_RV, scores_RV)

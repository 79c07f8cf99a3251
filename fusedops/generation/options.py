"""Options and results of ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fusedops._core import checks

_OP = "generate"
_MOST_SAMPLES = 2**16
# What logits in float32 may be divided by or multiplied with, and stay finite and apart.
_LARGEST_PENALTY = 2**16
# Any length to this power is a number in float64.
_LARGEST_EXPONENT = 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """How tokens are chosen, and when a sequence ends.

    Attributes:
        tokens: new ones of each sequence, at most.
        temperature: of the softmax that tokens are drawn from; 0: always the likeliest one.
        top_k: draw from this number of likeliest tokens; 0: from all.
        top_p: draw from the fewest likeliest tokens whose probabilities sum to at least this.
        repetition_penalty: for tokens that are in the sequence already, prompt included: divides
            their logits that are positive and multiplies the others.
        seed: of the draws. An int is the seed of the batch: each prompt draws from a stream of its
            own by its number, so that equal prompts get different texts. A list has one seed for
            each prompt, which then draws what it would draw as the only prompt with that seed.
        samples: how many sequences of each prompt.
        beams: sequences of a prompt that are continued; the likeliest is the result.
        length_penalty: exponent of the length that divides the log-probability of a finished beam.
        stop: tokens that end a sequence, as its last token.
        until: called after each token with the sequence's number and its new tokens; true ends it.

    Raises:
        ValueError: a value is out of range, or two exclude each other.
        TypeError: one has the wrong type.
    """

    tokens: int = 100
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | Sequence[int] = 0
    samples: int = 1
    beams: int = 1
    length_penalty: float = 1.0
    stop: Sequence[int] = ()
    until: Callable[[int, list[int]], bool] | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "samples", "beams"):
            checks.integer(_OP, name, getattr(self, name), least=1)
        checks.integer(_OP, "top_k", self.top_k, least=0)
        checks.finite(_OP, "temperature", self.temperature, least=0)
        checks.probability(_OP, "top_p", self.top_p)
        checks.positive(_OP, "repetition_penalty", self.repetition_penalty)
        checks.finite(_OP, "length_penalty", self.length_penalty)
        if not isinstance(self.seed, int):
            expected = "an int, or one of each prompt"
            object.__setattr__(self, "seed", _listed("seed", expected, self.seed))
        object.__setattr__(self, "stop", _listed("stop", "tokens, such as [2]", self.stop))
        for seed in [self.seed] if isinstance(self.seed, int) else self.seed:
            checks.integer(_OP, "seed", seed, least=0)
        for token in self.stop:
            checks.integer(_OP, "stop", token, least=0)
        if self.until is not None and not callable(self.until):
            checks.fail_type(_OP, "until", "callable", self.until)
        for is_wrong, name, expected in self._relations():
            if is_wrong:
                checks.fail(_OP, name, expected, getattr(self, name))

    def _relations(self) -> Iterator[tuple[bool, str, str]]:
        """Yield whether a value is too large, or has no effect, its name, and what it must be."""
        most = _LARGEST_PENALTY
        is_far = not 1 / most <= self.repetition_penalty <= most
        yield is_far, "repetition_penalty", f"between 1 / {most} and {most}"
        most = _LARGEST_EXPONENT
        yield abs(self.length_penalty) > most, "length_penalty", f"between -{most} and {most}"
        yield self.top_p == 0, "top_p", "more than 0"
        yield self.samples > _MOST_SAMPLES, "samples", f"at most {_MOST_SAMPLES}"
        for name, plain in (("temperature", 0), ("samples", 1), ("until", None)):
            is_set = self.beams > 1 and getattr(self, name) != plain
            yield is_set, name, f"{plain} with beams, of which the likeliest is kept"
        for name, unset in (("top_k", 0), ("top_p", 1.0), ("samples", 1)):
            is_set = self.temperature == 0 and getattr(self, name) != unset
            yield is_set, name, f"{unset} unless temperature is more than 0: nothing is drawn"

    def stream(self, prompt: int, sample: int) -> tuple[int, int, int]:
        """Return seed, prompt and sample that determine the random numbers of a sequence."""
        if isinstance(self.seed, int):
            return self.seed, prompt, sample
        return self.seed[prompt], 0, sample


def _listed(name: str, expected: str, given: Any) -> tuple[Any, ...]:
    """Return ``given`` as a tuple; an iterator is consumed."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        checks.fail_type(_OP, name, expected, given)
    return tuple(given)


class NonFiniteLogitsError(ArithmeticError):
    """The logits of a model leave no token to choose: the largest is NaN or infinite.

    Attributes:
        prompt: number of the prompt, from 0 on.
        position: in its sequence, of the token that could not be chosen; the prompt's come first.
    """

    def __init__(self, prompt: int, position: int) -> None:
        super().__init__(
            f"{_OP}: the logits of the model must be finite, got NaN or an infinity for prompt "
            f"{prompt} at position {position} of its sequence"
        )
        self.prompt, self.position = prompt, position


class Token(NamedTuple):
    """A new token of a sequence.

    Attributes:
        sequence: the one that the token extends: ``prompt * samples + sample``.
        token: the id.
        reason: why it ends its sequence: ``"stop"``, ``"until"`` or ``"length"``;
            ``None``: it does not.
    """

    sequence: int
    token: int
    reason: str | None


class Generated(NamedTuple):
    """A sequence that is done.

    Attributes:
        prompt: number of the prompt that it continues.
        tokens: the new ones.
        reason: why it ended: ``"stop"``, ``"until"`` or ``"length"``.
        score: of beams: the log-probability of the new tokens, divided by their number to the power
            of ``length_penalty``; else ``None``.
    """

    prompt: int
    tokens: list[int]
    reason: str
    score: float | None = None

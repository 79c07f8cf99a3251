"""``RopeScaling``: how rotary positions are stretched for long sequences.

The kinds are those of transformers (``ROPE_INIT_FUNCTIONS``); ``attention_core.py`` computes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from fusedops._core import checks

# The fields that each kind has.
KINDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_seq_len"),
    "yarn": (
        *("factor", "original_seq_len", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        *("factor", "original_seq_len", "attention_factor"),
        *("short_factors", "long_factors"),
    ),
}
_POSITIVE = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotations are stretched for sequences longer than a model was first trained on.

    * ``"linear"`` divides all frequencies by ``factor``; ``"dynamic"`` (NTK) enlarges the base
      where a call has more than the model's ``seq_len`` tokens.
    * ``"llama3"``: wave lengths above ``original_seq_len / low_freq_factor`` tokens grow by
      ``factor``, those below ``original_seq_len / high_freq_factor`` stay, and between them a
      straight line leads from one to the other.
    * ``"yarn"``: frequencies that make fewer than ``beta_slow`` rotations in ``original_seq_len``
      tokens are divided by ``factor``, those of more than ``beta_fast`` stay, and a straight line
      over their indices leads from one to the other.
    * ``"longrope"`` divides each frequency by a number of its own, another where a call has more
      than ``original_seq_len`` tokens.

    Attributes:
        kind: one of these.
        factor: how many times longer.
        low_freq_factor: waves of the first training length from which on none grows.
        high_freq_factor: waves of it below which all grow.
        original_seq_len: tokens of the sequences of the first training.
        attention_factor: of cosines and sines; ``None``: for yarn ``m(factor, mscale) / m(factor,
            mscale_all_dim)`` with ``m(s, x) = 0.1 x log(s) + 1``, or ``m(factor, 1)`` unless both
            are given; for longrope ``sqrt(1 + log(factor) / log(original_seq_len))``.
        beta_fast: rotations in the first training length; ``beta_slow`` as well.
        mscale: see ``attention_factor``; 0: not given.
        mscale_all_dim: see ``attention_factor``; a model with latent attention also multiplies its
            scores by ``m(factor, mscale_all_dim) ** 2``.
        truncate: whether the indices of the two bounds of yarn are rounded to integers.
        short_factors: of longrope, one for each frequency; ``long_factors`` for long sequences.

    Raises:
        ValueError: the kind is unknown or does not have a field, a factor is not positive, or the
            two bounds are not in order.
        TypeError: a value has the wrong type.

    Reference:
        The Llama 3 Herd of Models, arXiv:2407.21783; Peng et al.: YaRN, arXiv:2309.00071; Ding et
        al.: LongRoPE, arXiv:2402.13753.
    """

    kind: str = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        op = "RopeScaling"
        checks.choice(op, "kind", self.kind, KINDS)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("kind", *KINDS[self.kind]) and value != field.default:
                checks.fail(op, field.name, f"left out with kind {self.kind!r}", value)
        for name in _POSITIVE:
            checks.positive(op, name, getattr(self, name))
        for name in ("mscale", "mscale_all_dim"):
            checks.finite(op, name, getattr(self, name), least=0)
        checks.integer(op, "original_seq_len", self.original_seq_len, least=1)
        checks.flag(op, "truncate", self.truncate)
        if self.attention_factor is not None:
            checks.positive(op, "attention_factor", self.attention_factor)
        for name in ("short_factors", "long_factors"):
            factors = tuple(getattr(self, name))
            for factor in factors:
                checks.positive(op, name, factor)
            object.__setattr__(self, name, factors)
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                expected = f"above {low}, {getattr(self, low)}"
                checks.fail(op, high, expected, getattr(self, high))

    @property
    def needs_length(self) -> bool:
        """Whether frequencies depend on the number of tokens of a call."""
        return self.kind in ("dynamic", "longrope")

    @property
    def table_factor(self) -> float:
        """The factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            if self.mscale and self.mscale_all_dim:
                return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
            return self._magnitude(1.0)
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_seq_len))
        return 1.0

    @property
    def score_factor(self) -> float:
        """The factor of the scores of latent attention, in addition."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _magnitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

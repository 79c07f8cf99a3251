"""Small models with presets' architectures, and ways of running one that are compared by turns."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fusedops.bench import machine
from fusedops.models import TransformerConfig, preset
from fusedops.terminal import files


@dataclass(frozen=True)
class SmallModel:
    """A preset's model of another size, without dropout."""

    preset: str  # its other choices and the ratio of its feed-forward layer stay
    hidden_size: int  # width; heads have 64, and four share a key head where the preset's share one
    num_layers: int  # layers
    vocab_size: int  # words

    def config(self, seq_len: int) -> TransformerConfig:
        """Return the model for sequences of ``seq_len`` tokens."""
        config = preset(self.preset)
        ratio = config.intermediate_size / config.hidden_size
        heads = self.hidden_size // 64
        return replace(
            config,
            hidden_size=self.hidden_size,
            intermediate_size=round(ratio * self.hidden_size / 16) * 16,
            num_layers=self.num_layers,
            num_heads=heads,
            num_kv_heads=None if config.num_kv_heads is None else max(1, heads // 4),
            head_dim=None,
            vocab_size=self.vocab_size,
            seq_len=seq_len,
            dropout=0.0,
            attention_dropout=0.0,
        )


class InterleavedRow:
    """A row of one of several ways that are measured alternately: of generation, or of scaling."""

    seconds: list[float]  # of each turn
    ratios: list[float]  # of the seconds of the way that is compared with, turn by turn

    @property
    def tokens_of_turn(self) -> int:
        """How many tokens a turn takes, of all sequences together."""
        raise NotImplementedError

    @property
    def tokens_per_second(self) -> float:
        """The median."""
        return self.tokens_of_turn / statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)

    @property
    def shown_ratio(self) -> str:
        """The median, the least and the largest."""
        return f"{self.ratio:.2f} ({min(self.ratios):.2f}-{max(self.ratios):.2f})"


def save_rows(path: str | os.PathLike[str], rows: Iterable[Any], **head: Any) -> None:
    """Write this machine, ``head`` and rows of generation, or of scaling, as JSON."""
    records = [
        asdict(row) | {"tokens_per_second": row.tokens_per_second, "ratio": row.ratio}
        for row in rows
    ]
    here = machine.describe(torch.device("cpu"))
    files.write_json(path, here | head | {"rows": records})

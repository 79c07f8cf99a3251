"""Presets' architectures in the sizes that a benchmark asks for."""

from __future__ import annotations

from dataclasses import replace

from fusedops.models import TransformerConfig, preset


def small_model(
    name: str, *, hidden_size: int, num_layers: int, vocab_size: int, seq_len: int
) -> TransformerConfig:
    """Return a preset's model of another size, without dropout.

    Args:
        name: of the preset; its other choices and the ratio of its feed-forward layer stay.
        hidden_size: width; heads have 64, and four share a key head where the preset's share one.
        num_layers: layers.
        vocab_size: words.
        seq_len: positions.
    """
    config = preset(name)
    ratio = config.intermediate_size / config.hidden_size
    heads = hidden_size // 64
    return replace(
        config,
        hidden_size=hidden_size,
        intermediate_size=round(ratio * hidden_size / 16) * 16,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=None if config.num_kv_heads is None else max(1, heads // 4),
        head_dim=None,
        vocab_size=vocab_size,
        seq_len=seq_len,
        dropout=0.0,
        attention_dropout=0.0,
    )

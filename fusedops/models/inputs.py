"""The tensors that a model is called with: ``MicroBatch``, and checks of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fusedops._core import checks
from fusedops.models.config import TransformerConfig


class MicroBatch(NamedTuple):
    """A process's part of a micro-batch, as ``Transformer`` takes it.

    All are ``[B, S / cp]``; positions, which are those in the whole sequence, may be ``[S / cp]``.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None
    positions: torch.Tensor
    document_ids: torch.Tensor | None
    domains: torch.Tensor | None = None

    def inputs(self) -> dict[str, Any]:
        """Return what ``Transformer`` takes by name: all but tokens and labels."""
        return dict(zip(self._fields[2:], self[2:], strict=True))


def check_inputs(
    config: TransformerConfig, tokens: torch.Tensor, inputs: Mapping[str, Any]
) -> None:
    """Raise unless these are tokens of the model and what belongs to them, ``inputs`` by name."""
    name = "Transformer"
    positions, domains = inputs.get("positions"), inputs.get("domains")
    if (domains is None) == bool(config.domain_experts):
        expected = "given with" if config.domain_experts else "None without"
        got = "None" if domains is None else "a tensor"
        checks.fail(name, "domains", f"{expected} domain_experts", got)
    checks.index_tensor(name, "tokens", tokens, dtypes=(torch.int64,))
    if tokens.dim() != 2:
        checks.fail(name, "tokens", "of shape [B, S]", list(tokens.shape))
    for argument in ("labels", "document_ids", "token_types", "domains"):
        value = inputs.get(argument)
        if value is not None:
            checks.index_tensor(name, argument, value, dtypes=(torch.int64, torch.int32))
            checks.shape(name, argument, value, tokens.shape, "that of tokens")
    length = tokens.shape[1]
    if positions is not None:
        checks.index_tensor(name, "positions", positions, dtypes=(torch.int64,))
        if positions.shape not in (tokens.shape, tokens.shape[1:]):
            expected = f"of shape [{length}] or {list(tokens.shape)}, that of tokens"
            checks.fail(name, "positions", expected, list(positions.shape))
        if config.position_tables:
            expected = f"from 0 to {config.seq_len - 1}, the table of positions"
            checks.indices(name, "positions", positions, config.seq_len, expected)
    elif config.position_tables and length > config.seq_len:
        expected = f"of at most {config.seq_len} tokens a sequence, the table of positions"
        checks.fail(name, "tokens", expected, length)
    expected = f"from 0 to {config.vocab_size - 1}, the words of the vocabulary"
    checks.indices(name, "tokens", tokens, config.vocab_size, expected)

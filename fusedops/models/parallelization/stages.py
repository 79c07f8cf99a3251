"""A transformer cut into stages of a pipeline: which parts of it a process keeps.

A process keeps one ``Transformer`` of which parts are missing, and a ``Stage`` for each run of
layers in it, made of the same modules: parameters have the names that they have in the whole model,
so that checkpoints do not know where a model was cut. Embedding and head go with the first and the
last stage; where they share a weight the last one has the table of words as well.

Letters of shapes as in ``transformer.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fusedops.models.transformer import Loss, Transformer


class Stage(Transformer):
    """A run of layers, with what stands before the first and behind the last of the model.

    Args:
        model: of which it has parts.
        layers: the numbers of its layers.
    """

    def __init__(self, model: Transformer, layers: range) -> None:
        nn.Module.__init__(self)
        self.config, self.place = model.config, model.place
        self.is_first, self.is_last = 0 in layers, model.config.num_layers - 1 in layers
        absent: Any = None
        keeps_words = self.is_first or (self.is_last and model.config.tied)
        self.embedding = model.embedding if keeps_words else absent
        self.layers = nn.ModuleDict({str(each): model.layers[str(each)] for each in layers})
        self.norm = model.norm if self.is_last else absent
        self.query_positions = model.query_positions if self.is_last else None
        self.head = model.head if self.is_last else absent
        self.train(model.training)

    def forward(  # type: ignore[override]
        self,
        given: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        positions: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        domains: torch.Tensor | None = None,
        seed: torch.Tensor | None = None,
        first_sequence: int | None = None,
    ) -> tuple[torch.Tensor | None, Loss]:
        """Return what the next stage gets, and this stage's part of the loss.

        Args:
            given: tokens ``[B, S]`` of the first stage, else the hidden states ``[B, S, H]``.
            labels: ``[B, S]``, which the last stage reads; ``None``: there is no loss.
            positions: ``[S]`` or ``[B, S]``.
            document_ids: ``[B, S]``, or ``None``.
            tokens: ``[B, S]``, of which hash layers choose experts.
            domains: ``[B, S]``, or ``None``.
            seed: as of ``Transformer``, the same for all stages.
            first_sequence: likewise.

        Returns:
            Hidden states, ``None`` of the last stage, whose ``Loss`` has a total; without labels
            its logits.
        """
        shape = (given.shape[0], positions.shape[-1])
        drawn = self.draws(shape, given.device, seed, first_sequence)
        x_BSH = given
        if self.is_first:
            first = None if drawn is None else drawn.of_embedding()
            x_BSH = self.embedding(given, positions, seed=first)
        x_BSH, auxiliary = self.through(x_BSH, positions, document_ids, tokens, domains, drawn)
        found = self.leave(x_BSH, labels) if self.is_last else x_BSH
        if self.is_last and labels is not None:
            return None, Loss(found, (labels != -100).sum(), auxiliary)
        nothing = torch.zeros((), device=x_BSH.device)
        return found, Loss(nothing, torch.zeros_like(nothing, dtype=torch.int64), auxiliary)


def cut(model: Transformer, layers: Sequence[range]) -> list[Stage]:
    """Take from a model what is of no stage here; return the stages.

    Args:
        model: whole; changed in place.
        layers: of each stage of this process, in their order.
    """
    last = model.config.num_layers - 1
    here = {str(each) for some in layers for each in some}
    is_first = any(0 in each for each in layers)
    is_last = any(last in each for each in layers)
    part: Any = model
    for name in [each for each in model.layers if each not in here]:
        del part.layers[name]
    if not is_first and is_last and model.config.tied:
        for name in ("positions", "token_types", "norm"):
            setattr(part.embedding, name, None)
    elif not is_first:
        part.embedding = None
    if not is_last:
        part.norm = part.query_positions = part.head = None
    return [Stage(model, each) for each in layers]

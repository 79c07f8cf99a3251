"""Attention of a model whose sequences are sharded over a group: its argument ``attend``."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fusedops._core import checks
from fusedops.parallel.context._checks import check_group
from fusedops.parallel.context.all_to_all import ulysses_attention
from fusedops.parallel.context.ring import ring_attention
from fusedops.parallel.context.shards import unshard_sequence

KINDS = {"ring": ring_attention, "all_to_all": ulysses_attention}


def context_core(
    group: dist.ProcessGroup, kind: str = "ring", *, balance: str = "zigzag"
) -> ContextCore:
    """Return the core of attention for shards of sequences; one serves all layers of a model.

    Args:
        group: of the ranks that share each sequence.
        kind: ``"ring"`` (``ring_attention``) or ``"all_to_all"`` (``ulysses_attention``).
        balance: of ``shard_sequence``, which cut the batch: ``"zigzag"`` or ``"contiguous"``.

    Raises:
        ValueError: ``kind`` or ``balance`` is none of these.
        TypeError: ``group`` is no process group.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from fusedops.models import Transformer, preset
        >>> from fusedops.parallel import context_core
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model, core = Transformer(preset("tiny-llama")), context_core(dist.group.WORLD)
        >>> logits = model(torch.arange(8)[None], attend=core)
        >>> dist.destroy_process_group()
    """
    check_group("context_core", group)
    checks.choice("context_core", "kind", kind, KINDS)
    checks.choice("context_core", "balance", balance, ("zigzag", "contiguous"))
    return ContextCore(group, kind, balance)


class ContextCore:
    """Attention between the tokens of sequences that a group shares; made by ``context_core``."""

    def __init__(self, group: dist.ProcessGroup, kind: str, balance: str) -> None:
        self.group, self.kind, self.balance = group, kind, balance
        self._known: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        documents: Any = None,
        **options: Any,
    ) -> Tensor:
        """Return ``[B, H, S / n, D]``, for queries of that shape.

        ``documents.ids_BS`` are the documents of this rank's tokens ``[B, S / n]``: neighbours in
        the sequence that have one id attend each other. ``options`` are those of
        ``ring_attention``.
        """
        return KINDS[self.kind](
            query,
            key,
            value,
            self.group,
            balance=self.balance,
            cu_seqlens=None if documents is None else self._ends(documents),
            enable_gqa=True,
            **options,
        )

    def _ends(self, documents: Any) -> Tensor:
        """Return where documents end in the batch: gathered once for all layers of a step."""
        if documents not in self._known:
            ids = unshard_sequence(documents.ids_BS, self.group, balance=self.balance).cpu()
            begins = torch.ones_like(ids, dtype=torch.bool)
            begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
            ends = begins.flatten().nonzero().flatten()
            self._known[documents] = torch.cat([ends, ends.new_tensor([ids.numel()])])
        return self._known[documents]

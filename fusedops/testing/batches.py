"""Batches of tokens: ordinary ones, and those on which sharded code goes wrong.

| workload | what it is | what it finds |
|---|---|---|
| ``random`` | tokens at random, a tenth of the targets ignored | |
| ``ignored_rows`` | no target in the second half of the sequences | means of data ranks' means |
| ``ignored_tail`` | no target in the second half of each sequence | the same over context ranks |
| ``one_target`` | a single target in the whole batch | ranks that divide by no targets |
| ``no_target`` | none at all | 0 / 0 |
| ``same_token`` | one token everywhere: all go to the same experts | empty experts |
| ``documents`` | packed sequences; one document is empty, one a single token | masks |
"""

from __future__ import annotations

import torch

from fusedops._core.labels import IGNORE_INDEX
from fusedops.testing.case import Case

WORKLOADS = (
    "random",
    "ignored_rows",
    "ignored_tail",
    "one_target",
    "no_target",
    "same_token",
    "documents",
)

Batch = dict[str, torch.Tensor]


def token_batch(case: Case, generator: torch.Generator, vocab_size: int) -> Batch:
    """Return ``tokens``, ``labels`` and, for packed ones, ``document_ids``: int64 ``[B, S]``."""
    shape = (case.batch_size, case.seq_len)
    tokens = torch.randint(0, vocab_size, shape, generator=generator)
    labels = torch.randint(0, vocab_size, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.1] = IGNORE_INDEX
    batch = {"tokens": tokens, "labels": labels}
    if case.workload == "ignored_rows":
        labels[(case.batch_size + 1) // 2 :] = IGNORE_INDEX
    elif case.workload == "ignored_tail":
        labels[:, (case.seq_len + 1) // 2 :] = IGNORE_INDEX
    elif case.workload == "one_target":
        kept = int(tokens[0, 0])
        labels.fill_(IGNORE_INDEX)
        labels[-1, -1] = kept
    elif case.workload == "no_target":
        labels.fill_(IGNORE_INDEX)
    elif case.workload == "same_token":
        tokens.fill_(int(tokens[0, 0]))
    elif case.workload == "documents":
        batch["document_ids"] = _documents(shape, generator)
    elif case.workload != "random":
        raise ValueError(f"token_batch: workload must be one of {WORKLOADS}, got {case.workload!r}")
    return batch


def _documents(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Return ids that do not decrease: the first token is a document, and id 1 has no token."""
    starts = torch.rand(shape, generator=generator) < 0.2
    starts[:, :2] = True
    ids = starts.long().cumsum(1) - 1
    return ids + (ids > 0)

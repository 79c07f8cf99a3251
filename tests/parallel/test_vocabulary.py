"""Embedding and loss over a split vocabulary equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_pool import World
from split_layers import assert_same, mesh_of, part_of, parts_of, run, whole
from torch import nn

from fusedops._core import dtypes
from fusedops.nn import LinearCrossEntropyLoss
from fusedops.parallel.comm import collectives
from fusedops.parallel.tensor.layers import distribute, local, to_tensor_parallel
from fusedops.parallel.tensor.vocabulary import (
    VocabParallelProjection,
    VocabularyEmbedding,
    vocab_parallel_cross_entropy,
)

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]
B, S, H, V = 2, 8, 12, 23
CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "kept": {"recompute": False, "bias": True},
    "again": {"recompute": True, "chunk_size": 5, "reduction": "sum"},
    "smoothing": {"label_smoothing": 0.2, "reduction": "none", "bias": True},
    "all": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "ignore_index": -1},
    "offset": {"label_smoothing": 0.1, "bias": True, "recompute": True},
    "class_ignored": {"ignore_index": 4},
}


class _SplitLoss(nn.Module):
    """A loss whose vocabulary is split over ranks."""

    def __init__(
        self, plain: LinearCrossEntropyLoss, mesh: Any, sequence: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.group, self.sequence, self.options = mesh.get_group(), sequence, options
        self.weight, self.bias = (
            distribute("loss", name, getattr(plain, name), mesh, 0, uneven=True)
            for name in ("weight", "bias")
        )

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = to_tensor_parallel(hidden, self.group, sequence=self.sequence)
        weight, bias = local(self.weight), local(self.bias)
        return vocab_parallel_cross_entropy(
            x, weight, target, self.group, bias, vocab_size=V, **self.options
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        projection = VocabParallelProjection(self.group, V)
        x = to_tensor_parallel(hidden, self.group, sequence=self.sequence)
        logits = projection.gather_logits(projection.local_logits(x, self.weight, self.bias))
        softcap = self.options.get("softcap")
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _losses(world: World, ranks: int, dtype: torch.dtype) -> None:
    if not world.member(ranks):
        return
    mesh = mesh_of(world, ranks)
    hidden = torch.randn(B, S, H).to(dtype)
    target = torch.randint(V, (B, S))
    target[0, 0], target[0, 1], target[1, 3] = 0, V - 1, 4
    for name, options in CASES.items():
        plain = LinearCrossEntropyLoss(H, V, dtype=dtype, **options)
        if name == "offset":
            with torch.no_grad():
                plain.bias += 1e6
        labels = target.clone()
        labels[1, :2] = plain.ignore_index
        exact = LinearCrossEntropyLoss(H, V, dtype=dtype, **options)
        exact.load_state_dict(plain.state_dict())
        exact.double()
        eager, truth = run(plain, hidden, 1 / 3, labels), run(exact, hidden.double(), 1 / 3, labels)
        for sequence in (False, True):
            given = {name: value for name, value in options.items() if name != "bias"}
            split = _SplitLoss(plain, mesh, sequence, **given)
            mine = part_of(hidden, world, ranks, 1) if sequence else hidden
            parts = ["input"] if sequence else []
            found = run(split, mine, 1 / 3, labels)
            assert found["output"].dtype == dtypes.statistics_dtype(dtype)
            assert_same(found, *(parts_of(each, world, ranks, parts) for each in (eager, truth)), V)
            logits = split.logits(mine)
            if not sequence:
                expected = plain.logits(hidden)
                assert_same({"": logits}, {"": expected}, {"": exact.logits(hidden.double())}, H)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_split_losses_equal_the_whole_ones(
    on_ranks: OnRanks, ranks: int, dtype: torch.dtype
) -> None:
    """23 words on 2 and 4 ranks: the last has fewer."""
    on_ranks(_losses, ranks, dtype)


def _embeddings(world: World, ranks: int) -> None:
    if not world.member(ranks):
        return
    mesh = mesh_of(world, ranks)
    tokens = torch.randint(V, (B, S))
    tokens[0, :3] = torch.tensor([0, V - 1, 3])
    for padding in (None, 3, V - 1):
        plain = nn.Embedding(V, H, padding_idx=padding)
        grad = torch.randn(B, S, H)
        output = plain(tokens)
        output.backward(grad)
        for sequence in (False, True):
            split = VocabularyEmbedding.of(plain, mesh, sequence=sequence)
            found = split(tokens)
            if sequence:
                assert torch.equal(found, part_of(output, world, ranks, 1))
                found.backward(part_of(grad, world, ranks, 1))
            else:
                assert torch.equal(found, output)
                found.backward(grad)
            assert torch.equal(whole(split.weight.grad), plain.weight.grad)
        with pytest.raises(ValueError, match=r"tokens must be in \[0, 23\), got 23"):
            split(tokens + 1 + V - 1 - int(tokens.max()))


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_embeddings_give_the_same_bits(on_ranks: OnRanks, ranks: int) -> None:
    on_ranks(_embeddings, ranks)


def _loss_traffic(world: World) -> Any:
    if not world.member(2):
        return None
    head = LinearCrossEntropyLoss(H, V)
    split = _SplitLoss(head, mesh_of(world, 2))
    hidden = torch.randn(B, S, H, requires_grad=True)
    with collectives.recorded() as forward:
        loss = split(hidden, torch.zeros(B, S, dtype=torch.int64))
    with collectives.recorded() as backward:
        loss.backward()
    return forward, backward


def test_a_loss_sends_four_numbers_a_token(on_ranks: OnRanks) -> None:
    forward, backward = on_ranks(_loss_traffic)[0]
    assert forward.counts() == {"all_gather": 1}
    assert forward.bytes() == 16 * B * S
    assert backward.counts() == {"all_reduce": 1}
    assert backward.bytes() == B * S * H * 4


def _bad_input(world: World) -> None:
    if not world.member(2):
        return
    mesh = mesh_of(world, 2)
    head = _SplitLoss(LinearCrossEntropyLoss(H, V), mesh)
    target = torch.zeros(B, S, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"target must be in \[0, 23\) .* got 23 at row 1"):
        target[0, 1] = V
        head(torch.zeros(B, S, H), target)
    with pytest.raises(ValueError, match="size of dim 0 of weight must be enough for the 2 ranks"):
        VocabularyEmbedding.of(nn.Embedding(1, H), mesh)
    with pytest.raises(ValueError, match="max_norm must be off"):
        VocabularyEmbedding.of(nn.Embedding(V, H, max_norm=1.0), mesh)
    with pytest.raises(TypeError, match="module must be a torch.nn.*Embedding, got .*Linear"):
        VocabularyEmbedding.of(nn.Linear(V, H), mesh)  # type: ignore[arg-type]


def test_bad_input_names_what_is_wrong(on_ranks: OnRanks) -> None:
    on_ranks(_bad_input)

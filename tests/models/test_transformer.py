"""Models of every kind: their loss is the cross-entropy of their logits, and training lowers it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops.models import TINY, Loss, Transformer, TransformerConfig


def _tokens(config: TransformerConfig, *shape: int) -> torch.Tensor:
    return torch.randint(config.vocab_size, shape)


@pytest.mark.parametrize("name", TINY)
def test_the_loss_is_the_cross_entropy_of_the_logits(name: str) -> None:
    torch.manual_seed(0)
    model = Transformer(TINY[name])
    tokens, labels = _tokens(model.config, 2, 17), _tokens(model.config, 2, 17)
    labels[0, 3:9] = -100
    loss = model(tokens, labels)
    assert isinstance(loss, Loss) and int(loss.num_tokens) == 28
    wanted = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss.total, wanted)
    sparse = bool(model.config.num_experts)
    assert (loss.auxiliary.item() > 0) is sparse
    (loss.total + loss.auxiliary).backward()
    assert all(each.grad is not None and each.grad.any() for each in model.parameters())


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-pangu-moe"])
def test_training_lowers_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = Transformer(TINY[name])
    optimizer = fusedops.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.arange(4 * 33).reshape(4, 33) % 11
    losses = []
    for _ in range(20):
        found = model(tokens[:, :-1], tokens[:, 1:])
        mean = found.total / found.num_tokens
        (mean + found.auxiliary).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    assert losses[0] > 5.0 and losses[-1] < 1.5


def test_half_precision_sums_the_loss_in_float32() -> None:
    torch.manual_seed(0)
    model = Transformer(TINY["tiny-llama"], dtype=torch.bfloat16)
    tokens = _tokens(model.config, 4, 64)
    loss = model(tokens, tokens)
    wanted = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    rounded = torch.finfo(torch.bfloat16).eps
    assert loss.total.dtype == torch.float32 and loss.total != loss.total.bfloat16()
    torch.testing.assert_close(loss.total / 256, wanted, rtol=rounded, atol=0.0)

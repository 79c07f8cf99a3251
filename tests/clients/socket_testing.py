"""What the tests of the sockets share: a training step to compare, against float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

import fusedops
from fusedops._core import dtypes

Loss = Callable[[nn.Module], torch.Tensor]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of each op inside the block, whichever the backend."""
    calls: Counter[str] = Counter()
    fusedops.reset_counters()
    yield calls
    for (op, _), count in fusedops.counters().items():
        calls[op] += count


def results(model: nn.Module, loss: Loss) -> dict[str, torch.Tensor]:
    """Run one training step; return the loss and every parameter's gradient."""
    model.zero_grad()
    value = loss(model)
    value.backward()
    found = {"loss": value.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.detach().clone()
    return found


def assert_within_budget(
    found: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> None:
    """Compare float32 results with those of another program, both against float64."""
    assert found.keys() == stock.keys() == exact.keys()
    for name, expected in exact.items():
        budget = dtypes.error_budget(stock[name], expected, torch.float32, depth=64)
        excess = ((found[name].double() - expected).abs() - budget).max()
        assert excess <= 0, f"{name}: {excess:.3g} beyond the budget"


def assert_same_training(fused: nn.Module, stock: nn.Module, loss: Loss) -> None:
    """Compare loss and gradients of one step with those of the model without fused ops."""
    found, eager = results(fused, loss), results(stock, loss)
    exact = results(stock.double(), loss)
    stock.float()
    assert_within_budget(found, eager, exact)


def steps(
    model: nn.Module, loss: Callable[[nn.Module, int], torch.Tensor], count: int = 10
) -> list[float]:
    """Train for some steps with AdamW; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def llama() -> nn.Module:
    """Return a small Llama in training, the same at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).train()


def rows(count: int = 40) -> list[dict[str, torch.Tensor]]:
    """Return the rows of ten batches of four."""
    ids = [(torch.arange(16) * 3 + start * 11) % 97 for start in range(count)]
    return [{"input_ids": each, "labels": each} for each in ids]


def assert_same_losses(found: list[float], expected: list[float]) -> None:
    """Compare the losses of ten steps of two programs that should round alike."""
    actual, stock = torch.tensor(found), torch.tensor(expected)
    assert actual.shape == stock.shape == (10,) and stock[-1] < stock[0]
    budget = dtypes.error_budget(stock, stock.double(), torch.float32, depth=1024)
    assert ((actual.double() - stock.double()).abs() <= budget).all(), (found, expected)

"""What the memory tests share: small models, one step of training, and what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from comparing import assert_same_bits
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops import memory
from fusedops.runtime.peak import peak_bytes

VOCAB = 256
CHECKED = memory.OffloadSettings(least_bytes=1, check=True)
BY_OP = memory.recompute(ops=["layer_norm", "add_layer_norm", "aten::tanh"])
POLICIES: dict[str, Callable[[str], list[Any]]] = {
    "recompute": lambda modules: [memory.recompute(modules)],
    "selective": lambda modules: [
        memory.recompute(modules),
        memory.save(ops=["attention", "aten::addmm", "aten::mm"]),
    ],
    "offload": lambda modules: [memory.offload(modules)],
    "both": lambda modules: [memory.recompute(modules), memory.offload(modules)],
    "by op": lambda modules: [BY_OP],
}


def gpt2(*, patched: bool = True, layers: int = 4, hidden: int = 64, **options: Any) -> nn.Module:
    """Return a small GPT-2 in training mode, with its dropouts on."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": 2, "n_positions": 64}
    sizes |= {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**sizes, use_cache=False, **options)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    if patched:
        fusedops.patch(model)
    return model


def encoder(*, layers: int = 3, hidden: int = 32, dropout: float = 0.1) -> nn.Module:
    """Return layers of ours in a row."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            fusedops.nn.TransformerEncoderLayer(hidden, 2, 4 * hidden, dropout, batch_first=True)
            for _ in range(layers)
        )
    )


def tokens(batch: int = 4, length: int = 64) -> torch.Tensor:
    """Return token ids, the same ones each time."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def language_loss(model: nn.Module) -> torch.Tensor:
    """Return the loss of a language model on ``tokens``."""
    ids = tokens()
    return model(input_ids=ids, labels=ids).loss


def encoder_loss(model: nn.Module, size: int = 0) -> torch.Tensor:
    """Return a loss of ``encoder`` on fixed numbers."""
    size = size or next(model.parameters()).shape[-1]
    x = torch.randn(2, 16, size, generator=torch.Generator().manual_seed(1))
    return (model(x) * x.roll(1, -1)).mean()


def step(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
    """Run forward and backward from a fixed seed and return the loss."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    value = loss(model)
    value.backward()
    return value.detach()


def results(
    model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Return the loss and every gradient of a step."""
    found: dict[str, torch.Tensor | None] = {"loss": step(model, loss)}
    for name, parameter in model.named_parameters():
        found[name] = None if parameter.grad is None else parameter.grad.detach().clone()
    return found


def peak(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> int:
    """Return the bytes that a step holds at its peak above what it starts with."""
    model.zero_grad(set_to_none=True)
    return peak_bytes(lambda: step(model, loss), torch.device("cpu"))


def apply(model: nn.Module, policy: str, modules: str = "*") -> None:
    """Give a model one of ``POLICIES``, whose copies are checked."""
    memory.apply(model, memory.Policy(*POLICIES[policy](modules)), offload_settings=CHECKED)


def assert_keeps_bits(
    model: nn.Module,
    loss: Callable[[nn.Module], torch.Tensor],
    rules: Sequence[Any],
    *,
    steps: int = 1,
    settings: memory.OffloadSettings = CHECKED,
) -> None:
    """Give a model a policy and compare its steps with the one before, to the bit."""
    expected = results(model, loss)
    memory.apply(model, memory.Policy(*rules), offload_settings=settings)
    for _ in range(steps):
        assert_same_bits(results(model, loss), expected)


def squared(x: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
    """Return a loss of models of ``x``."""
    return lambda model: model(x).square().sum()


class Count(TorchDispatchMode):
    """Counts calls of operators, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    def collectives(self, kind: str) -> int:
        """Return how often collectives with this part in their names were called."""
        names = [name for name in self.calls if name.startswith(("c10d::", "_c10d_functional::"))]
        return sum(self.calls[name] for name in names if kind in name)

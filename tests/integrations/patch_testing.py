"""What the patch tests share: training steps to compare, against float64, within the budget."""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusedops
from fusedops._core import dtypes
from fusedops.integrations.hf.known_code import known_digests
from fusedops.integrations.hf.rules.rule import PatchRule
from fusedops.integrations.hf.tables import _SECTIONS, _TABLES, rule_of_class

Loss = Callable[[nn.Module], torch.Tensor]
Gradients = dict[str, torch.Tensor]


def patched_pair(stock: nn.Module, **options: Any) -> tuple[Any, Any]:
    """Return a copy that is patched with these options, and the model itself."""
    patched = copy.deepcopy(stock)
    fusedops.patch(patched, **options)
    return patched, stock


def gradients(model: nn.Module, loss: Loss, *, autocast: bool = False) -> dict[str, torch.Tensor]:
    """Run one training step from a fixed seed; return the loss and every parameter's gradient."""
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(model)
    value.backward()
    results = {"loss": value.detach()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        results[name] = parameter.grad.detach().clone()
    return results


def assert_same_training(
    patched: nn.Module, stock: nn.Module, loss: Loss, *, autocast: bool = False, draws: int = 0
) -> None:
    """Compare loss and gradients with the unpatched model's, both against float64.

    With ``draws`` the weights are drawn again, at most so many times in all, while a comparison
    fails: eager's error is the largest of all draws, because that of a few numbers in bfloat16 may
    be small by luck.
    """
    dtype = torch.bfloat16 if autocast else torch.float32
    runs: list[tuple[Gradients, Gradients, Gradients]] = []
    for seed in range(max(1, draws)):
        if draws:
            redraw(stock, seed)
            patched.load_state_dict(stock.state_dict())
        runs.append(
            (
                gradients(patched, loss, autocast=autocast),
                gradients(stock, loss, autocast=autocast),
                gradients(copy.deepcopy(stock).double(), loss),
            )
        )
        excess = _excess(runs, dtype)
        if not excess:
            return
    raise AssertionError(f"beyond the budget: {excess}")


def _excess(
    runs: list[tuple[Gradients, Gradients, Gradients]], dtype: torch.dtype
) -> dict[str, float]:
    """Return by how much errors exceed their budgets, by the names of those that do."""
    assert runs[0][0].keys() == runs[0][1].keys() == runs[0][2].keys()
    excess = {}
    for name in runs[0][2]:
        actual, eager, expected = (
            torch.stack([run[name] for run in kind]) for kind in zip(*runs, strict=True)
        )
        assert actual.dtype == eager.dtype, name
        expected = expected.double()
        budget = dtypes.error_budget(eager, expected, dtype, depth=64)
        excess[name] = float(((actual.double() - expected).abs() - budget).max())
    return {name: value for name, value in excess.items() if not value <= 0}


def assert_within_budget(
    actual: Gradients, eager: Gradients, exact: Gradients, dtype: torch.dtype = torch.float32
) -> None:
    """Compare results by name with those of another program, both against float64."""
    excess = _excess([(actual, eager, exact)], dtype)
    assert not excess, f"beyond the budget: {excess}"


def redraw(model: nn.Module, seed: int) -> None:
    """Draw the parameters of plain torch modules again."""
    torch.manual_seed(seed)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()


def assert_close(actual: torch.Tensor, stock: torch.Tensor, depth: int = 1024) -> None:
    """Compare float32 results of two programs that should round alike."""
    exact = stock.double()
    budget = dtypes.error_budget(stock, exact, torch.float32, depth=depth)
    assert ((actual.double() - exact).abs() <= budget).all()


def assert_all_close(actual: Iterable[torch.Tensor], stock: Iterable[torch.Tensor]) -> None:
    """Compare pairs of float32 results of two programs that should round alike."""
    for one, other in zip(actual, stock, strict=True):
        assert_close(one, other)


def assert_same_grads(model: nn.Module, stock: nn.Module) -> None:
    """Compare the gradients that two backwards have left."""
    for name, parameter in stock.named_parameters():
        assert_close(model.get_parameter(name).grad, parameter.grad)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of each op inside the block, whichever the backend."""
    calls: Counter[str] = Counter()
    fusedops.reset_counters()
    yield calls
    for (op, _), count in fusedops.counters().items():
        calls[op] += count


ARGUMENTS = {
    "use_cpu": True,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "seed": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
"""Of Hugging Face's Trainer."""


def make_trainer(
    model: Any,
    folder: Path,
    rows: list[dict[str, torch.Tensor]],
    *,
    optimizers: tuple[Any, Any] = (None, None),
    callbacks: Any = None,
    **options: Any,
) -> Any:
    """Return Hugging Face's Trainer of a model, or of a function that makes it."""
    from transformers import Trainer, TrainingArguments

    return Trainer(
        **{"model" if isinstance(model, nn.Module) else "model_init": model},
        args=TrainingArguments(output_dir=str(folder), **(ARGUMENTS | options)),
        train_dataset=rows,
        eval_dataset=rows[:4],
        optimizers=optimizers,
        callbacks=callbacks,
    )


def losses_of(trainer: Any) -> list[float]:
    """Train; return the loss of every step."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Adapted(nn.Module):
    """What an adapter library puts in a linear layer's place."""

    def __init__(self, base: nn.Module, out_features: int) -> None:
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(torch.full((out_features,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.scale


TABLES = (*_TABLES, *_SECTIONS, "attention")


def rules_of(table: str) -> tuple[PatchRule, ...]:
    """Return the rules of a table, or of the listed classes of a file, if its library is there."""
    if table in _TABLES:
        pytest.importorskip(_TABLES[table])
        rules: tuple[PatchRule, ...] = importlib.import_module(table).RULES
        return rules
    pytest.importorskip("transformers")
    names = list(known_digests().get(table, ["llama.LlamaAttention", "t5.T5Attention"]))
    found = [rule_of_class(_listed_class(*name.split("."))) for name in names]
    assert None not in found
    return tuple(rule for rule in found if rule is not None)


def _listed_class(kind: str, name: str) -> type:
    cls: type = getattr(
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"), name
    )
    return cls

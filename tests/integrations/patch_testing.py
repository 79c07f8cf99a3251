"""What the patch tests share: training steps to compare, against float64, within the budget."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusedops
from fusedops.specs.comparison import difference

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
    failure = None
    for seed in range(max(1, draws)):
        if draws:
            redraw(stock, seed)
            patched.load_state_dict(stock.state_dict())
        actual = gradients(patched, loss, autocast=autocast)
        eager = gradients(stock, loss, autocast=autocast)
        runs.append((actual, eager, gradients(copy.deepcopy(stock).double(), loss)))
        results = (
            {name: torch.stack([run[name] for run in program]) for name in program[0]}
            for program in zip(*runs, strict=True)
        )
        try:
            return assert_within_budget(*results, dtype)
        except AssertionError as error:
            failure = error
    assert failure is not None
    raise failure


def assert_within_budget(
    actual: Gradients, eager: Gradients, exact: Gradients, dtype: torch.dtype = torch.float32
) -> None:
    """Compare results by name with those of another program, both against float64."""
    assert actual.keys() == eager.keys() == exact.keys()
    found = {
        name: difference(actual[name], exact[name].double(), eager[name], depth=64, inside=dtype)
        for name in exact
    }
    found = {name: message for name, message in found.items() if message is not None}
    assert not found, f"beyond the budget: {found}"


def redraw(model: nn.Module, seed: int) -> None:
    """Draw the parameters of plain torch modules again."""
    torch.manual_seed(seed)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()


def assert_close(actual: torch.Tensor, stock: torch.Tensor, depth: int = 1024) -> None:
    """Compare float32 results of two programs that should round alike."""
    found = difference(actual, stock.double(), stock, depth=depth, inside=torch.float32)
    assert found is None, found


def assert_all_close(actual: Iterable[torch.Tensor], stock: Iterable[torch.Tensor]) -> None:
    """Compare pairs of float32 results of two programs that should round alike."""
    for one, other in zip(actual, stock, strict=True):
        assert_close(one, other)


def assert_same_grads(model: nn.Module, stock: nn.Module) -> None:
    """Compare the gradients that two backwards have left."""
    for name, parameter in stock.named_parameters():
        assert_close(model.get_parameter(name).grad, parameter.grad)


TOLERANCE = 2e-3  # of the largest magnitude of a tensor


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, of the largest magnitude of what is expected."""
    if not torch.equal(actual.isfinite(), expected.isfinite()):
        return math.inf
    actual, expected = (x.nan_to_num(0, 0, 0).double() for x in (actual, expected))
    scale = expected.abs().max().clamp(min=1e-30)
    return float((actual - expected).abs().max() / scale)


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

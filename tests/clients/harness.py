"""A training run with somebody else's trainer: a patched model against the stock one.

The run is made three times, in one process or in several: by the patched model, by the stock model,
and by the stock model in float64. Losses and weights of the patched one may be as far from float64
as the ops' error budget allows. The ops are counted: equal numbers from a fused model that ran
nothing fused are no success.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from families import DENSE, LLAMA_OPS, SPARSE
from filelock import FileLock
from patch_testing import assert_within_budget, counted
from processes import run
from torch import nn

import fusedops
from fusedops.integrations import describe
from fusedops.integrations.hf.rules.torch_modules import torchs_product_is_faster

# Ops with a product: on some processors torch's product of float32 runs in their place.
PRODUCTS = ("linear_act", "linear_glu", "mlp")

STEPS = 10
BATCH = 4
LEARNING_RATE = 0.1
"""Of plain gradient descent: Adam makes a whole step of a rounding where a gradient is about 0."""
OPS = LLAMA_OPS
"""What runs of a patched Llama with its loss in a step of training, and how often."""


@dataclass
class Trained:
    """What a run leaves: the loss of every step, and the weights by their names in the model."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


@dataclass
class Ran:
    """A run of one process.

    Attributes:
        trained: what it leaves.
        calls: op -> how many forward and backward calls it made.
        aside: what a fused op could do and does not, with the reason, as ``describe`` says.
    """

    trained: Trained
    calls: Counter[str]
    aside: list[str]


Train = Callable[..., Trained]
Change = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Trial:
    """A comparison. All functions are functions of modules: other processes call them.

    Attributes:
        train: ``train(model, **options)``.
        options: see there.
        family: a name in ``tests/integrations/families.py``.
        config: of the model.
        build: makes the model instead, which ``family`` then only names.
        ops: op -> how often it runs in a backward pass of the loss.
        suffix: of the names that are counted: ``""`` for the forward operators.
        backwards: how many backward passes a process makes.
        exactly: options of the float64 run that differ; ``None`` where the trainer cannot train in
            float64, and stock's own numbers stand for the exact ones.
        dtype: of the computation.
        prepare: done to the model before ``patch``, as adapters.
        finish: done to it after ``patch``.
        by_socket: the trainer patches the model: ``train`` is told so by ``fused``.
    """

    train: Train
    options: dict[str, Any] = field(default_factory=dict)
    family: str = "Llama"
    config: dict[str, Any] = field(default_factory=dict)
    build: Callable[..., nn.Module] | None = None
    ops: dict[str, int] = field(default_factory=lambda: dict(OPS))
    suffix: str = "_backward"
    backwards: int = STEPS
    exactly: dict[str, Any] | None = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    prepare: Change | None = None
    finish: Change | None = None
    by_socket: bool = False

    def compare(self, processes: int = 1) -> Ran:
        """Make the runs, each in processes of its own; return the patched one of the first rank.

        Raises:
            AssertionError: numbers differ or ops did not run; or a process raised, with its text.
        """
        patched = run(_run, self, True, processes=processes)
        stock = run(_run, self, False, processes=processes)
        exact = stock
        if self.exactly is not None:
            exact = run(_run, self, False, torch.float64, self.exactly, processes=processes)
        for found, theirs, truth in zip(patched, stock, exact, strict=True):
            assert_same(found.trained, theirs.trained, truth.trained, self.dtype)
            for op, per_backward in self.ops.items():
                if op in PRODUCTS and torchs_product_is_faster(torch.empty(0, dtype=self.dtype)):
                    continue
                wanted, ran = per_backward * self.backwards, found.calls[op + self.suffix]
                assert ran == wanted, f"{op} ran {ran} times, not {wanted}: {found.calls}"
        return patched[0]


def _run(
    trial: Trial,
    patch: bool,
    dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
) -> Ran:
    """Make the model, the same at every call, and train it."""
    build = trial.build or (DENSE | SPARSE)[trial.family].model
    model = build(**trial.config).to(dtype)
    torch.manual_seed(1)
    model = trial.prepare(model) if trial.prepare is not None else model
    at_first = fusedops.patch(model) if patch and not trial.by_socket else None
    torch.manual_seed(1)
    model = trial.finish(model) if trial.finish is not None else model
    options = trial.options | (options or {}) | ({"fused": patch} if trial.by_socket else {})
    with counted() as calls:
        trained = trial.train(model, **options)
    aside = steps_aside(at_first, describe(model)) if at_first is not None else []
    return Ran(trained, calls, aside)


def rows(count: int = STEPS * BATCH * 2, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Return sequences that a model can learn, with their labels."""
    starts = torch.arange(count).mul(11)
    ids = (torch.arange(length) * 3 + starts[:, None]) % 97
    return [{"input_ids": each, "labels": each} for each in ids]


def batches(rank: int = 0, processes: int = 1) -> list[torch.Tensor]:
    """Return the ids of every step's batch, of those that are this rank's."""
    ids = torch.stack([row["input_ids"] for row in rows(STEPS * BATCH * processes)])
    return list(ids.view(STEPS, processes, BATCH, -1)[:, rank])


def steps(
    model: nn.Module,
    ids: list[torch.Tensor],
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
    optimizer: Any = None,
) -> list[float]:
    """Train what is not frozen, by plain gradient descent if not told otherwise; return losses."""
    if optimizer is None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    losses = []
    for each in ids:
        loss = model(input_ids=each, labels=each).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters, gathered where they are sharded."""
    return {name: whole(parameter).clone() for name, parameter in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor, of a ``DTensor`` all of it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(
    found: Trained, stock: Trained, exact: Trained, dtype: torch.dtype = torch.float32
) -> None:
    """Compare two runs within the ops' error budget, as far as they are from float64."""
    assert len(found.losses) == len(stock.losses) == len(exact.losses) > 0
    assert found.weights.keys() == stock.weights.keys() == exact.weights.keys()
    runs = [{"loss": torch.tensor(each.losses), **each.weights} for each in (found, stock, exact)]
    assert_within_budget(*runs, dtype)


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    """Return a model with adapters whose second factor is no longer zero, as after training."""
    from peft import LoraConfig, get_peft_model

    dtype = next(model.parameters()).dtype
    config = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    # Drawn in float32 for every dtype: the numbers that torch draws depend on it.
    return get_peft_model(model.float(), config).to(dtype)


def lora(*targets: str, **options: Any) -> Change:
    """Return what adds adapters to these linear layers, to all of them without names."""
    return partial(adapted, target_modules=list(targets) or "all-linear", **options)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The linear layers of an attention, for ``lora``."""


def steps_aside(at_first: fusedops.PatchReport, at_last: fusedops.PatchReport) -> list[str]:
    """Return what has a rule and does not run fused, with the reason, each kind once.

    Args:
        at_first: what ``patch`` reported, which knows why it left something alone.
        at_last: what ``describe`` reports of the model as it was trained.
    """
    refused = {each.name: each.reason for each in at_first.kept}
    lines = []
    for module in at_last.modules:
        stepped = module.replaced and module.reason.startswith("falls back now: ")
        if stepped or (not module.replaced and module.reason != "there is no rule for this class"):
            reason = module.reason if stepped else refused.get(module.name, module.reason)
            reason = re.sub(r"[.][0-9]+[.]", ".*.", reason.removeprefix("falls back now: "))
            lines.append(f"{module.cls}: {reason}")
    return list(dict.fromkeys(lines))


class Table:
    """Where comparisons are written down, for docs/gen_trainers.py.

    A row per trainer, mode and version, which replaces a former one. Two workers may write at once,
    hence the lock.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "trainers.json"

    def compare(
        self, trial: Trial, package: str, mode: str, processes: int = 1, gap: str = ""
    ) -> None:
        """Make a comparison and write its row; ``gap`` says why it cannot succeed yet."""
        key = {"package": package, "mode": mode, "transformers": transformers.__version__}
        row: dict[str, Any] = {
            "version": version(package),
            "torch": torch.__version__.partition("+")[0],
            "processes": processes,
            "model": trial.family,
            "same": True,
            "note": "",
            "fused": {},
            "aside": [],
        }
        try:
            ran = trial.compare(processes)
            row |= {"fused": dict(sorted(ran.calls.items())), "aside": ran.aside}
        except BaseException as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            row |= {"same": False, "note": gap or lines[-1]}
            raise
        finally:
            self._write(key, row)

    def _write(self, key: dict[str, Any], row: dict[str, Any]) -> None:
        self._path.parent.mkdir(exist_ok=True)
        with FileLock(f"{self._path}.lock"):
            rows = json.loads(self._path.read_text()) if self._path.exists() else []
            rows = [other for other in rows if {name: other[name] for name in key} != key]
            rows.append(key | row)
            rows.sort(key=lambda row: (row["package"], row["mode"], row["transformers"]))
            self._path.write_text(json.dumps(rows, indent=1) + "\n")

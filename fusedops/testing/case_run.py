"""One case: the steps of a single process, the same steps on ranks, and where they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fusedops._core import dtypes
from fusedops._core.parameter_names import plain_name
from fusedops.testing.batches import Batch
from fusedops.testing.case import Case

# How a case could not be run at all, which is no failure if all ranks say so.
REFUSALS = ("ValueError", "UnsupportedError")


@dataclass
class Parallel:
    """A model that is ready to train on the ranks of a mesh, as ``parallelize`` returns it."""

    # This rank's part; its parameters have the names that the whole model gives them
    model: nn.Module
    # Takes the whole batch, trains on this rank's share of it, leaves the gradients of the whole
    # batch's loss and returns that loss
    forward_backward: Callable[[Batch], torch.Tensor]
    # ``None``: the one of the comparison, over the parameters of ``model``
    optimizer: torch.optim.Optimizer | None = None
    # Takes the largest norm, clips, and returns the norm of all gradients as it was; ``None``:
    # ``torch.nn.utils.clip_grad_norm_``
    clip: Callable[[float], torch.Tensor] | None = None
    # Takes a parameter's name and what this rank has of it or of its gradient, and returns the full
    # tensor; ``None``: DTensors are gathered, and other tensors are full
    gather: Callable[[str, torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Subject:
    """What is verified: functions that make the model, its parallel form, its batches and loss."""

    # By name, functions that return a whole model; its weights must follow from torch's seed
    factories: Mapping[str, Callable[[], nn.Module]]
    # ``(model, mesh, case) -> Parallel`` or a module, for which ``data_parallel`` makes the rest
    parallelize: Callable[[nn.Module, DeviceMesh, Case], Any]
    # ``(case, generator) -> dict`` of tensors, the whole batch of a step
    batch: Callable[[Case, torch.Generator], Batch]
    # ``(model, batch) -> (total, count)``: sum of the losses, and number of targets; a third, if
    # there is one, is added to their mean: a router's loss
    loss: Callable[[nn.Module, Batch], tuple[torch.Tensor, ...]]
    optimizer: Callable[[Any], torch.optim.Optimizer]  # ``(parameters) -> Optimizer``

    def model(self, case: Case) -> nn.Module:
        """Return the whole model of a case, the same wherever it is called."""
        torch.manual_seed(case.seed)
        return self.factories[case.model]().to(case.dtype)


Values = dict[tuple[str, int, str], torch.Tensor]


@dataclass
class Reference:
    """What a single process computes, by kind, step and name."""

    single: Values
    truth: Values


def reference(subject: Subject, case: Case) -> Reference:
    """Train a case on this process, in its dtype and in float64."""
    single = _steps(subject, case, data_parallel(subject, subject.model(case)))
    if case.dtype == torch.float64:
        return Reference(single, single)
    wide = data_parallel(subject, subject.model(case).double())
    return Reference(single, _steps(subject, case, wide))


def data_parallel(subject: Subject, model: nn.Module, mesh: DeviceMesh | None = None) -> Parallel:
    """Return a module with the usual training step over the mesh's axis ``dp``, if it has one.

    Each rank takes its share of the sequences and divides by the mean number of targets of a rank:
    exact where the module averages the gradients over ``dp``, as DDP and FSDP2 do.
    """
    axis = mesh["dp"] if mesh is not None and "dp" in (mesh.mesh_dim_names or ()) else None
    size, rank = (1, 0) if axis is None else (axis.size(), axis.get_local_rank())

    def summed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        if axis is not None:
            dist.all_reduce(tensor, group=axis.get_group())
        return tensor

    def forward_backward(batch: Batch) -> torch.Tensor:
        if axis is not None:
            rows = len(next(iter(batch.values())))
            if rows % size:
                raise ValueError(f"verify: batch_size must be a multiple of dp={size}, got {rows}")
            batch = {name: tensor.chunk(size)[rank] for name, tensor in batch.items()}
        total, count, *more = subject.loss(model, batch)
        loss = sum(more, total * size / summed(count).clamp_min(1))
        loss.backward()
        return summed(loss.detach() / size)

    return Parallel(model, forward_backward)


def _steps(subject: Subject, case: Case, parallel: Parallel) -> Values:
    """Train; return every loss, gradient and norm, and the last weights, all of them gathered."""
    torch.manual_seed(case.seed)
    model, values = parallel.model, {}
    optimizer = parallel.optimizer or subject.optimizer(model.parameters())
    gather = parallel.gather or _full_tensor
    for step in range(case.steps):
        optimizer.zero_grad()
        loss = parallel.forward_backward(subject.batch(case, case.generator(step)))
        values["loss", step, ""] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                values["gradient", step, plain_name(name)] = gather(name, parameter.grad).clone()
        if case.max_norm is not None:
            clip = parallel.clip or partial(nn.utils.clip_grad_norm_, model.parameters())
            values["norm", step, ""] = _full_tensor("", clip(case.max_norm)).detach().clone()
        optimizer.step()
    for name, parameter in model.named_parameters():
        values["weight", case.steps, plain_name(name)] = gather(name, parameter.detach()).clone()
    return values


def _full_tensor(name: str, given: torch.Tensor) -> torch.Tensor:
    return given.full_tensor() if isinstance(given, DTensor) else given


@dataclass(frozen=True)
class Difference:
    """A value of one rank that is not that of a single process."""

    kind: str  # ``"loss"``, ``"gradient"``, ``"norm"`` or ``"weight"``
    step: int  # of the optimizer
    name: str  # of the parameter
    rank: int  # whose value it is
    text: str  # what is wrong

    def __str__(self) -> str:
        what = f"{self.kind} {self.name}".strip()
        return f"step {self.step}: {what} {self.text}"


@dataclass
class RankComparison:
    """What one rank says."""

    differences: list[Difference]  # from the reference
    compared: set[tuple[str, int, str]]  # kinds, steps and names


def on_rank(rank: int, subject: Subject, case: Case, known: Reference) -> RankComparison:
    """Train a case on this rank of an initialised world; compare with a single process."""
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    model = subject.model(case)
    made = subject.parallelize(model, mesh, case)
    parallel = made if isinstance(made, Parallel) else data_parallel(subject, made, mesh)
    return compare(_steps(subject, case, parallel), known, rank, case.dtype)


def compare(values: Values, known: Reference, rank: int, dtype: torch.dtype) -> RankComparison:
    """Return where a rank's values differ from those of a single process.

    ``dtype`` is that of the parameters: a loss in float32 is no more exact than they are.
    """
    differences = []
    scales: dict[tuple[str, int], float] = {}
    for (kind, step, _), truth in known.truth.items():
        largest = float(truth.abs().max()) if truth.numel() else 0.0
        scales[kind, step] = max(scales.get((kind, step), 0.0), largest)
    for key, value in values.items():
        if key not in known.truth:
            differences.append(Difference(*key, rank, "is not there in a single process"))
            continue
        truth, single = known.truth[key], known.single[key]
        if value.shape != truth.shape:
            text = f"has shape {list(value.shape)}, in a single process {list(truth.shape)}"
            differences.append(Difference(*key, rank, text))
            continue
        coarser = max(single.dtype, dtype, key=lambda candidate: torch.finfo(candidate).eps)
        budget = dtypes.parity_budget(single, truth, coarser, scales[key[:2]])
        error = (value.double() - truth.double()).abs()
        error[value.isnan() & truth.isnan()] = 0.0
        ratio = (error / budget).nan_to_num(float("inf"), float("inf"))
        if truth.numel() and float(ratio.max()) > 1.0:
            place = int(ratio.argmax())
            got, expected = float(value.flatten()[place]), float(truth.flatten()[place])
            index = list(map(int, torch.unravel_index(torch.tensor(place), truth.shape)))
            at = f" at {index}" if index else ""
            wrong = f"{int((ratio > 1.0).sum())} of {truth.numel()} elements differ: "
            text = f"{wrong if index else ''}is {got:.6g}, should be {expected:.6g}{at}"
            differences.append(Difference(*key, rank, text))
    return RankComparison(differences, set(values))


def missing(known: Reference, verdicts: list[RankComparison]) -> list[Difference]:
    """Return what no rank compared."""
    seen = set().union(*(comparison.compared for comparison in verdicts))
    return [Difference(*key, -1, "is on no rank") for key in known.truth if key not in seen]

"""``fit``: the cheapest policy with which a step fits into a memory budget, found by measuring.

The blocks that repeat in a model (a transformer's layers) are alike. Each treatment is measured on
all of them: seconds and bytes. If the step fits then, bisection over measured peaks finds how many
of the first layers must have the treatment. Of the treatments that fit, the one with the shortest
expected step is applied and measured again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedops._core import checks
from fusedops._core.device_tensors import device_tensor
from fusedops.memory.apply import apply, policy_state_of, remove
from fusedops.memory.layers import lists_of
from fusedops.memory.measurement.report import format_bytes, state_bytes, static_bytes
from fusedops.memory.measurement.step import Loss, ModelStep, check_arguments, preserve_gradients
from fusedops.memory.offloading.offloader import OffloadSettings
from fusedops.memory.policy import Policy, offload, recompute, save
from fusedops.runtime.peak import peak_bytes

_ROUNDS = 3
_TREATMENTS: dict[str, Any] = {  # from names of layers to rules
    "recompute, keep attention": lambda names: [recompute(names), save(ops="attention")],
    "recompute": lambda names: [recompute(names)],
    "offload": lambda names: [offload(names)],
    "recompute, offload the inputs": lambda names: [recompute(names), offload(names)],
}


@dataclass(frozen=True)
class Candidate:
    """A treatment of the layers, measured on all of them."""

    name: str  # in words
    seconds: float  # of a step
    peak: int  # bytes of a step, static ones included
    layers: int | None  # how many of them the budget needs; ``None`` where all are not enough


@dataclass(frozen=True)
class Fit:
    """What ``fit`` chose. ``print`` it.

    Attributes:
        policy: that the model now has.
        peak: bytes of a step with it, static ones included.
        seconds: of a step with it.
        budget: what was asked for.
        before: bytes and seconds of a step without it.
        candidates: what was measured.
    """

    policy: Policy
    peak: int
    seconds: float
    budget: int
    before: tuple[int, float]
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        chosen = str(self.policy) if self.policy.rules else "nothing: it fits without a policy"
        peak, seconds = self.before
        lines = [
            f"budget {format_bytes(self.budget)}; "
            f"without a policy {format_bytes(peak)}, {seconds * 1e3:.1f} ms",
            f"chosen: {chosen}",
            f"  {format_bytes(self.peak)}, {self.seconds * 1e3:.1f} ms a step",
        ]
        for candidate in self.candidates:
            needs = "not enough" if candidate.layers is None else f"{candidate.layers} needed"
            lines.append(
                f"  {candidate.name:<34} all layers: {format_bytes(candidate.peak):>12} "
                f"{candidate.seconds * 1e3:>9.1f} ms   {needs}"
            )
        return "\n".join(lines)


def fit(
    model: nn.Module,
    batch: Any,
    budget: int,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    with_offload: bool | None = None,
) -> Fit:
    """Give a model the cheapest policy with which a step fits into a budget.

    Args:
        model: in the mode in which it trains. A policy that it has is replaced. Of one that FSDP2
            or tensor parallelism has cut, all ranks call this together, and choose alike, by the
            one that needs most.
        batch: as for ``report``, of the size that training will use.
        budget: bytes for weights, buffers, optimizer states and what a step holds at its peak.
        loss: as for ``report``.
        optimizer: as for ``report``.
        with_offload: whether tensors may leave for host memory; by default where the model is on a
            GPU (on a CPU the host's memory is the same).

    Returns:
        What was chosen and measured. The model has the policy.

    Raises:
        TypeError: an argument has the wrong type, or no loss can be found.
        ValueError: ``budget`` is not positive, or the model has neither blocks that repeat nor a
            container of layers.
        MemoryError: no policy fits; the message has the smallest budget that would do. The model
            has no policy then.

    Note:
        Runs some twenty steps. Results keep their bits with every policy that is considered. Times
        are those of this machine now.

    Example:
        >>> import torch, fusedops
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())] * 4
        >>> model = torch.nn.Sequential(*layers)
        >>> found = fusedops.memory.fit(model, torch.randn(256, 64), 2**30)
        >>> found.policy
        Policy()
    """
    check_arguments("fit", model, loss, optimizer)
    checks.integer("fit", "budget", budget, least=1)
    if with_offload is not None:
        checks.flag("fit", "with_offload", with_offload)
    names = list(lists_of(model))
    if not names:
        raise ValueError(
            "fit: model has no layers to choose from, neither blocks of one class that repeat nor "
            "members of a ModuleList, ModuleDict or Sequential; apply a policy by hand"
        )
    step = ModelStep("fit", model, batch, loss)
    if with_offload is None:
        with_offload = step.device.type == "cuda"
    treatments = {
        name: rules for name, rules in _TREATMENTS.items() if with_offload or "offload" not in name
    }
    state = policy_state_of(model)
    settings = state.settings if state is not None else None
    static = static_bytes(model) + state_bytes(optimizer)
    search = _Search(step, settings, static, names, budget)
    try:
        with preserve_gradients(model):
            return search.run(treatments)
    except BaseException:
        remove(model)
        raise


@dataclass(frozen=True)
class _Search:
    """Measures a model's step with policies, and finds the fastest that fits."""

    step: ModelStep
    settings: OffloadSettings | None
    static: int  # bytes of weights, buffers and optimizer states
    names: list[str]  # of the layers
    budget: int

    def run(self, treatments: dict[str, Any]) -> Fit:
        budget = self.budget
        before = self._peak(Policy()), self._seconds(Policy())
        if before[0] <= budget:
            return Fit(Policy(), *before, budget, before, ())
        candidates: list[Candidate] = []
        chosen: tuple[float, Policy, int] | None = None
        smallest = before[0]
        for name, rules in treatments.items():
            policy = Policy(*rules(self.names))
            peak, seconds = self._peak(policy), self._seconds(policy)
            smallest = min(smallest, peak)
            needed: int | None = None
            if peak <= budget:
                needed, peak_of_needed = self._fewest(rules, peak)
                expected = before[1] + (seconds - before[1]) * needed / len(self.names)
                if chosen is None or expected < chosen[0]:
                    chosen = (expected, Policy(*rules(self.names[:needed])), peak_of_needed)
            candidates.append(Candidate(name, seconds, peak, needed))
        if chosen is None:
            raise MemoryError(
                f"fit: no policy fits into {budget} bytes: without one a step takes {before[0]}, "
                f"and {smallest} is the smallest that is possible ({self.static} of them weights, "
                "buffers and optimizer states); a smaller batch takes less"
            )
        _, policy, peak = chosen
        return Fit(policy, peak, self._seconds(policy), budget, before, tuple(candidates))

    def _fewest(self, rules: Any, peak: int) -> tuple[int, int]:
        """Return how many of the first layers need a treatment, and the peak then."""
        least, enough = 0, len(self.names)
        while enough - least > 1:
            middle = (least + enough) // 2
            middle_peak = self._peak(Policy(*rules(self.names[:middle])))
            if middle_peak <= self.budget:
                enough, peak = middle, middle_peak
            else:
                least = middle
        return enough, peak

    def _peak(self, policy: Policy) -> int:
        self._apply(policy)
        dynamic = peak_bytes(self.step.run, self.step.device)
        self.step.model.zero_grad()
        return int(_largest(self.step.model, self.static + dynamic))

    def _seconds(self, policy: Policy) -> float:
        self._apply(policy)
        return _largest(self.step.model, min(self._time_step() for _ in range(_ROUNDS)))

    def _apply(self, policy: Policy) -> None:
        """Give the model a policy, and run a step that fills caches."""
        apply(self.step.model, policy, offload_settings=self.settings)
        self.step.model.zero_grad()
        self._time_step()

    def _time_step(self) -> float:
        is_gpu = self.step.device.type == "cuda"
        if is_gpu:
            torch.cuda.synchronize(self.step.device)
        begin = time.perf_counter()
        self.step.run()
        if is_gpu:
            torch.cuda.synchronize(self.step.device)
        seconds = time.perf_counter() - begin
        self.step.model.zero_grad()
        return seconds


def _largest(model: nn.Module, number: float) -> float:
    """Return the largest number of all ranks that have a part of the model.

    They must choose the same policy: each of their layers' collectives needs all of them.
    """
    meshes = {
        mesh
        for parameter in model.parameters()
        if (mesh := getattr(parameter, "device_mesh", None))
    }
    for mesh in sorted(meshes, key=str):
        largest = device_tensor(number, torch.float64, mesh.device_type)
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(
                largest, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dim)
            )
        number = float(largest)
    return number

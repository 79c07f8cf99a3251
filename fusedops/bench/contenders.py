"""Who competes: eager torch, torch.compile of it, fusedops by itself and per backend, peers.

Each is a function with the op's signature, and the context that it has to run in. A backend that
cannot run a case here is left out with its reason. Peers are other implementations beside torch's:
``bench/peers.py`` of the source tree has them, and an installed wheel compares without them.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fusedops._core import backends
from fusedops._core.checks import UnsupportedError
from fusedops.bench.results import AUTOMATIC, COMPILE, EAGER
from fusedops.specs import Sample, Spec, tensors_in

_PEERS = Path(__file__).resolve().parents[2] / "bench" / "peers.py"


@functools.cache
def load_peers() -> ModuleType | None:
    """Return the module of the peers; ``None`` outside of a source tree."""
    spec = importlib.util.spec_from_file_location("fusedops_bench_peers", _PEERS)
    if spec is None or spec.loader is None or not _PEERS.exists():
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def peers_of(name: str) -> dict[str, Any]:
    """Return the peers of an op or a layer, by the names of their rows."""
    module = load_peers()
    known: dict[str, Callable[[], dict[str, Any]]] = module.PEERS if module else {}
    return known[name]() if name in known else {}


@dataclass(frozen=True)
class Contender:
    """One way to compute the op."""

    # ``"eager"``, ``"compile"``, ``"fusedops"`` (automatic choice), ``"fusedops:cpp"`` (a backend),
    # or a peer's name
    name: str
    function: Callable[..., Any]  # takes the op's arguments
    backend: str | None = None  # the backend that is asked for, ``None`` for none
    trains: bool = True  # whether it has a backward; without one it has forward rows only
    # whether it writes on its arguments: it gets copies, made outside of what is timed
    overwrites: bool = False

    def context(self) -> AbstractContextManager[Any]:
        """Return the context that forward and backward run in."""
        return backends.use_backend(self.backend) if self.backend else nullcontext()


@dataclass(frozen=True)
class ContenderCall:
    """One sample to run, its leaves and the gradients that come in."""

    sample: Sample  # the arguments
    leaves: tuple[torch.Tensor, ...]  # the tensors among them that are differentiated
    grads: tuple[torch.Tensor, ...]  # one incoming gradient per differentiable output

    @staticmethod
    def of(spec: Spec, sample: Sample) -> ContenderCall:
        """Return the call of ``spec``'s op on ``sample``, with random incoming gradients.

        They are the same for every dtype: values that bfloat16 has.
        """
        leaves = tuple(sample.leaves)
        outputs = differentiable(spec.eager(*sample.args, **sample.kwargs)) if leaves else ()
        generator = torch.Generator().manual_seed(7)
        grads = (torch.randn(out.shape, generator=generator).bfloat16().to(out) for out in outputs)
        return ContenderCall(sample, leaves, tuple(grads))

    def given_to(self, contender: Contender) -> ContenderCall:
        """Return the call that ``contender`` may have: itself, or a copy to write on."""
        if not contender.overwrites:
            return self
        return self._map(lambda given: given.detach().clone().requires_grad_(given.requires_grad))

    def forward(self, function: Callable[..., Any]) -> Any:
        """Return what ``function`` makes of the arguments."""
        return function(*self.sample.args, **self.sample.kwargs)

    def backward(self, outputs: Any) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the leaves."""
        outputs = differentiable(outputs)
        grads = [grad.to(output.dtype) for grad, output in zip(self.grads, outputs, strict=True)]
        return torch.autograd.grad(outputs, self.leaves, grads, allow_unused=True)

    def double(self) -> ContenderCall:
        """Return the same call in float64."""

        def widen(value: torch.Tensor) -> torch.Tensor:
            if not value.dtype.is_floating_point:
                return value
            return value.detach().double().requires_grad_(value.requires_grad)

        return self._map(widen)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> ContenderCall:
        sample = self.sample.map(function)
        return ContenderCall(sample, tuple(sample.leaves), tuple(map(function, self.grads)))


def differentiable(outputs: Any) -> tuple[torch.Tensor, ...]:
    """Return the outputs that a gradient can come into."""
    return tuple(output for output in tensors_in(outputs) if output.requires_grad)


def contenders(
    spec: Spec,
    call: ContenderCall,
    *,
    compiled: bool,
    only: Sequence[str],
    all_backends: bool = False,
) -> tuple[list[Contender], list[str]]:
    """Return who can run ``call``, eager first, and a note for each who cannot.

    ``only`` names those to keep with eager; empty, it keeps all, but of the backends those alone
    that the automatic choice stands before: not the one it takes, not the reference.
    ``all_backends`` keeps these too.
    """
    able: list[Contender] = []
    notes: list[str] = []

    def admit(candidate: Contender) -> bool:
        """Run a contender once; note the reason for what cannot be timed of it."""
        if only and candidate.name not in (EAGER, *only):
            return False
        reason = _reason_against(candidate, call, backward=False)
        if reason is not None:
            notes.append(f"no {candidate.name} row: {reason}")
            return False
        reason = _reason_against(candidate, call, backward=True) if call.leaves else None
        if reason is not None:
            notes.append(f"{candidate.name} has forward rows only: {reason}")
        able.append(replace(candidate, trains=reason is None))
        return True

    if not admit(Contender(EAGER, spec.eager)):
        return able, notes

    if compiled:
        torch._dynamo.reset()
        admit(Contender(COMPILE, torch.compile(spec.eager, dynamic=False)))
    automatic = Contender(AUTOMATIC, spec.op)
    automatic_backends = backend_of(able[-1], call) if admit(automatic) else "none"
    # Not Triton's interpreter on CPU tensors.
    on_cpu = all(tensor.is_cpu for tensor in call.sample.tensors)
    candidates = ("cpp", "torch") if on_cpu else ("cuda", "triton", "torch")
    for name in candidates if automatic_backends else ():
        if only or all_backends or name not in (*automatic_backends.split("+"), "torch"):
            admit(Contender(f"{AUTOMATIC}:{name}", spec.op, name))
    kinds = {tensor.device.type for tensor in call.sample.tensors}
    for label, peer in peers_of(spec.name).items():
        if kinds <= set(getattr(peer, "devices", kinds)):
            admit(Contender(label, peer, overwrites=getattr(peer, "overwrites", False)))
    return able, notes


def backend_of(contender: Contender, call: ContenderCall) -> str:
    """Return the backend that a contender's forward (and backward) really ran on."""
    before = backends.counters()
    with contender.context():
        outputs = call.forward(contender.function)
        if call.leaves and contender.trains:
            call.backward(outputs)
    return backends_since(before)


def backends_since(before: Mapping[tuple[str, str], int]) -> str:
    """Return the backends that ran since ``backends.counters()`` was ``before``: "cpp+torch"."""
    counters = backends.counters().items()
    return "+".join(sorted({key[1] for key, count in counters if count > before.get(key, 0)}))


def names(spec: Spec) -> list[str]:
    """Return the names of all contenders there can be for an op."""
    known = [EAGER, COMPILE, AUTOMATIC]
    known += [f"{AUTOMATIC}:{name}" for name in backends.BACKENDS]
    return [*known, *peers_of(spec.name)]


def _reason_against(contender: Contender, call: ContenderCall, *, backward: bool) -> str | None:
    """Run a contender once (this compiles); return ``None`` or in one line why it cannot run."""
    call = call.given_to(contender)
    try:
        # An op without a backward only warns, and then gives no gradient: it must not seem fast.
        with contender.context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = call.forward(contender.function)
            grads = call.backward(outputs) if backward else ()
    except Exception as error:
        # A peer or the compiler may raise anything; the other rows still count.
        return str(error) if isinstance(error, UnsupportedError) else error_line(error)
    missing = sum(grad is None for grad in grads)
    return f"it gives no gradient to {missing} of {len(grads)} inputs" if missing else None


def error_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0]

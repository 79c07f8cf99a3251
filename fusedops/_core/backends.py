"""Which kernel runs an op: the order per device, explicit requests, counters.

The choice is made inside the registered op at run time, so compiled code obeys it too. This
module holds the only global state of the package: the registered kernels, the requested
backend and the counters. On the CPU the everyday case does not come here: the compiled router
(``csrc/router.cpp``) calls the C++ kernel directly. It only calls ``run`` for new shapes and
dtypes, when a backend is requested, or when the dtype is not one of the C++ kernels'.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedops._core import checks, env, extension, kernel_failures
from fusedops._core.capability import compute_capability
from fusedops._core.checks import UnsupportedError
from fusedops._core.contract import Program

_LOG = logging.getLogger("fusedops")

BACKENDS = ("cpp", "cuda", "triton", "torch")
_ORDER = {"cpu": ("cpp", "torch"), "cuda": ("cuda", "triton", "torch")}
# Of the GPUs that the CUDA library has code for (tools/native_flags.py).
_OLDEST_CAPABILITY = (8, 0)
_DOES_NOT_FIT = "its kernel does not compile for this GPU, or does not fit it ({})"
_CPP_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Kernels:
    """Where the implementations of one op are: all share the op's signature."""

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None  # ``None`` for an op without gradient
    triton: str | None  # import path of the module with the Triton launchers
    part_of: str | None  # the op whose function calls this one, if it is no op of its own
    # raises for arguments of the forward that do not fit; ``None`` where the public function has
    # looked at them
    check: Callable[..., None] | None
    contracts: tuple[Program, Program | None]  # of forward and backward


@dataclass(frozen=True)
class Resolution:
    """What would run, and why the backends before it in the order would not."""

    backend: str
    passed_over: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        reasons = "; ".join(f"not {name}: {why}" for name, why in self.passed_over)
        return f"{self.backend} ({reasons})" if reasons else self.backend


@dataclass(frozen=True, eq=False)
class _Request:
    """The backend that a block asks for, or at the bottom of the stack the environment.

    While the latter has a mistake in it and nothing else is asked for, no op runs.
    """

    backend: str | None = None
    mistake: str | None = None


_KERNELS: dict[str, Kernels] = {}
_COUNTS: collections.Counter[tuple[str, str]] = collections.Counter()
_LOGGED: set[tuple[str, str, str]] = set()
_changes = 0  # of the state, other than the arguments, that `resolve` depends on
# The environment, then blocks of use_backend that are open, oldest first: those of several threads,
# tasks or generators end in any order. Reentrant: a generator may be collected, and end, at any
# time.
_REQUESTS_LOCK = threading.RLock()
_requests = [_Request()]


def register(kernels: Kernels) -> None:
    _KERNELS[kernels.name] = kernels


def op_names() -> list[str]:
    """Return the names of all registered ops that are no part of another."""
    return sorted(name for name, kernels in _KERNELS.items() if kernels.part_of is None)


def reference(name: str) -> Callable[..., Any]:
    """Return the reference of an op: torch operations of the arguments of its schema."""
    return _KERNELS[name].forward


def requested() -> str | None:
    """Return the backend that was asked for explicitly, or ``None``."""
    return _requests[-1].backend


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Run every op on one backend inside the block.

    Args:
        name: ``"cpp"``, ``"cuda"``, ``"triton"`` or ``"torch"``; ``None`` is the automatic choice.

    Raises:
        ValueError: if the name is none of these.
        UnsupportedError: from an op inside the block that the backend cannot run, with the reason.

    Note:
        The request holds for the process, not for the thread: the backward of CUDA tensors runs in
        other threads. If blocks overlap, in threads or tasks, the request of the block that was
        entered last and is still open applies; after all blocks no request remains.

    Example:
        >>> import torch, fusedops
        >>> with fusedops.use_backend("torch"):
        ...     fusedops.layer_norm(torch.ones(2, 4), (4,)).sum().item()
        0.0
    """
    if name is not None:
        checks.choice("use_backend", "name", name, BACKENDS)
    request = _Request(name)
    with _REQUESTS_LOCK:
        _requests.append(request)
        _apply_request()
    try:
        yield
    finally:
        with _REQUESTS_LOCK:
            _requests.remove(request)
            _apply_request()


def resolve(name: str, *args: Any, backward: bool = False) -> Resolution:
    """Return which backend would run the op ``name`` on these arguments, and why.

    Args:
        name: an op's name, for example ``"layer_norm"``.
        *args: the arguments of the registered op, in the order of its schema.
        backward: ask for the backward op instead.

    Raises:
        ValueError: if there is no op of this name, or a variable of the environment, such as
            ``FUSEDOPS_BACKEND``, has an invalid value.
        UnsupportedError: if the requested backend cannot run them.
    """
    request = _requests[-1]
    if request.mistake is not None:
        raise ValueError(request.mistake)
    if not isinstance(name, str) or name not in _KERNELS:
        checks.choice("resolve", "name", name, op_names())
    checks.flag("resolve", "backward", backward)
    kernels = _KERNELS[name]
    device = _device(args)
    passed_over: list[tuple[str, str]] = []
    for backend in order(device) if request.backend is None else (request.backend,):
        reason = _unsupported(kernels, backend, device, args, backward)
        if reason is None:
            return Resolution(backend, tuple(passed_over))
        passed_over.append((backend, reason))
    # The last backend of every order is the reference, which runs everywhere.
    raise UnsupportedError(
        f"{name}: backend {request.backend!r} was requested but cannot run it: {reason}"
    )


def run(name: str, args: tuple[Any, ...], backward: bool = False) -> Any:
    """Run the op ``name``, or its backward, on the backend that ``resolve`` names."""
    kernels = _KERNELS[name]
    # The compiled router knows whether such a call was checked before.
    checked = extension.cpu_library() is None and torch.ops.fusedops_native.take_call_is_checked()
    if kernels.check is not None and not backward:
        kernels.check(*args)
    program = kernels.contracts[backward]
    if program is not None and not checked:
        program.check(args)
    choice = resolve(name, *args, backward=backward)
    for backend, reason in choice.passed_over:
        if (name, backend, reason) not in _LOGGED:
            _LOGGED.add((name, backend, reason))
            _LOG.info("%s: runs on %s, not on %s: %s", name, choice.backend, backend, reason)
    _COUNTS[name + "_backward" * backward, choice.backend] += 1
    implementation = _implementation(kernels, choice.backend, backward)
    try:
        return implementation(*args)
    except kernel_failures.exceptions() as error:
        failure = kernel_failures.describe(error)
        if choice.backend != "triton" or failure is None:
            raise
        _COUNTS[name + "_backward" * backward, choice.backend] -= 1
        _step_down(name, args, backward, failure, error)
    return run(name, args, backward)


def _step_down(
    name: str, args: tuple[Any, ...], backward: bool, failure: str, error: Exception
) -> None:
    """Record that a Triton kernel cannot run here, so that the next backend serves the call."""
    op = name + "_backward" * backward
    reason = _DOES_NOT_FIT.format(failure)
    if getattr(torch.ops.fusedops, op).default._schema.is_mutable:
        # An earlier launch of the same call may have written already: the call cannot be repeated.
        raise UnsupportedError(
            f"{op}: {reason}; what it writes to may be incomplete. Start from a checkpoint, with "
            f'FUSEDOPS_BACKEND="torch" or inside fusedops.use_backend("torch")'
        ) from error
    kernel_failures.record(name, backward, args, reason)
    if requested() is None and (op, "triton", reason) not in _LOGGED:
        _LOGGED.add((op, "triton", reason))
        _LOG.warning("%s: does not run on triton from now on for such calls: %s", op, reason)


def changes() -> int:
    """Return a counter of requests: when it changes, call `resolve` again."""
    return _changes


def repeat(name: str, launch: Callable[[], Any]) -> Any:
    """Launch the Triton kernels of an op that ``run`` chose for the same arguments before."""
    _COUNTS[name, "triton"] += 1
    try:
        return launch()
    except kernel_failures.exceptions() as error:
        failure = kernel_failures.describe(error)
        if failure is None:
            raise
        raise UnsupportedError(f"{name}: {_DOES_NOT_FIT.format(failure)}") from error


def order(device: torch.device) -> tuple[str, ...]:
    """Return the backends of a device, the one to try first in front."""
    return _ORDER.get(device.type, ("torch",))


def counters() -> dict[tuple[str, str], int]:
    """Return how often each op ran on each backend: ``{("layer_norm", "cpp"): 12, ...}``.

    Backward ops are counted under ``"layer_norm_backward"``.
    """
    counts = collections.Counter(_COUNTS)
    if extension.cpu_library() is None:
        native = torch.ops.fusedops_native
        for op in (op for name in _KERNELS for op in (name, f"{name}_backward")):
            counts[op, "cpp"] += native.count(op)
    return {key: count for key, count in counts.items() if count}


def reset_counters() -> None:
    """Set all counters of ``counters()`` to zero."""
    _COUNTS.clear()
    if extension.cpu_library() is None:
        torch.ops.fusedops_native.reset_counts()


def _apply_request() -> None:
    """Let the compiled router know whether calls must come to Python."""
    global _changes
    _changes += 1
    if extension.cpu_library() is None:
        asks = requested() is not None or _requests[-1].mistake is not None
        torch.ops.fusedops_native.set_route_to_python(asks)


def tensors_in(args: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of an op, those of lists too, in order."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list):
            yield from (element for element in arg if isinstance(element, torch.Tensor))


def _device(args: tuple[Any, ...]) -> torch.device:
    for tensor in tensors_in(args):
        return tensor.device
    raise TypeError("resolve: args must be those of the registered op, got no torch.Tensor in them")


def _without_autocast(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reference whose operations autocast leaves alone: the rule of the op was applied.

    Torch applies autocast to operations inside of an operator that is written in Python.
    """

    @functools.wraps(reference)
    def run(*args: Any) -> Any:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return run(*args)
        return reference(*args)

    return run


def _implementation(kernels: Kernels, backend: str, backward: bool) -> Callable[..., Any]:
    if backend == "triton" and kernels.triton is not None:
        module = importlib.import_module(kernels.triton)
        return module.backward if backward else module.forward
    reference = kernels.backward if backward else kernels.forward
    if backend == "torch" and reference is not None:
        return _without_autocast(reference)
    native = kernels.name + "_backward" * backward
    return extension.private_operator(f"fusedops_{backend}", native)


def _unsupported(
    kernels: Kernels, backend: str, device: torch.device, args: tuple[Any, ...], backward: bool
) -> str | None:
    if backend == "torch":
        return None
    if backend == "triton":
        return _unsupported_triton(kernels, device, args, backward)
    if device.type != ("cpu" if backend == "cpp" else "cuda"):
        return f"the tensors are on {device}"
    if backend == "cpp":
        missing = extension.cpu_library() or _unsupported_dtype(args, _CPP_DTYPES)
    else:
        missing = _unsupported_gpu(device) or extension.cuda_library()
    if missing is not None:
        return missing
    native = kernels.name + "_backward" * backward
    if not extension.has_operator(f"fusedops_{backend}", native):
        return f"there is no {backend} kernel of {native}"
    return None


def _unsupported_triton(
    kernels: Kernels, device: torch.device, args: tuple[Any, ...], backward: bool
) -> str | None:
    if kernels.triton is None:
        return f"{kernels.name} has no Triton kernel"
    missing = extension.triton_missing()
    if missing is not None:
        return missing
    if device.type != "cuda" and not (device.type == "cpu" and env.triton_interpreted()):
        return f"the tensors are on {device}"
    module = importlib.import_module(kernels.triton)
    data = args[: getattr(module, "DATA_ARGUMENTS", len(args))]
    wrong = _unsupported_dtype(data, (torch.float32, torch.bfloat16, torch.float16))
    if wrong is not None:
        return wrong
    check = getattr(module, "supports_backward" if backward else "supports", None)
    refusal = check(*args) if check is not None else None
    return refusal or kernel_failures.recorded(kernels.name, backward, args)


def _unsupported_gpu(device: torch.device) -> str | None:
    """Return why the CUDA library has no code for a GPU, ``None`` where it has."""
    capability = compute_capability(device)
    if capability is None:
        return "its kernels are compiled for NVIDIA GPUs, this one is not"
    if capability < _OLDEST_CAPABILITY:
        pairs = (_OLDEST_CAPABILITY, capability)
        oldest, present = (".".join(map(str, pair)) for pair in pairs)
        return f"its kernels need compute capability {oldest} or newer, this GPU has {present}"
    return None


def _unsupported_dtype(args: tuple[Any, ...], known: tuple[torch.dtype, ...]) -> str | None:
    for tensor in tensors_in(args):
        if tensor.dtype.is_floating_point and tensor.dtype not in known:
            return f"it has no kernel for {tensor.dtype}"
    return None


def start() -> None:
    """Apply ``FUSEDOPS_BACKEND``; called once, at import.

    What the environment has wrong is the error of the first op that runs (``env.mistakes``).
    """
    for message in env.unknown():
        _LOG.warning(message)
    wrong = env.mistakes(BACKENDS)
    with _REQUESTS_LOCK:
        _requests[0] = _Request(mistake=wrong[0]) if wrong else _Request(env.backend())
        _apply_request()

"""The same experts in a recomputation as in the first pass.

Activation checkpointing runs the forward twice. A product that is one bit different the second time
(another kernel, another batch split, a reduction in another order) may flip a close choice: the
gradient then belongs to a routing that the loss never saw, and shapes that follow the counts may
not even fit. Two ways out, both explicit:

* ``keep_routing(function)`` wraps what is given to ``torch.utils.checkpoint``: its first call
  records the ids that each ``moe_route`` chose, every later one takes them again and computes only
  the weights anew. For ``use_reentrant`` True and False, in eager mode.
* ``routing_contexts`` is a ``context_fn`` for ``use_reentrant=False``: selective checkpointing that
  saves the outputs of ``moe_route`` (``top_k`` ids and weights per token). Compiles.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from fusedops._core import checks

# What is kept of one call of moe_route: ids, mask or None, seed of the jitter or None.
Kept = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
_Result = TypeVar("_Result")


class _Memory:
    """The choices of one checkpointed function, and how far its running call has come."""

    def __init__(self) -> None:
        self.choices: list[Kept] = []
        self.complete = False
        self.place = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.place = 0
        if not self.complete:
            self.choices.clear()
        token = _RUNNING.set((*_RUNNING.get(), self))
        try:
            yield
            self.complete = True
        finally:
            _RUNNING.reset(token)


# The functions that run now, outermost first. Per thread: a backward on CUDA has its own.
_RUNNING: contextvars.ContextVar[tuple[_Memory, ...]] = contextvars.ContextVar(
    "fusedops_routing", default=()
)


def keep_routing(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Make every later call of the returned function route as its first one did.

    Wrap what is given to a checkpoint, once per call of the checkpoint:

        ``checkpoint(keep_routing(layer), x, use_reentrant=False)``

    The first call records the expert ids (and drop masks) of each ``moe_route`` inside; the
    recomputation takes them, in the same order, and computes only the weights from its logits. So
    the weights and their gradient are those of a routing that cannot flip.

    Args:
        function: a layer, or any function that calls ``moe_route``, the same number of times in
            each run.

    Returns:
        A function of the same arguments. It keeps ``top_k`` int32 per token and layer, as long as
        it lives; the checkpoint drops it with the graph.

    Raises:
        TypeError: ``function`` cannot be called.
        RuntimeError: when it runs: a recomputation routes more often, or other numbers of tokens,
            than the first run did.

    Note:
        Nests. Under ``torch.compile`` it changes nothing: there use ``routing_contexts``.

    Example:
        >>> import torch, fusedops
        >>> from torch.utils.checkpoint import checkpoint
        >>> route = lambda logits: fusedops.moe_route(logits, 1).probs
        >>> logits = torch.randn(4, 8, requires_grad=True)
        >>> checkpoint(fusedops.keep_routing(route), logits, use_reentrant=False).sum().backward()
        >>> logits.grad.shape
        torch.Size([4, 8])
    """
    if not callable(function):
        kind = checks.type_name(function)
        raise TypeError(f"keep_routing: function must be callable, got {kind}")
    memory = _Memory()

    def run(*args: Any, **kwargs: Any) -> _Result:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with memory.running():
            return function(*args, **kwargs)

    return run


def routing_contexts(policy: Callable[..., Any] | None = None) -> Any:
    """Return the two contexts of a selective checkpoint that keeps the routing.

        ``checkpoint(layer, x, use_reentrant=False, context_fn=routing_contexts)``

    Args:
        policy: a policy function of ``create_selective_checkpoint_contexts`` that decides about
            all other operators; by default they are recomputed. Give it with
            ``functools.partial(routing_contexts, policy)``.

    Returns:
        What ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` returns.

    Raises:
        TypeError: ``policy`` cannot be called.

    Note:
        Saves ids, weights and mask of every ``moe_route`` and the order of its rows. Works in eager
        mode and under ``torch.compile``.

    Example:
        >>> import torch, fusedops
        >>> from torch.utils.checkpoint import checkpoint
        >>> route = lambda logits: fusedops.moe_route(logits, 1).probs
        >>> probs = checkpoint(route, torch.randn(4, 8, requires_grad=True), use_reentrant=False,
        ...                    context_fn=fusedops.ops.routing_contexts)
        >>> probs.shape
        torch.Size([4, 1])
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    if policy is not None and not callable(policy):
        raise TypeError(
            f"routing_contexts: policy must be a function, got {type(policy).__name__}; "
            "for context_fn give functools.partial(routing_contexts, policy)"
        )

    saved = {torch.ops.fusedops.moe_route.default, torch.ops.fusedops.moe_sort.default}

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if operator in saved:
            return CheckpointPolicy.MUST_SAVE
        if policy is not None:
            return policy(context, operator, *args, **kwargs)
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def recall(logits: torch.Tensor, seed: torch.Tensor | None) -> Kept | None:
    """Return what the running call's first run chose here, if this is a later run."""
    if torch.compiler.is_compiling():
        return None
    found: Kept | None = None
    for memory in _RUNNING.get():
        if not memory.complete:
            continue
        if memory.place >= len(memory.choices):
            raise RuntimeError(
                "keep_routing: the recomputation calls moe_route more often than the first run, "
                f"which called it {len(memory.choices)} times; wrap the function anew for each "
                "call of the checkpoint: checkpoint(keep_routing(layer), x)"
            )
        found = found or memory.choices[memory.place]
        memory.place += 1
    if found is not None and found[0].shape[0] != logits.shape[0]:
        raise RuntimeError(
            f"keep_routing: the recomputation routes {logits.shape[0]} tokens where the first run "
            f"routed {found[0].shape[0]}; wrap the function anew for each call of the checkpoint: "
            "checkpoint(keep_routing(layer), x)"
        )
    return found


def record(ids: torch.Tensor, kept: torch.Tensor | None, seed: torch.Tensor | None) -> None:
    """Tell the functions that run for the first time what was chosen."""
    if torch.compiler.is_compiling():
        return
    for memory in _RUNNING.get():
        if not memory.complete:
            memory.choices.append((ids.detach(), kept, seed))


def recomputing() -> bool:
    """Return whether the running code recomputes a forward pass inside a backward pass."""
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._current_graph_task_id() != -1)

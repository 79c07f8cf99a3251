"""Identical choices of experts in a recomputation and in the first pass.

Activation checkpointing runs the forward twice. A product that differs in one bit the second time
(another kernel, another batch split, a reduction in another order) may flip a close choice: the
gradient then belongs to a routing that the loss did not use, and shapes that depend on the counts
may not fit. Two functions prevent this:

* ``keep_routing(function)`` wraps the function for ``torch.utils.checkpoint``: its first call
  records the ids that each ``moe_route`` chose, and later calls reuse them and compute only the
  weights. For ``use_reentrant`` True and False, in eager mode.
* ``routing_contexts`` is a ``context_fn`` for ``use_reentrant=False``: selective checkpointing that
  saves the outputs of ``moe_route`` (``top_k`` ids and weights per token). It compiles.
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
        self.sums: list[torch.Tensor] = []
        self.complete = False
        self.place = 0
        self.place_of_sum = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.place = self.place_of_sum = 0
        if not self.complete:
            self.choices.clear()
            self.sums.clear()
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
    """Return a function whose later calls reuse the routing of its first call.

    Wrap the function of a checkpoint, once per call of the checkpoint:

        ``checkpoint(keep_routing(layer), x, use_reentrant=False)``

    The first call records the expert ids (and drop masks) of each ``moe_route`` inside; the
    recomputation uses them, in the same order, and computes only the weights from its logits. The
    weights and their gradient therefore belong to the same routing.

    Args:
        function: a layer, or any function that calls ``moe_route``, the same number of times in
            each run.

    Returns:
        A function of the same arguments. It stores ``top_k`` int32 per token and layer; the
        checkpoint frees it with the graph.

    Raises:
        TypeError: ``function`` cannot be called.
        RuntimeError: from the returned function: a recomputation calls ``moe_route`` more often, or
            with other numbers of tokens, than the first run.

    Note:
        Calls may be nested. Under ``torch.compile`` it has no effect: use ``routing_contexts``
        there.

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
        checks.fail_type("keep_routing", "function", "callable", function)
    memory = _Memory()

    def run(*args: Any, **kwargs: Any) -> _Result:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with memory.running():
            return function(*args, **kwargs)

    return run


def routing_contexts(policy: Callable[..., Any] | None = None) -> Any:
    """Return the two contexts of a selective checkpoint that saves the routing.

        ``checkpoint(layer, x, use_reentrant=False, context_fn=routing_contexts)``

    Args:
        policy: a policy function of ``create_selective_checkpoint_contexts`` that decides about all
            other operators; by default they are recomputed. Pass it with
            ``functools.partial(routing_contexts, policy)``.

    Returns:
        The result of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

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


def recall(logits: torch.Tensor) -> Kept | None:
    """Return what the running call's first run chose here, if this is a later run."""
    if torch.compiler.is_compiling():
        return None
    kept: Kept | None = None
    for memory in _RUNNING.get():
        if not memory.complete:
            continue
        if memory.place >= len(memory.choices):
            raise RuntimeError(
                "keep_routing: the recomputation calls moe_route more often than the first run, "
                f"which called it {len(memory.choices)} times; wrap the function at each "
                "call of the checkpoint: checkpoint(keep_routing(layer), x)"
            )
        kept = kept or memory.choices[memory.place]
        memory.place += 1
    if kept is not None and kept[0].shape[0] != logits.shape[0]:
        raise RuntimeError(
            f"keep_routing: the recomputation routes {logits.shape[0]} tokens where the first run "
            f"routed {kept[0].shape[0]}; wrap the function at each call of the checkpoint: "
            "checkpoint(keep_routing(layer), x)"
        )
    return kept


def record(ids: torch.Tensor, kept: torch.Tensor | None, seed: torch.Tensor | None) -> None:
    """Tell the functions that run for the first time what was chosen."""
    if torch.compiler.is_compiling():
        return
    for memory in _RUNNING.get():
        if not memory.complete:
            memory.choices.append((ids.detach(), kept, seed))


def summed_once(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a sum over ranks that depends on the choices alone; a later run communicates nothing.

    ``compute`` is called in the first run of a function that ``keep_routing`` returned; later runs
    get that result.
    """
    if torch.compiler.is_compiling():
        return compute()
    result: torch.Tensor | None = None
    for memory in _RUNNING.get():
        if memory.complete and memory.place_of_sum < len(memory.sums):
            result = memory.sums[memory.place_of_sum]
            memory.place_of_sum += 1
    result = compute() if result is None else result
    for memory in _RUNNING.get():
        if not memory.complete:
            memory.sums.append(result)
    return result


def recomputing() -> bool:
    """Return whether the running code recomputes a forward pass inside a backward pass."""
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._current_graph_task_id() != -1)

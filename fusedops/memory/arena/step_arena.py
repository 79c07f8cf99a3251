"""``use_arena``: a training step's buffers at planned addresses in one block.

``csrc/runtime/arena`` serves the allocations; this file says when a step begins and ends, and when
it is planned. Without ``StepArena.step`` a step begins with a forward of the model with gradients,
and ends with the first forward after an optimizer of the model has stepped: gradient accumulation,
``zero_grad`` and the next batch belong to it.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from fusedops._core import checks, extension
from fusedops._core.checks import UnsupportedError
from fusedops.memory.arena.planning import ALIGNMENT, StepPlan, StepRecord, plan_step
from fusedops.memory.arena.usage import ArenaReport, StepCounts, make_report

_MOST_SHAPES = 16  # with a plan at the same time
_MOST_PLANS = 8  # of the same shapes, until the steps count as different from each other
_MOST_FORWARDS = 1024  # without a step of an optimizer
_SIMILAR = 0.98  # share of the bytes that two steps of one plan have in common
_TOLERATED = 0.02  # share of a step's bytes that may miss their place
_HOPELESS = 0.5  # the same: without a plan the step is as fast
_NO_PLAN = -1


@dataclass
class _Shapes:
    """Steps whose inputs have the same shapes."""

    identity: int
    plan: StepPlan | None = None
    plans: int = 0  # that were made
    settled: bool = False  # whether the plan stays
    misses: int = 0  # successive steps with too many buffers elsewhere
    sizes: list[int] = field(default_factory=list)  # of the last step
    given_up: bool = False


class StepArena:
    """Runs the training steps of a model in one block of memory; ``use_arena`` returns it.

    Example:
        >>> import torch
        >>> from fusedops import memory
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> arena = memory.use_arena(model)
        >>> for _ in range(4):
        ...     with arena.step():
        ...         model(torch.ones(32, 64)).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> arena.report().served_bytes > 0
        True
        >>> arena.remove()
    """

    def __init__(self, model: nn.Module, *, seconds: float) -> None:
        self._model = weakref.ref(model)
        self._seconds = seconds
        devices = (parameter.device for parameter in model.parameters())
        cpu = torch.device("cpu")
        self._device = next((device for device in devices if device.type != "meta"), cpu)
        if self._device.type == "cpu":
            self._native = torch.classes.fusedops_native.StepArena()
        else:
            index = self._device.index
            current = torch.cuda.current_device() if index is None else index
            self._native = torch.classes.fusedops_cuda.StepArena(current)
        self._shapes: OrderedDict[Hashable, _Shapes] = OrderedDict()
        self._open: Hashable = None  # the key of the open step
        self._last: Hashable = None  # the key of the step before it, if that was complete
        self._explicit = False  # whether `step` began the open step
        self._stepped = False  # whether an optimizer has, since the begin of the open step
        self._forwards = 0  # of the open step
        self._steps = 0
        self._identities = 0
        self._note = ""
        self._removed = False
        arena = weakref.ref(self)

        def after_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (current := arena()) is not None:
                current._after_optimizer(optimizer)

        hook = _ForwardHook(arena)
        handles = [
            model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True),
            register_optimizer_step_post_hook(after_optimizer),
        ]
        # Without a reference to the arena, so that it runs when the arena is collected.
        self._detach = weakref.finalize(self, _remove_all, handles, self._native)

    @contextlib.contextmanager
    def step(self, key: Hashable = None) -> Iterator[None]:
        """Run one training step in the arena: all buffers that this thread allocates inside.

        Args:
            key: equal for steps that allocate the same, such as the shape of the batch.

        Raises:
            RuntimeError: a step of this arena or, on this thread, of another one is open.
            TypeError: the key is not hashable.
        """
        if self._removed:
            raise RuntimeError("StepArena: it was removed; use_arena makes another one")
        try:
            hash(key)
        except TypeError:
            checks.fail_type("StepArena.step", "key", "hashable", key)
        if not self._explicit and self._native.is_open_here():
            self._end(complete=self._stepped)  # one that a forward began
        _end_finished_step()
        if not self._begin(("step", key), explicit=True):
            raise RuntimeError(
                "StepArena.step: a step of an arena is open already; end it, or call remove() of "
                "that arena, before another step begins"
            )
        try:
            yield
        except BaseException:
            self._end(complete=False)
            raise
        self._end(complete=True)

    def report(self) -> ArenaReport:
        """Return what the arena holds and what the last step took elsewhere."""
        counts = StepCounts(*self._native.counts())
        planned = [shapes for shapes in self._shapes.values() if shapes.plan is not None]
        plan = planned[-1].plan if planned else None
        return make_report(plan, counts, steps=self._steps, plans=len(planned), note=self._note)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is in the block."""
        return bool(self._native.contains(tensor.untyped_storage().data_ptr()))

    def remove(self) -> None:
        """Let the model's steps allocate as before; tensors in the block keep their values.

        The block is unmapped when the last of them is freed.
        """
        self._removed = True
        self._detach()
        model = self._model()
        if model is not None:
            _arenas.pop(model, None)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        """Begin a step, or note where a forward of the open one begins."""
        native = self._native
        if model is not self._model() or self._removed:
            return  # a copy of the model
        if native.is_open():
            if not native.is_open_here():
                return
            if self._explicit or not self._stepped:
                self._count_forward()
                return
            self._end(complete=True)
        if torch.is_grad_enabled():
            _end_finished_step()
            if self._begin(_key(model, inputs, self._device), explicit=False):
                native.mark()

    def _count_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        self._native.mark()
        self._forwards += 1
        if not self._explicit and self._forwards == _MOST_FORWARDS:
            self._end(complete=False)
            self._give_up(
                f"use_arena: no optimizer with parameters of the model stepped in {_MOST_FORWARDS} "
                "forwards, therefore it is not known where a step ends: run each step in "
                "`with arena.step():`"
            )
            self._detach()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the open step may end with the next forward."""
        model = self._model()
        if self._stepped or model is None or not self._native.is_open_here():
            return
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._stepped = any(id(parameter) in stepped for parameter in model.parameters())

    def _begin(self, key: Hashable, *, explicit: bool) -> bool:
        shapes = self._shapes.get(key)
        plan = _NO_PLAN if shapes is None or shapes.plan is None else shapes.identity
        if not self._native.begin(plan):
            return False
        self._open, self._explicit, self._stepped, self._forwards = key, explicit, False, 0
        return True

    def _end(self, *, complete: bool) -> None:
        """End the open step, and plan the next ones where that is due."""
        self._explicit = False
        if not self._native.end():
            return
        key, self._open = self._open, None
        if not complete:
            self._last = None
            return
        self._steps += 1
        shapes = self._of(key)
        follows, self._last = self._last == key, key
        if not shapes.given_up and self._is_due(shapes):
            self._plan(shapes, follows=follows)

    def _of(self, key: Hashable) -> _Shapes:
        if key not in self._shapes:
            self._identities += 1
            self._shapes[key] = _Shapes(self._identities)
            if len(self._shapes) > _MOST_SHAPES:
                _, oldest = self._shapes.popitem(last=False)
                self._native.drop_plan(oldest.identity)
        self._shapes.move_to_end(key)
        return self._shapes[key]

    def _is_due(self, shapes: _Shapes) -> bool:
        """Return whether the steps of these shapes need a plan, or another one."""
        if not shapes.settled:
            return True
        counts = StepCounts(*self._native.counts())
        missed = counts.unplanned + counts.occupied + counts.kept
        shapes.misses = shapes.misses + 1 if missed > _TOLERATED * counts.bytes else 0
        if shapes.misses < 2:
            return False
        shapes.misses = 0
        if 2 * counts.kept > missed:
            with self._sufficient_memory():
                self._native.renew()  # tensors that the user keeps lie in the block
            return False
        return True

    def _plan(self, shapes: _Shapes, *, follows: bool) -> None:
        record = StepRecord(*self._native.record(False))
        is_new = not shapes.sizes
        similar = not is_new and record.similarity(shapes.sizes) >= _SIMILAR
        shapes.sizes = record.sizes
        if is_new and len(self._shapes) > 1:
            return  # each step may have other shapes: the search pays off for those that recur
        if shapes.plans >= _MOST_PLANS:
            self._give_up_shapes(shapes)
            return
        complete = similar and follows
        if complete:  # the step before, of which all ends are known now
            record = StepRecord(*self._native.record(True))
        seconds = self._seconds if similar else self._seconds / 4
        alignment = ALIGNMENT[self._device.type]
        plan = plan_step(record, complete=complete, seconds=seconds, alignment=alignment)
        shapes.settled, shapes.plans = similar, shapes.plans + 1
        with self._sufficient_memory():
            self._native.set_plan(
                shapes.identity, plan.sizes, plan.offsets, plan.marks, plan.placement.height
            )
            shapes.plan = plan

    @contextlib.contextmanager
    def _sufficient_memory(self) -> Iterator[None]:
        """Let the steps go on without plans where the device has no memory for a block."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            for shapes in self._shapes.values():
                shapes.plan, shapes.settled, shapes.given_up = None, True, True
            self._give_up(
                f"use_arena: {self._device} has no memory for the block of a step, therefore the "
                f"steps run without the arena: {str(error).splitlines()[0]}"
            )

    def _give_up_shapes(self, shapes: _Shapes) -> None:
        """Keep the last plan of steps that differ from each other, or none if it is of no use."""
        counts = StepCounts(*self._native.counts())
        share = 1.0 - (counts.served + counts.outside) / max(counts.bytes, 1)
        shapes.settled = shapes.given_up = True
        if share > _HOPELESS:
            self._native.drop_plan(shapes.identity)
            shapes.plan = None
            self._give_up(
                f"use_arena: steps of the same input shapes allocate different buffers "
                f"({share:.0%} of the bytes of the last one had no place in the plan): they run "
                "without the arena"
            )

    def _give_up(self, note: str) -> None:
        if not self._note:
            warnings.warn(note, stacklevel=2)
        self._note = note


def use_arena(model: nn.Module, *, seconds: float = 1.0) -> StepArena:
    """Let the training steps of a model place their buffers at planned addresses in one block.

    The first step is recorded. Later steps of the same shapes get activations, temporaries and
    gradients at planned offsets of a block that is obtained once. No value changes: a buffer gets
    its place only while no live buffer occupies it, and memory outside of the block otherwise.

    Args:
        model: that is trained on the CPU or on one GPU, by optimizers of torch or in
            ``StepArena.step``.
        seconds: how long the search for a plan may take, after each of the first steps.

    Returns:
        The arena, with ``step``, ``report`` and ``remove``.

    Raises:
        TypeError: the model is no module.
        ValueError: it, a module in it or one around it has an arena already.
        UnsupportedError: parameters are on several devices, or on another one than a CPU or a
            GPU of CUDA, or the compiled library is missing.
        RuntimeError: the allocator of the GPU is not torch's caching allocator.

    Note:
        On a GPU the block is memory of torch's caching allocator, which counts it as allocated
        from the first planned step on. The step belongs to the stream on which it begins. Buffers
        of other streams, of CUDA graphs and of memory pools lie outside.

    Example:
        >>> import torch
        >>> from fusedops import memory
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> arena = memory.use_arena(model)
        >>> for _ in range(5):
        ...     model(torch.ones(32, 64)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> print(arena.report().fragmentation < 0.02)
        True
        >>> arena.remove()
    """
    checks.module("use_arena", model)
    checks.finite("use_arena", "seconds", seconds, least=0.0)
    for other in list(_arenas):
        if other is model:
            raise ValueError("use_arena: the model has an arena already; call its remove() first")
        if any(module is other for module in model.modules()) or any(
            module is model for module in other.modules()
        ):
            raise ValueError(
                f"use_arena: a {type(other).__name__} inside or around the model has an arena "
                "already; use one arena for the outermost model"
            )
    reason = _unsupported_reason(model)
    if reason is not None:
        raise UnsupportedError(f"use_arena: {reason}")
    arena = StepArena(model, seconds=seconds)
    _arenas[model] = arena
    return arena


def _unsupported_reason(model: nn.Module) -> str | None:
    """Return why a model can have no arena, or ``None``."""
    first: tuple[str, torch.device] | None = None
    for name, parameter in model.named_parameters():
        device = parameter.device
        if device.type == "meta":
            continue
        if device.type not in ALIGNMENT:
            return f"parameters must be on the CPU or a GPU of CUDA, got {name} on {device}"
        if first is not None and device != first[1]:
            return (
                f"parameters must be on one device, got {first[0]} on {first[1]} and {name} on "
                f"{device}: use an arena for each part that is trained on a device of its own"
            )
        first = first or (name, device)
    on_gpu = first is not None and first[1].type == "cuda"
    reason = extension.cuda_library() if on_gpu else extension.cpu_library()
    if reason is not None:
        return f"it needs the compiled library: {reason}"
    if on_gpu and not _has_gpu_arena():
        return (
            f"it does not know the CUDA allocator of torch {torch.__version__}: install a newer "
            "fusedops"
        )
    return None


def _has_gpu_arena() -> bool:
    try:
        return torch.classes.fusedops_cuda.StepArena is not None
    except RuntimeError:  # what torch raises where there is no such class
        return False


_arenas: weakref.WeakKeyDictionary[nn.Module, StepArena] = weakref.WeakKeyDictionary()


def _end_finished_step() -> None:
    """End this thread's open step of any arena, if its optimizer has stepped."""
    for arena in list(_arenas.values()):
        if arena._stepped and not arena._explicit and arena._native.is_open_here():
            arena._end(complete=True)


class _ForwardHook:
    """Runs before each forward of the model; a copy of the model has one without an arena."""

    def __init__(self, arena: weakref.ref[StepArena] | None = None) -> None:
        self._arena = arena

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        arena = None if self._arena is None else self._arena()
        if arena is not None:
            arena._before_forward(module, (args, kwargs))

    def __reduce__(self) -> tuple[type[_ForwardHook], tuple[()]]:
        return _ForwardHook, ()


def _remove_all(handles: list[Any], native: Any) -> None:
    for handle in handles:
        handle.remove()
    native.close()


def _key(model: nn.Module, inputs: Any, device: torch.device) -> Hashable:
    """Return what steps have in common that allocate the same."""
    leaves = tuple(
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, torch.Tensor)
        else leaf
        if isinstance(leaf, (bool, str, type(None)))
        else type(leaf)  # numbers may differ in each step
        for leaf in pytree.tree_leaves(inputs)
    )
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return ("forward", leaves, model.training, autocast)

"""AdamW with master weights and moments in host memory, which are updated during the backward.

The arithmetic, the options and the states are those of ``AdamW``; this file decides where they are
stored, when a step begins, and when it takes effect.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.checks import UnsupportedError
from fusedops.ops.square_sums import square_sums
from fusedops.optim import _shards, _step_queue
from fusedops.optim._overlap import STATES, Bucket, GradientSnapshot, Job, Slot, Workers, host_like
from fusedops.optim._state import Storage, new_state
from fusedops.optim._step_queue import Basis
from fusedops.optim.adamw import AdamW, Member
from fusedops.optim.norms import total
from fusedops.runtime.copy_engine import (
    CopyEngine,
    CopyError,
    HostCopyEngine,
    copy_engine,
    finish_all,
)
from fusedops.runtime.host_memory import available_bytes

# Buckets, each with some of its slots.
ChosenSlots = list[tuple[Bucket, list[Slot]]]

_WORKERS = 2  # one copies while the other's bucket is stepped


class OffloadedAdamW(AdamW):
    """AdamW with master weights and moments in host memory.

    Parameters and gradients stay on their device, in any dtype. When the backward has produced the
    gradients of a bucket, they are copied to the host, and the step of the bucket is computed there
    at once, into a second copy of the state. ``step`` waits for the last bucket, computes the norm
    and makes the new state current. If the norm requires clipping, or a gradient or a learning rate
    has changed, the steps are recomputed with the right numbers; if the step must be skipped, they
    are discarded. The result has the bits of ``overlap=False``, and those of
    ``AdamW(master_weights=True)`` on the same processor. With ``overlap=False`` steps are computed
    in place, in half of the memory.

    Args:
        params: as ``AdamW``; all on one device, except for parameters in host memory, which are
            updated there.
        lr, betas, eps, weight_decay, amsgrad: as ``AdamW``.
        overlap: compute steps during the backward, otherwise in ``step``. In a job of several
            processes the gradients of plain parameters are final only after the backward: their
            steps begin in ``step``.
        device_fraction: fraction of the parameters, by bytes and from the first on, whose states
            stay on the device: their gradients are computed last, so that their steps could not
            overlap.
        bucket_bytes: parameters of about this many bytes are copied and updated together.
        threads: number of threads of the step queue, at most 1024; by default as many as torch
            uses.
        engine: performs the copies; by default the engine of the device.
        options: the other options of ``AdamW``; ``master_weights`` applies to the states that stay
            on the device.

    Raises:
        MemoryError: the host has less memory than this needs; nothing was allocated.
        RuntimeError: the system has no more threads.
        UnsupportedError: the compiled library is missing.
        ValueError: as ``AdamW``; or parameters are on several devices.
        CopyError: from ``step``, a copy failed. The state of the optimizer is unchanged. If a copy
            to the device failed, some parameters may be new: ``restore`` writes all of them. With
            ``overlap=False`` the step takes effect before these copies, and ``restore`` finishes
            it.

    Note:
        Host memory contains master weights and moments twice, the current state and the next one:
        24 bytes per parameter in float32, and one copy of the parameter. With ``overlap=False`` it
        contains them once, 12 bytes, and the copy, which is also the staging memory of the
        gradient. Between the backward and ``step`` gradients may be changed in place or replaced,
        and parameters at any time: this is detected, and their steps are recomputed from them. An
        in-place operation on ``.data`` is not detected; after one on that of a parameter call
        ``reload_model_params``. A forked process has a copy of the optimizer, which starts its own
        threads when it first needs them.

    Example:
        >>> import torch, fusedops.optim
        >>> model = torch.nn.Linear(4, 2).bfloat16()
        >>> optimizer = fusedops.optim.OffloadedAdamW(model.parameters(), max_norm=1.0)
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()  # steps begin here
        >>> optimizer.step()
        >>> optimizer.close()
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        overlap: bool = True,
        device_fraction: float = 0.0,
        bucket_bytes: int = 32 << 20,
        threads: int | None = None,
        engine: CopyEngine | None = None,
        **options: Any,
    ) -> None:
        op = type(self).__name__
        checks.flag(op, "overlap", overlap)
        checks.probability(op, "device_fraction", device_fraction)
        checks.integer(op, "bucket_bytes", bucket_bytes, least=1)
        if engine is not None and not isinstance(engine, CopyEngine):
            checks.fail_type(op, "engine", "a CopyEngine (fusedops.runtime.copy_engine)", engine)
        if options.get("capturable"):
            raise UnsupportedError(f"{op}: capturable must be False: steps are made on the host")
        if threads is not None:
            checks.integer(op, "threads", threads, least=1)
        reason = _step_queue.missing()
        if reason is not None:
            raise UnsupportedError(f"{op}: the step queue cannot run: {reason}")
        most = _step_queue.most_threads()
        if threads is not None and threads > most:
            checks.fail(op, "threads", f"at most {most}", threads)
        self._overlap = overlap
        self._device_fraction = device_fraction
        self._bucket_bytes = bucket_bytes
        self._num_threads = threads or min(torch.get_num_threads(), most)
        self._given_engine = engine
        self._workers: Workers | None = None
        self._slots: dict[torch.Tensor, tuple[Bucket, Slot]] = {}
        self._buckets: list[Bucket] = []
        self._hooks: list[Any] = []
        self._lock = threading.Lock()
        self._calls: dict[torch.Tensor, int] = {}  # of the hook, since the last step
        self._passes = 1  # how many backwards there were before the last step
        self._expected_factor = 1.0  # of the gradients
        self._speculates = True
        options.setdefault("master_weights", True)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._attach()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as ``AdamW``; its states are allocated now."""
        super().add_param_group(param_group)
        if self._workers is not None:
            try:
                self._attach()
            except (MemoryError, ValueError):
                self.param_groups.pop()
                self._attach()
                raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as ``AdamW``. Steps that have begun are dropped."""
        self._drop()
        super().load_state_dict(state_dict)
        self._attach()

    def reload_model_params(self) -> None:
        """Let the master weights follow parameters that were changed outside of the optimizer.

        ``step`` does so too, except for in-place operations on ``param.data`` (``clamp_``,
        ``copy_``), which leave no trace: call this after them. Elements that a master rounds to are
        unchanged: it keeps the bits that its parameter does not have. Steps that have begun are
        dropped.
        """
        self._drop()
        super().reload_model_params()
        self._note_parameters()

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that it has allocated: states, copies and staging."""
        kept = [
            value
            for _, slot in self._slots.values()
            for state in (slot.state, slot.shadow)
            for value in (*state.values(), slot.copy)
            if isinstance(value, torch.Tensor)
        ]
        memory = {_shards.local(tensor).data_ptr(): _shards.local(tensor).nbytes for tensor in kept}
        return sum(memory.values()) + _WORKERS * self._staging_bytes()

    def restore(self) -> None:
        """Overwrite every offloaded parameter with its master."""
        _shards.count_writes(self._slots)
        try:
            for _, slot in self._slots.values():
                slot.copy.copy_(_shards.local(slot.state["master"]))
                self._engine.finish(self._push(slot))
        finally:
            self._note_parameters()

    def close(self) -> None:
        """End the threads; a step that has begun and was not asked for is dropped."""
        self._drop()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__}: threads cannot be pickled or copied; use state_dict()"
        )

    def _attach(self) -> None:
        """Make states, slots, buckets and workers for the parameters as they are now."""
        self._drop()
        params = [param for group in self.param_groups for param in group["params"]]
        self._offloaded = _to_offload(params, self._device_fraction)
        devices = {param.device for param in self._offloaded}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            checks.fail(type(self).__name__, "params", "on one device", names)
        self._device = devices.pop() if devices else torch.device("cpu")
        engine = self._new_engine() if self._given_engine is None else self._given_engine
        self._require_memory([param for param in params if not self.state.get(param)])
        for group in self.param_groups:
            for param in group["params"]:
                if not self.state.get(param):
                    storage, amsgrad = self._storage(param), group["amsgrad"]
                    self.state[param] = new_state(param, storage, amsgrad=amsgrad)
        self._engine = engine
        self._buckets = self._new_buckets()
        self._slots = {
            slot.param: (bucket, slot) for bucket in self._buckets for slot in bucket.slots
        }
        if self._workers is not None:
            self._workers.close()
        self._start_workers()
        self._listen()

    def _start_workers(self) -> None:
        self._workers = Workers(
            self._engine, workers=_WORKERS, threads=self._num_threads, staging=self._staging_bytes()
        )
        weakref.finalize(self, self._workers.close)

    def _discard_if_forked(self) -> bool:
        """Forget the jobs of another process, whose threads would end them; return if there is one.

        Such jobs wrote to the shadows alone: the states are those before the step.
        """
        if self._workers is None or not self._workers.is_forked:
            return False
        for bucket in self._buckets:
            bucket.forget()
        return True

    def _staging_bytes(self) -> int:
        """Return the bytes of a worker's memory; without overlap gradients wait in the slots."""
        if not self._overlap:
            return 0
        return max((bucket.staging_bytes for bucket in self._buckets), default=1)

    def _new_buckets(self) -> list[Bucket]:
        """Return the buckets; in the first are the last parameters, whose gradients come first."""
        buckets = []
        for group in reversed(self.param_groups):
            slots: list[Slot] = []
            nbytes = 0
            for index, param in reversed(list(enumerate(group["params"]))):
                if param not in self._offloaded:
                    continue
                slots.append(self._new_slot(group, index, param))
                nbytes += param.numel() * param.element_size()
                if nbytes >= self._bucket_bytes:
                    buckets.append(Bucket(group, slots))
                    slots, nbytes = [], 0
            if slots:
                buckets.append(Bucket(group, slots))
        return buckets

    def _new_slot(self, group: dict[str, Any], index: int, param: Any) -> Slot:
        state = self.state[param]
        shadow = {
            name: torch.zeros_like(value)
            for name, value in state.items()
            if self._overlap and name in STATES
        }
        master = _shards.local(state["master"])
        copy = host_like(self._engine, master, param.dtype)
        return Slot(param, index, state, shadow, copy, self._draw(group, index, param))

    def _require_memory(self, params: list[torch.Tensor]) -> None:
        """Raise, before anything is allocated, where it would not fit."""
        needed = 0
        for param in params:
            if param in self._offloaded:
                storage = self._storage(param)
                assert storage.master is not None
                state = storage.master.itemsize + 3 * storage.moments.itemsize
                states = 2 * state if self._overlap else state
                needed += _shards.local(param).numel() * (states + param.element_size())
        available = available_bytes()
        if available is not None and needed > available:
            raise MemoryError(
                f"{type(self).__name__}: masters, moments and copies of the parameters take "
                f"{needed / 2**30:.2f} GiB of host memory, and {available / 2**30:.2f} GiB are "
                "available: raise device_fraction, use state_dtype=torch.bfloat16 or "
                "overlap=False, or shard"
            )

    def _listen(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if not self._overlap:
            return
        for param in self._slots:
            if param.requires_grad and _shards.is_final(param):
                hook = param.register_post_accumulate_grad_hook(_weak(self._arrived))
                self._hooks.append(hook)

    def _storage(self, param: torch.Tensor) -> Storage:
        return self.policy.storage(param, offloaded=param in self._offloaded)

    def _had(self, param: torch.Tensor) -> tuple[torch.device, torch.dtype] | None:
        if param not in self._slots:
            return None
        _, slot = self._slots[param]
        return self._device, slot.copy.dtype

    def _arrived(self, param: Any) -> None:
        """Note that a backward has accumulated a gradient; begin when a bucket is complete."""
        with self._lock:
            if self._discard_if_forked():
                self._start_workers()
            grad, (bucket, slot) = param.grad, self._slots[param]
            self._calls[param] = self._calls.get(param, 0) + 1
            # The pass after which the last step came.
            is_last = self._calls[param] == self._passes and bucket.job is None
            if not is_last or grad is None or grad.layout is not torch.strided:
                return
            if _shards.placed_otherwise(grad, param):
                return
            bucket.arrived[slot] = GradientSnapshot.of(param, self._engine.mark())
            if len(bucket.arrived) == len(bucket.slots):
                self._read_changed(bucket)
                self._begin(bucket, self._expected_factor, steps=self._speculates)

    def _begin(self, bucket: Bucket, factor: float, *, steps: bool) -> None:
        gradients = {slot: bucket.arrived[slot] for slot in bucket.slots if slot in bucket.arrived}
        job = Job(gradients, self._basis(bucket.group, list(gradients), factor), steps)
        assert self._workers is not None, "closed"
        self._workers.start(bucket, job)

    def _basis(self, group: dict[str, Any], slots: list[Slot], factor: float) -> Basis:
        return Basis(
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=group["eps"],
            bias_correction=group["bias_correction"],
            grad_factor=-factor if group["maximize"] else factor,
            decays=tuple(self._decay(group, slot.index) for slot in slots),
            steps=tuple(float(slot.state["step"]) + 1.0 for slot in slots),
        )

    def _step_all(self, members: list[Member]) -> None:
        if self._workers is None:
            raise RuntimeError(f"{type(self).__name__}: step after close")
        if self._discard_if_forked():
            self._start_workers()
        try:
            self._step_offloaded(members)
        finally:
            self._forget()

    def _step_offloaded(self, members: list[Member]) -> None:
        chosen = self._offloaded_members(members)
        self._finish(self._buckets)
        for bucket in self._buckets:
            if self._read_changed(bucket):
                bucket.forget()  # its job began with other masters
        self._sum_changed(chosen)
        sums = self._sums(members, chosen)
        factor, found_inf = self._scaling(
            # Gradients were cut as their parameters are, and sums that were pending have been made.
            lambda: total(sums, [param for *_, param in members]).sqrt()
        )
        if found_inf is not None and bool(found_inf != 0):
            return
        exact = 1.0 if factor is None else float(factor)
        self._step_outdated(chosen, exact)
        self._expect(exact)
        on_device = [member for member in members if member[2] not in self._slots]
        if on_device:
            self._step_collected(self._collect(on_device), factor, found_inf)
        _shards.count_writes(param for *_, param in members)
        self._commit([slot for _, slots in chosen for slot in slots])

    def _offloaded_members(self, members: list[Member]) -> ChosenSlots:
        """Return the buckets of members that are offloaded, with their slots."""
        params = {param for *_, param in members}
        chosen = (
            (bucket, [slot for slot in bucket.slots if slot.param in params])
            for bucket in self._buckets
        )
        return [(bucket, slots) for bucket, slots in chosen if slots]

    def _read_changed(self, bucket: Bucket) -> bool:
        """Let masters follow parameters that were written to; return whether one had to."""
        changed = [slot.read_changed() for slot in bucket.slots]
        return any(changed)

    def _note_parameters(self) -> None:
        """Note that no parameter was written to by others until now."""
        for _, slot in self._slots.values():
            slot.seen = _shards.trace(slot.param)

    def _sum_changed(self, chosen: ChosenSlots) -> None:
        """Sum the squares of gradients that are not those of the last job."""
        changed = [(bucket, slots) for bucket, slots in chosen if not bucket.has_sums(slots)]
        self._repeat(changed, self._expected_factor, steps=self._overlap and self._speculates)

    def _step_outdated(self, chosen: ChosenSlots, factor: float) -> None:
        """Make the steps that were not made, or were made with other numbers."""
        outdated = [
            (bucket, slots)
            for bucket, slots in chosen
            if not (job := bucket.job)
            or not job.steps
            or job.basis != self._basis(bucket.group, slots, factor)
        ]
        self._repeat(outdated, factor, steps=True)

    def _expect(self, factor: float) -> None:
        """Let the next backward step with this factor; one that clipped says nothing of it."""
        scale = getattr(self, "grad_scale", None)
        self._speculates = factor == (1.0 if scale is None else 1.0 / float(scale))
        if self._speculates:
            self._expected_factor = factor

    def _commit(self, slots: list[Slot]) -> None:
        """Copy the parameters to the device and let the steps count."""
        if not self._overlap:  # the masters are new, whatever becomes of the copies
            for slot in slots:
                slot.commit()
        try:
            finish_all(self._engine, [partial(self._push, slot) for slot in slots])
        except CopyError as error:
            if self._overlap:
                raise
            raise CopyError(
                f"{error}; the step was made: restore() writes the parameters from their masters"
            ) from error
        finally:
            self._note_parameters()
        if self._overlap:
            for slot in slots:
                slot.commit()

    def _push(self, slot: Slot) -> Any:
        """Start the copy of a parameter to the device, after the kernels that read it."""
        return self._engine.copy(slot.copy, _shards.local(slot.param), to_host=False)

    def _new_engine(self) -> CopyEngine:
        """Return who copies: on the host the threads that ask for copies make them."""
        if self._device.type not in ("cuda", "cpu"):
            name = type(self).__name__
            raise ValueError(f"{name}: parameters must be on cuda or cpu, got {self._device}")
        host = self._device.type == "cpu"
        return HostCopyEngine(workers=0) if host else copy_engine(self._device)

    def _repeat(self, chosen: ChosenSlots, factor: float, *, steps: bool) -> None:
        mark = self._engine.mark()
        for bucket, slots in chosen:
            bucket.arrived = {slot: GradientSnapshot.of(slot.param, mark) for slot in slots}
            self._begin(bucket, factor, steps=steps)
        self._finish([bucket for bucket, _ in chosen])
        errors = list(filter(None, (bucket.take_error() for bucket, _ in chosen)))
        if errors:
            # Not from a variable: its traceback refers to this frame, and would keep the gradients.
            raise errors.pop(0)

    def _sums(self, members: list[Member], chosen: ChosenSlots) -> torch.Tensor:
        """Return the sum of squares of each member's local gradient, on the host."""
        sums: dict[torch.Tensor, float] = {}
        for bucket, slots in chosen:
            assert bucket.job is not None
            sums |= zip((slot.param for slot in slots), bucket.job.sums, strict=True)
        kept = [param for *_, param in members if param not in sums]
        if kept:
            grads = [_shards.local(_shards.placed_like(param.grad, param)) for param in kept]
            sums |= zip(kept, square_sums(grads).tolist(), strict=True)
        return torch.tensor([sums[param] for *_, param in members], dtype=torch.float64)

    def _finish(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            if bucket.job is not None:
                bucket.job.finished.wait()

    def _drop(self) -> None:
        """Wait for what has begun, and make nothing of it."""
        self._discard_if_forked()
        self._forget()

    def _forget(self) -> None:
        self._finish(self._buckets)
        with self._lock:
            for bucket in self._buckets:
                bucket.forget()
            self._passes = max(self._calls.values(), default=self._passes)
            self._calls.clear()


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """Return what calls a method of an optimizer for as long as that lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call


def _to_offload(params: list[torch.Tensor], device_fraction: float) -> set[torch.Tensor]:
    """Return the parameters after the first ones that make up a fraction of all bytes."""
    if any(param.device.type not in ("cpu", "meta") for param in params):
        # Parameters that are on the host (stored experts) are stepped there.
        params = [param for param in params if param.device.type != "cpu"]
    sizes = [param.numel() * param.element_size() for param in params]
    kept, allowed = 0, device_fraction * sum(sizes)
    offloaded = set()
    for param, size in zip(params, sizes, strict=True):
        if kept + size <= allowed:
            kept += size
        else:
            offloaded.add(param)
    return offloaded

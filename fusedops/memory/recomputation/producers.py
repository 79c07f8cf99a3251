"""Which operator produced a tensor, and tensors that are recomputed by calling it again.

A dispatch mode records for all memory the operator that produced it and the name of the result.
Views have the producer of their memory; memory that is written to in place has none to call again.
The mode costs some microseconds for each operator, so it runs only for rules by operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from fusedops.memory.policy import updates_statistics
from fusedops.memory.saved_tensors import Arguments, Pack, SharedStorage, is_plain, memory_of


class RecordedCall:
    """An operator and its arguments, to be called again."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func = func
        self._given = args, kwargs
        self._versions = _versions(args, kwargs)
        self._arguments: Arguments | None = None
        self.sources: list[weakref.ref[RecomputedStorage]] = []  # where the results go

    @property
    def is_intact(self) -> bool:
        """Whether the arguments are those of the call: saved, or not written to since."""
        return self._arguments is not None or self._versions == _versions(*self._given)

    def hold(self, pack: Pack) -> None:
        """Let the arguments be kept as what the graph saves is."""
        if self._arguments is None:
            self._arguments = Arguments(*self._given, pack)
            del self._given

    def recompute(self) -> None:
        """Call the operator and hand out its results."""
        assert self._arguments is not None
        args, kwargs = self._arguments.take()
        for leaf in pytree.tree_leaves((args, kwargs)):
            if _is_freed(leaf):
                raise RuntimeError(
                    f"recompute: a result of {self.func} is needed again while FSDP2 has freed "
                    f"its weight {list(leaf.shape)}: another block reads it than the one whose "
                    "weight it is. Leave this operator out of ops=, or call "
                    "fully_shard(..., reshard_after_forward=False) for that block"
                )
        with torch.no_grad(), torch._C._DisableAutocast():
            result = self.func(*args, **kwargs)
        results = (result,) if isinstance(result, torch.Tensor) else result
        for reference in self.sources:
            source = reference()
            if source is not None:
                source.receive(results)


def _versions(args: Any, kwargs: Any) -> list[int]:
    """Return how often each tensor among the arguments was written to."""
    leaves = pytree.tree_leaves((args, kwargs))
    return [leaf._version for leaf in leaves if is_plain(leaf) and not leaf.is_inference()]


def _is_freed(given: Any) -> bool:
    """Whether a tensor has no memory any more: a kernel would read what is not there."""
    if not isinstance(given, torch.Tensor) or is_traceable_wrapper_subclass(given):
        return False
    return given.numel() > 0 and not given.is_meta and given.untyped_storage().nbytes() == 0


class RecomputedStorage(SharedStorage):
    """A result that is recomputed by calling its operator once more; ``pack`` keeps its inputs."""

    def __init__(self, tensor: torch.Tensor, producer: Producer, pack: Pack) -> None:
        assert producer.call is not None
        producer.call.hold(pack)
        super().__init__(tensor)
        self._call, self._place = producer.call, producer.place
        self._call.sources.append(weakref.ref(self))

    def receive(self, results: Sequence[torch.Tensor]) -> None:
        """Take this result of a call, if somebody waits for it."""
        if self.waiting:
            self._value = results[self._place]

    def make(self) -> torch.Tensor:
        """Call the operator."""
        self._call.recompute()
        assert self._value is not None
        return self._value


class Producer(NamedTuple):
    """The operator that produced some memory."""

    op: str  # ``namespace::name``
    output: str | None  # the result's name, if it has one
    call: RecordedCall | None  # to make it again, where a rule may ask for that
    place: int  # of the result among those of the operator
    dtype: torch.dtype  # of the result

    def can_repeat(self, tensor: torch.Tensor) -> bool:
        """Return whether a second call makes a tensor in this memory."""
        return self.call is not None and self.dtype == tensor.dtype and self.call.is_intact


class ProducerTracker(TorchDispatchMode):
    """Records which operator produced which memory while it is entered.

    ``repeats`` returns whether results of the operator of a name may have to be recomputed.
    """

    def __init__(self, repeats: Callable[[str], bool]) -> None:
        super().__init__()
        self._repeats = repeats
        self._found: dict[int, tuple[StorageWeakRef, Producer]] = {}

    def of(self, tensor: torch.Tensor) -> Producer | None:
        """Return the producer of a tensor's memory, if it was seen."""
        entry = self._found.get(tensor.untyped_storage()._cdata)
        return entry[1] if entry is not None else None

    def forget(self) -> None:
        """Drop what is gone."""
        gone = [key for key, (memory, _) in self._found.items() if memory.expired()]
        for key in gone:
            del self._found[key]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        op = func._schema.name
        once = torch.Tag.nondeterministic_seeded in func.tags or updates_statistics(func)
        repeatable = not (func._schema.is_mutable or once) and self._repeats(op)
        call = RecordedCall(func, args, kwargs) if repeatable else None
        for tensor, name, place in new_results(func, args, kwargs, result):
            storage = tensor.untyped_storage()
            self._found[storage._cdata] = (
                StorageWeakRef(storage),
                Producer(op, name, call, place, tensor.dtype),
            )
        return result


def new_results(
    func: Any, args: Any, kwargs: Any, result: Any
) -> list[tuple[torch.Tensor, str | None, int]]:
    """Return each tensor that an operator wrote, with the result's name and place.

    Views are not among them, nor results that lie in the memory of an argument unless the
    operator wrote there.
    """
    given = memory_of(leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_plain(leaf))
    tensors: list[tuple[torch.Tensor, str | None, int]] = []
    tensors += [(value, None, 0) for value in written_arguments(func, args, kwargs)]
    results = result if isinstance(result, (tuple, list)) else (result,)
    for place, (described, value) in enumerate(zip(func._schema.returns, results, strict=False)):
        if is_plain(value) and value.untyped_storage()._cdata not in given:
            tensors.append((value, described.name or None, place))
    return tensors


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to in place, as its schema says."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    given = {
        argument.name: value for argument, value in zip(schema.arguments, args, strict=False)
    } | kwargs
    written = (given.get(argument.name) for argument in schema.arguments if argument.is_write)
    return [leaf for value in written for leaf in pytree.tree_leaves(value) if is_plain(leaf)]

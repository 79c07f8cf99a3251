"""Rules for tensors that a forward saves for the backward, and which rule wins.

A *rule* says one of three things (save, recompute, offload) about the tensors that it names: by
module, by operator and the name of its result, or by a function. A *policy* is a list of rules.
Nothing here changes a model; ``apply.py`` does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedops._core import checks

SAVE, RECOMPUTE, OFFLOAD, TILE = "save", "recompute", "offload", "tile"

Modules = str | type[nn.Module] | Iterable[str | type[nn.Module]]
Ops = Any  # a name, an operator of torch.ops, or several of them


@dataclass(frozen=True)
class SavedTensorInfo:
    """What a rule may know of a tensor that is kept for the backward.

    Attributes:
        module: name of the innermost module of the policy that was running, ``""`` for the model.
        op: the operator that made it, ``"fusedops::mlp"``; ``None`` where that is not known.
        output: the name of that result in the operator's schema, ``"preactivation"``; ``None``
            where it has none.
        shape: its sizes.
        dtype: its dtype.
        device: where it is.
        nbytes: the bytes of its elements.
    """

    module: str
    op: str | None
    output: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int


@dataclass(frozen=True)
class CommunicationOptions:
    """What recomputation does with communication and its inputs: see ``recompute``."""

    mp_comm_recompute: bool = True
    parallel_optimizer_comm_recompute: bool | None = None
    recompute_slice_activation: bool = False
    group: Any = None


@dataclass(frozen=True)
class MemoryRule:
    """One sentence of a policy; made by ``save``, ``recompute``, ``offload`` and ``tile``."""

    treatment: str
    modules: tuple[str | type[nn.Module], ...] = ()
    ops: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    when: Callable[[SavedTensorInfo], bool] | None = None
    communication: CommunicationOptions = CommunicationOptions()
    tile_tokens: int | None = None

    @property
    def of_tensors(self) -> bool:
        """Whether it looks at single tensors, not only at the module that runs."""
        return bool(self.ops or self.outputs or self.when is not None)

    def __deepcopy__(self, memo: Any) -> MemoryRule:
        """Return the rule: nothing of it changes, and a process group has no copy."""
        return self

    def names_module(self, name: str, module: nn.Module) -> bool:
        """Return whether its ``modules`` name this one; a rule without them names none."""
        return any(
            _matches(pattern, name) if isinstance(pattern, str) else isinstance(module, pattern)
            for pattern in self.modules
        )

    def fits(self, saved: SavedTensorInfo) -> bool:
        """Return whether a tensor is one of those that its other words name."""
        if self.ops and saved.op not in self.ops:
            return False
        if self.outputs and saved.output not in self.outputs:
            return False
        return self.when is None or bool(self.when(saved))

    def __str__(self) -> str:
        modules = [repr(p) if isinstance(p, str) else p.__name__ for p in self.modules]
        words = [
            f"modules={', '.join(modules)}" if modules else "",
            f"ops={', '.join(self.ops)}" if self.ops else "",
            f"outputs={', '.join(self.outputs)}" if self.outputs else "",
            f"when={getattr(self.when, '__name__', 'given')}" if self.when else "",
            f"tile_tokens={self.tile_tokens}" if self.tile_tokens else "",
        ]
        return f"{self.treatment}({', '.join(word for word in words if word)})"


def save(
    modules: Modules = (),
    *,
    ops: Ops = (),
    outputs: str | Iterable[str] = (),
    when: Callable[[SavedTensorInfo], bool] | None = None,
) -> MemoryRule:
    """Save tensors unchanged: inside a recomputed module, or against an earlier rule.

    Args:
        modules: names of modules (``*`` stands for any part of a name between dots, ``**`` for any
            number of parts, ``""`` for the model itself), classes of them, or both; by default
            any module.
        ops: the operators that made the tensors: names (``"mlp"``, ``"aten::mm"``) or
            ``torch.ops`` objects; by default any.
        outputs: names of results in the operators' schemas, such as ``"preactivation"``.
        when: decides by anything else; receives a ``SavedTensorInfo``.

    Returns:
        A rule for ``Policy``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an operator does not exist, or nothing is named.

    Example:
        >>> import fusedops
        >>> print(fusedops.memory.save(ops="attention"))
        save(ops=fusedops::attention)
    """
    return _rule(SAVE, modules, ops, outputs, when)


def recompute(
    modules: Modules = (),
    *,
    ops: Ops = (),
    outputs: str | Iterable[str] = (),
    when: Callable[[SavedTensorInfo], bool] | None = None,
    mp_comm_recompute: bool = True,
    parallel_optimizer_comm_recompute: bool | None = None,
    recompute_slice_activation: bool = False,
    group: Any = None,
) -> MemoryRule:
    """Recompute tensors in the backward, once, instead of saving them.

    With ``modules`` alone each of these is a region: its inputs are kept and its forward runs a
    second time. With ``ops`` the results of these operators are recomputed from the operators'
    own inputs, and no module runs again; operators that draw random numbers, or update running
    statistics, cannot be named.

    Args:
        modules: as in ``save``.
        ops: as in ``save``.
        outputs: as in ``save``.
        when: as in ``save``.
        mp_comm_recompute: run the collectives of a region again. ``False`` keeps their results:
            more bytes, no communication in the second forward.
        parallel_optimizer_comm_recompute: gather weights that FSDP2 shards again in the backward;
            ``False`` leaves them gathered between the forward and the backward. The default is
            the setting of ``fully_shard``.
        recompute_slice_activation: keep only ``1 / size`` of a region's floating-point inputs on
            each rank of ``group`` and gather them for the second forward. All ranks of the group
            must receive the same inputs (tensor parallelism without sequence parallelism).
        group: for ``recompute_slice_activation``.

    Returns:
        A rule for ``Policy``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an operator does not exist, draws random numbers or updates running statistics,
            nothing is named, or options for regions are combined with ``ops``, ``outputs`` or
            ``when``.

    Example:
        >>> import fusedops
        >>> print(fusedops.memory.recompute("transformer.h.*"))
        recompute(modules='transformer.h.*')
    """
    options = CommunicationOptions(
        mp_comm_recompute, parallel_optimizer_comm_recompute, recompute_slice_activation, group
    )
    for name, value in vars(options).items():
        if name != "group" and (name, value) != ("parallel_optimizer_comm_recompute", None):
            checks.flag("recompute", name, value)
    checks.group("recompute", "group", group)
    if (group is not None) != recompute_slice_activation:
        expected = "the ranks with the same inputs, if and only if recompute_slice_activation"
        checks.fail("recompute", "group", expected, checks.shown(group))
    rule = _rule(RECOMPUTE, modules, ops, outputs, when, communication=options)
    if rule.of_tensors and options != CommunicationOptions():
        raise ValueError(
            "recompute: the options for communication belong to whole modules, and this rule "
            "names single tensors: give it modules alone"
        )
    for name in rule.ops:
        namespace, _, bare = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), bare)
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        if any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads):
            raise ValueError(
                f"recompute: {name} draws random numbers, and a second call would draw others; "
                "recompute the module that calls it, which replays them"
            )
        if any(map(updates_statistics, overloads)):
            raise ValueError(
                f"recompute: {name} updates running statistics, which a second call would update "
                "again; recompute the module that calls it, whose buffers are kept"
            )
    return rule


def offload(
    modules: Modules = (),
    *,
    ops: Ops = (),
    outputs: str | Iterable[str] = (),
    when: Callable[[SavedTensorInfo], bool] | None = None,
) -> MemoryRule:
    """Offload tensors to host memory after the forward; prefetch them for the backward.

    Args:
        modules: as in ``save``.
        ops: as in ``save``.
        outputs: as in ``save``.
        when: as in ``save``.

    Returns:
        A rule for ``Policy``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an operator does not exist, or nothing is named.

    Example:
        >>> import fusedops
        >>> print(fusedops.memory.offload(when=lambda saved: saved.nbytes >= 2**20))
        offload(when=<lambda>)
    """
    return _rule(OFFLOAD, modules, ops, outputs, when)


def tile(modules: Modules, *, tile_tokens: int) -> MemoryRule:
    """Run feed-forward layers for a tile of their tokens at a time, in forward and backward.

    Of their intermediate activations only those of one tile exist, and the backward recomputes
    them, as ``fusedops.mlp`` with ``tile_tokens`` does.

    Args:
        modules: as in ``save``: ``fusedops.nn.MLP`` and ``GatedMLP``, these under tensor
            parallelism, and feed-forward layers that ``fusedops.patch`` has replaced.
        tile_tokens: number of tokens of a tile.

    Returns:
        A rule for ``Policy``. Of several that name a module the last one decides.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: no module is named, or ``tile_tokens`` is less than 1.

    Example:
        >>> import fusedops
        >>> print(fusedops.memory.tile("layers.*.mlp", tile_tokens=1024))
        tile(modules='layers.*.mlp', tile_tokens=1024)
    """
    checks.integer("tile", "tile_tokens", tile_tokens, least=1)
    return _rule(TILE, modules, (), (), None, tile_tokens=tile_tokens)


class Policy:
    """Rules for the tensors that a forward pass saves for its backward.

    Two questions are asked of each tensor, and the last rule that fits answers; but rules that name
    single tensors (``ops``, ``outputs``, ``when``) come before those that name modules only.

    1. Is it saved or recomputed? ``save`` and ``recompute`` answer; saved is the default.
    2. If it is saved, where? ``offload`` and ``save`` answer; on the device is the default.

    Therefore recomputation wins over ``offload`` of the same modules, whose saved inputs are
    offloaded. What ``save`` names stays on the device, unless a later ``offload`` wins.

    Args:
        *rules: of ``save``, ``recompute`` and ``offload``; and of ``tile``, which answers neither.

    Raises:
        TypeError: one of them is no rule.

    Example:
        >>> import fusedops
        >>> from fusedops import memory
        >>> print(memory.Policy(memory.recompute("layers.*"), memory.save(ops="attention")))
        Policy(recompute(modules='layers.*'), save(ops=fusedops::attention))
    """

    def __init__(self, *rules: MemoryRule) -> None:
        for rule in rules:
            if not isinstance(rule, MemoryRule):
                raise TypeError(
                    "Policy: each rule must come from save(), recompute(), offload() or tile(), "
                    f"got {checks.shown(rule)}"
                )
        self.rules = rules

    def __str__(self) -> str:
        return f"Policy({', '.join(map(str, self.rules))})"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and other.rules == self.rules

    def __hash__(self) -> int:
        return hash(self.rules)


def winning_rule(fitting: Sequence[MemoryRule], treatment: str) -> MemoryRule | None:
    """Return the rule that answers one of the two questions, of all rules that fit a tensor.

    ``treatment`` is the answer besides ``save``. ``None``: ``save`` wins, or no rule answers.
    Of the rules that name a module as a whole, it tells whether the module is a region.
    """
    answers = [rule for rule in fitting if rule.treatment in (SAVE, treatment)]
    single = [rule for rule in answers if rule.of_tensors]
    chosen = single or answers
    return chosen[-1] if chosen and chosen[-1].treatment != SAVE else None


def _rule(
    treatment: str,
    modules: Modules,
    ops: Ops,
    outputs: str | Iterable[str],
    when: Callable[[SavedTensorInfo], bool] | None,
    **options: Any,
) -> MemoryRule:
    if when is not None and not callable(when):
        checks.fail_type(treatment, "when", "a function", when)
    patterns, results = _several(modules), _several(outputs)
    for pattern in patterns:
        is_class = isinstance(pattern, type) and issubclass(pattern, nn.Module)
        if not isinstance(pattern, str) and not is_class:
            expected = "names such as 'layers.*' or classes of modules"
            checks.fail_type(treatment, "modules", expected, pattern)
    for name in results:
        if not isinstance(name, str):
            checks.fail_type(treatment, "outputs", "names of an operator's results", name)
    names = tuple(_op_name(treatment, op) for op in _several(ops))
    rule = MemoryRule(treatment, patterns, names, results, when, **options)
    if not (rule.modules or rule.of_tensors):
        raise ValueError(f"{treatment}: name modules, ops or outputs, or give when")
    return rule


def _several(value: Any) -> tuple[Any, ...]:
    plain = isinstance(value, (str, type, torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    return (value,) if plain or not isinstance(value, Iterable) else tuple(value)


def _op_name(treatment: str, op: Any) -> str:
    """Return ``namespace::name`` of an operator; it must exist."""
    if isinstance(op, torch._ops.OpOverload):
        return op._schema.name
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    if not isinstance(op, str):
        checks.fail_type(treatment, "ops", "names of operators or objects of torch.ops", op)
    if re.search(r"::|\.", op):
        namespace, name = re.split(r"::|\.", op, maxsplit=1)
        bare = name.partition(".")[0]
    else:
        namespace, bare = "fusedops" if hasattr(torch.ops.fusedops, op) else "aten", op
    if not bare or not hasattr(getattr(torch.ops, namespace), bare):
        ops = sorted({name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()})
        known = {
            name.rpartition("::")[2]: name
            for name in ops
            if name.startswith(("aten::", "fusedops::"))
        }
        near = difflib.get_close_matches(bare or namespace, known, n=1)
        hint = f"; did you mean {known[near[0]]!r}?" if near else ""
        raise ValueError(f"{treatment}: ops names {op!r}, which is no operator{hint}")
    return f"{namespace}::{bare}"


def updates_statistics(op: torch._ops.OpOverload) -> bool:
    """Return whether an operator writes to running statistics.

    Those of torch's batch norms do, in training, and their schemas do not say so.
    """
    return any(argument.name == "running_mean" for argument in op._schema.arguments)


def _matches(pattern: str, name: str) -> bool:
    if not name:
        return not pattern  # the model itself is named by "", and by no wildcard
    wildcards = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    return re.fullmatch("".join(wildcards.get(p, re.escape(p)) for p in parts), name) is not None

"""A model as a list of operator calls: ``torch.export`` on fake tensors, without running anything.

The graph has torch's own operators (``linear``, ``layer_norm``, ``scaled_dot_product_attention``),
without in-place operations. Values are numbered; a step reads and writes values. This file knows
nothing of meshes and placements.
"""

from __future__ import annotations

import copy
import math
import operator
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from fusedops._core.checks import UnsupportedError

OP = "auto_parallel"
_WITHOUT_GRAPH = "torch.nn.parallel.DistributedDataParallel needs no graph"
_TORCH = str(Path(torch.__file__).parent)
# Calls that compute nothing which a later one reads.
_CHECKS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_")


@dataclass(frozen=True)
class ValueRef:
    """An argument of a step that is a value of the graph."""

    number: int


@dataclass(frozen=True)
class ValueMeta:
    """What is known of a value before anything runs: its global sizes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool = False

    @property
    def nbytes(self) -> int:
        """Its bytes, unsharded."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StepMeasure(NamedTuple):
    """What a step does on unsharded tensors."""

    saves: tuple[int, ...]  # which inputs and outputs, in this order, autograd keeps
    saves_others: int  # bytes of other tensors that autograd keeps
    flop: float  # of products in the forward


@dataclass(frozen=True)
class GraphStep:
    """One call of an operator."""

    op: Any
    args: tuple[Any, ...]  # with a ``ValueRef`` for each tensor
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]  # values that it reads, in the order of the arguments
    outputs: tuple[int, ...]  # values that it returns; -1 for what is no tensor
    listed: bool  # whether it returns a tuple or list
    key: int  # equal for calls of one operator with the same constants, shapes and dtypes
    random: bool  # whether it draws random numbers
    measure: StepMeasure


@dataclass
class TracedGraph:
    """The steps of a model for inputs of certain shapes, and what its values are."""

    out_spec: Any  # how the flattened outputs are put together
    steps: list[GraphStep] = field(default_factory=list)
    values: list[ValueMeta] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)  # the first of their names
    buffers: dict[int, str] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)  # positions among flattened inputs
    constants: dict[int, torch.Tensor] = field(default_factory=dict)  # that the forward has made
    outputs: list[Any] = field(default_factory=list)  # flattened: a ``ValueRef``, or a constant
    mutations: dict[str, int] = field(default_factory=dict)  # values to write, by buffer


class FakeModel:
    """A copy without data of a model that will run on a device, from which graphs are traced."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(self._fake(parameter), parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = self._fake(buffer)
        try:
            self.module = copy.deepcopy(model, memo)
        except Exception as error:
            raise UnsupportedError(
                f"{OP}: a {type(model).__name__} cannot be copied ({_one_line(error)}); "
                f"{_WITHOUT_GRAPH}"
            ) from None

    def _fake(self, like: Any) -> torch.Tensor:
        stride = like.stride() if isinstance(like, torch.Tensor) else like.stride
        with self._mode:
            return torch.empty_strided(like.shape, stride, dtype=like.dtype, device=self._device)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedGraph:
        """Return the graph for inputs of these shapes, in the module's mode (train or eval)."""

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return self._fake(leaf).requires_grad_(leaf.requires_grad)

        args, kwargs = pytree.tree_map(fake, (args, kwargs))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.export(self.module, args, kwargs, strict=False)
                _detach_without_grad(program)
                program = program.run_decompositions({})
        except Exception as error:
            raise UnsupportedError(
                f"{OP}: torch.export cannot trace {self._place(error)}: {_one_line(error)}; "
                f"{_WITHOUT_GRAPH}"
            ) from None
        return _Reader(self.module, program, self._measured).graph

    def _measured(self, op: Any, args: Any, kwargs: Any, metas: Sequence[ValueMeta]) -> StepMeasure:
        """Run an operator on fake tensors, and record what autograd saves."""
        tensors = [self._fake(meta).requires_grad_(meta.needs_grad) for meta in metas]
        replacements = iter(tensors)
        args, kwargs = substituted(args, replacements), substituted(kwargs, replacements)
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with self._mode, torch.enable_grad(), hooks, FlopCounterMode(display=False) as counter:
            result = op(*args, **kwargs)
        flop = float(counter.get_total_flops())
        name = short_name(op)
        if not flop and ("scaled_dot_product" in name or name.startswith("attention")):
            flop = 4.0 * math.prod(metas[0].shape) * metas[1].shape[-2]
        saves = []
        for position, tensor in enumerate((*tensors, *pytree.tree_leaves(result))):
            if isinstance(tensor, torch.Tensor):
                storage = kept.pop(tensor.untyped_storage()._cdata, None)
                saves += [] if storage is None else [position]
        others = sum(storage.nbytes() for storage in kept.values())
        return StepMeasure(tuple(saves), others, flop)

    def _place(self, error: BaseException) -> str:
        """Return the module and the line that an error is from."""
        names = {id(module): name for name, module in self.module.named_modules()}
        place, module = "", ""
        for frame, line in traceback.walk_tb(error.__traceback__):
            file, owner = frame.f_code.co_filename, frame.f_locals.get("self")
            if file.startswith((_TORCH, "<")):
                continue
            if id(owner) in names:
                module = f"{names[id(owner)] or 'the model'} ({type(owner).__name__})"
            place = f", line {line} of {file}"
        return f"{module}{place}" if module else f"a {type(self.module).__name__}"


def _detach_without_grad(program: Any) -> None:
    """Detach what regions without gradients return: the next pass forgets these regions."""
    graph = program.graph_module.graph
    region = torch.ops.higher_order.wrap_with_set_grad_enabled
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not region or node.args[0]:
            continue
        for result in list(node.users):
            if not isinstance(result.meta.get("val"), torch.Tensor):
                continue
            with graph.inserting_after(result):
                detached = graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta = dict(result.meta)
            result.replace_all_uses_with(detached, lambda user, own=detached: user is not own)
    program.graph_module.recompile()


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__).rstrip(".")[:200]


class _Reader:
    """Makes a ``TracedGraph`` of an exported program."""

    def __init__(
        self, module: nn.Module, program: Any, measured: Callable[..., StepMeasure]
    ) -> None:
        self.graph = TracedGraph(program.call_spec.out_spec)
        self._measured = measured
        self._of_node: dict[Any, Any] = {}
        self._keys: dict[str, int] = {}
        self._measures: dict[int, StepMeasure] = {}
        self._read_state(module, program)
        nodes = list(program.graph.nodes)
        for node in nodes:
            if node.op in ("call_function", "get_attr"):
                self._call(node)
        read = {number for step in self.graph.steps for number in step.inputs}
        for number in self.graph.parameters.keys() - read:  # they have no gradient
            self.graph.values[number] = replace(self.graph.values[number], needs_grad=False)
        for result, spec in zip(
            nodes[-1].args[0], program.graph_signature.output_specs, strict=True
        ):
            value = self._argument(result)
            if spec.kind.name == "USER_OUTPUT":
                self.graph.outputs.append(value)
            elif spec.kind.name == "BUFFER_MUTATION":
                self.graph.mutations[spec.target] = value.number

    def _new_value(self, fake: torch.Tensor, needs_grad: bool) -> int:
        shape, stride = tuple(map(int, fake.shape)), tuple(map(int, fake.stride()))
        self.graph.values.append(ValueMeta(shape, stride, fake.dtype, needs_grad))
        return len(self.graph.values) - 1

    def _read_state(self, module: nn.Module, program: Any) -> None:
        """Read parameters, also those that the forward does not use, buffers and inputs."""
        graph, numbers = self.graph, dict[str, int]()
        tensors: dict[int, int] = {}  # numbers by tensor: tied ones have several names
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in tensors:
                number = self._new_value(parameter, parameter.requires_grad)
                tensors[id(parameter)] = number
                graph.parameters[number] = name
            numbers[name] = tensors[id(parameter)]
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if id(buffer) not in tensors:
                number = tensors[id(buffer)] = self._new_value(buffer, False)
                graph.buffers[number] = name
            numbers[name] = tensors[id(buffer)]
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        position = -1
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            fake = node.meta.get("val")
            position += spec.kind.name == "USER_INPUT"
            if not isinstance(fake, torch.Tensor):
                self._of_node[node] = fake
            elif spec.target in numbers:
                self._of_node[node] = ValueRef(numbers[spec.target])
            else:
                own = spec.kind.name == "USER_INPUT"
                number = self._new_value(fake, own and fake.requires_grad)
                self._of_node[node] = ValueRef(number)
                if own:
                    graph.inputs[number] = position
                else:
                    graph.constants[number] = program.constants[spec.target]

    def _argument(self, argument: Any) -> Any:
        return torch.fx.node.map_arg(argument, lambda node: self._of_node[node])

    def _call(self, node: Any) -> None:
        if node.target is operator.getitem:
            self._of_node[node] = self._of_node[node.args[0]][node.args[1]]
            return
        if str(node.target).startswith(_CHECKS):
            return
        op = node.target
        if not isinstance(op, torch._ops.OpOverload):
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            what = "has control flow in its graph"
            if node.op == "call_function":
                what = f"calls {op}, which is no operator"
            raise UnsupportedError(
                f"{OP}: {(stack and stack[-1][0]) or 'the model'} {what}; {_WITHOUT_GRAPH}"
            )
        args, kwargs = self._argument(node.args), self._argument(node.kwargs)
        values, inputs = self.graph.values, tuple(references((args, kwargs)))
        needs_grad = any(values[number].needs_grad for number in inputs)
        needs_grad = needs_grad and short_name(op) != "detach"
        result = node.meta.get("val")
        listed = isinstance(result, (list, tuple))
        outputs = tuple(
            self._new_value(fake, needs_grad and fake.dtype.is_floating_point)
            if isinstance(fake, torch.Tensor)
            else -1
            for fake in (result if listed else [result])
        )
        returned = tuple(ValueRef(number) if number >= 0 else None for number in outputs)
        self._of_node[node] = returned if listed else returned[0]
        metas = [values[number] for number in inputs]
        shown = pytree.tree_map(
            lambda leaf: "tensor" if isinstance(leaf, ValueRef) else leaf, (args, kwargs)
        )
        made = [values[number] for number in outputs if number >= 0]
        key = self._keys.setdefault(repr((str(op), shown, metas, made)), len(self._keys))
        if key not in self._measures:
            self._measures[key] = self._measured(op, args, kwargs, metas)
        random = torch.Tag.nondeterministic_seeded in op.tags
        if "scaled_dot_product" in str(op):
            random = bool(arguments_by_name(op, args, kwargs).get("dropout_p"))
        self.graph.steps.append(
            GraphStep(op, args, kwargs, inputs, outputs, listed, key, random, self._measures[key])
        )


def references(arguments: Any) -> list[int]:
    """Return the numbers of all values in (nested) arguments, in order."""
    leaves = pytree.tree_leaves(arguments)
    return [leaf.number for leaf in leaves if isinstance(leaf, ValueRef)]


def substituted(arguments: Any, replacements: Iterator[Any]) -> Any:
    """Return arguments with the next of ``replacements`` for each value."""
    return pytree.tree_map(
        lambda leaf: next(replacements) if isinstance(leaf, ValueRef) else leaf, arguments
    )


def arguments_by_name(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call, in the order of the operator, with its defaults."""
    names = [argument.name for argument in op._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def short_name(op: Any) -> str:
    """Return the name of an overload's operator without its namespace."""
    return str(op._schema.name).partition("::")[2]


def is_view(op: Any) -> bool:
    """Whether an operator's result shares the memory of what it reads."""
    returned = any(result.alias_info is not None for result in op._schema.returns)
    return returned or short_name(op) == "_unsafe_view"

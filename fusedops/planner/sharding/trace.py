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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from fusedops._core.checks import UnsupportedError

OP = "auto_parallel"
_TORCH = str(Path(torch.__file__).parent)
# Calls that compute nothing which a later one reads.
_CHECKS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_")


@dataclass(frozen=True)
class ValueRef:
    """An argument of a step that is a value of the graph."""

    number: int


@dataclass(frozen=True)
class ValueMeta:
    """What is known of a value before anything runs.

    Attributes:
        shape: its global shape.
        stride: its global strides.
        dtype: its dtype.
        needs_grad: whether a gradient flows through it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool = False

    @property
    def nbytes(self) -> int:
        """Its bytes, unsharded."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class GraphStep:
    """One call of an operator.

    Attributes:
        op: the overload that is called.
        args: its positional arguments, with a ``ValueRef`` for each tensor.
        kwargs: the others.
        inputs: the numbers of the values that it reads, in the order of the arguments.
        outputs: the numbers of the tensors that it returns.
        listed: whether it returns a tuple or list.
        key: equal for calls of the same operator with the same constants, shapes and dtypes.
        module: the name of the module that calls it.
        random: whether it draws random numbers.
        saves: which of the inputs and outputs, in this order, autograd keeps for the backward.
        saves_others: bytes of other tensors that autograd keeps, unsharded.
        flop: floating-point operations of products in the forward, unsharded.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    listed: bool
    key: int
    module: str
    random: bool
    saves: tuple[int, ...] = ()
    saves_others: int = 0
    flop: float = 0.0


@dataclass
class TracedGraph:
    """The steps of a model for inputs of certain shapes.

    Attributes:
        steps: the calls in the order in which they run.
        values: what is known of each value.
        parameters: names by value; tied parameters have the first of their names.
        buffers: names by value.
        inputs: positions among the flattened inputs, by value.
        constants: tensors that the forward has made from data of its own, by value.
        outputs: flattened outputs: a ``ValueRef``, or a constant.
        mutations: values to write into buffers, by name of the buffer.
        out_spec: how the flattened outputs are put together.
    """

    steps: list[GraphStep] = field(default_factory=list)
    values: list[ValueMeta] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    buffers: dict[int, str] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    mutations: dict[str, int] = field(default_factory=dict)
    out_spec: Any = None


def parameter_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of the tensor behind every name, parameters and buffers."""
    first: dict[int, str] = {}
    names = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *model.named_buffers(remove_duplicate=False)):
        names[name] = first.setdefault(id(tensor), name)
    return names


class FakeModel:
    """A copy of a model without data, from which graphs are traced.

    Args:
        model: the model; it is not changed.
        device: where the model will run, for example ``"cpu"``.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        from torch._subclasses import FakeTensorMode

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
                'mode "data" needs no copy'
            ) from None

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
            )

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedGraph:
        """Return the graph for inputs of these shapes, in the module's mode (train or eval).

        Raises:
            UnsupportedError: the model cannot be exported.
        """

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
                'mode "data" needs no graph'
            ) from None
        return _Reader(self.module, program, self._measured).graph

    def _measured(
        self, op: Any, args: Any, kwargs: Any, metas: Sequence[ValueMeta]
    ) -> tuple[tuple[int, ...], int, float]:
        """Run an operator on fake tensors; return ``saves``, ``saves_others`` and ``flop``."""
        with self._mode:
            tensors = [
                torch.empty_strided(
                    meta.shape,
                    meta.stride,
                    dtype=meta.dtype,
                    device=self._device,
                    requires_grad=meta.needs_grad and meta.dtype.is_floating_point,
                )
                for meta in metas
            ]
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
        results = result if isinstance(result, (list, tuple)) else [result]
        saves = []
        for position, tensor in enumerate((*tensors, *results)):
            if isinstance(tensor, torch.Tensor):
                storage = kept.pop(tensor.untyped_storage()._cdata, None)
                saves += [position] if storage is not None else []
        return tuple(saves), sum(storage.nbytes() for storage in kept.values()), flop

    def _place(self, error: BaseException) -> str:
        """Return the module and the line that an error is from."""
        names = {id(module): name for name, module in self.module.named_modules()}
        place, module = "", ""
        for frame, line in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename.startswith(_TORCH):
                continue
            owner = frame.f_locals.get("self")
            if id(owner) in names:
                module = f"{names[id(owner)] or 'the model'} ({type(owner).__name__})"
                place = f", line {line} of {frame.f_code.co_filename}"
            elif module and not frame.f_code.co_filename.startswith("<"):
                place = f", line {line} of {frame.f_code.co_filename}"
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

    def __init__(self, module: nn.Module, program: Any, measured: Callable[..., Any]) -> None:
        self._measured = measured
        self._measures: dict[int, Any] = {}
        self._module = module
        self.graph = TracedGraph(out_spec=program.call_spec.out_spec)
        self._names = parameter_names(module)
        self._trained = {name for name, own in module.named_parameters() if own.requires_grad}
        self._program = program
        self._of_node: dict[Any, Any] = {}
        self._keys: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self._read()

    def _new_value(self, fake: torch.Tensor, needs_grad: bool = False) -> int:
        values = self.graph.values
        shape, stride = tuple(map(int, fake.shape)), tuple(map(int, fake.stride()))
        values.append(ValueMeta(shape, stride, fake.dtype, needs_grad))
        return len(values) - 1

    def _read(self) -> None:
        signature = self._program.graph_signature
        nodes = list(self._program.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        position = 0
        for node, spec in zip(placeholders, signature.input_specs, strict=True):
            kind = spec.kind.name
            if kind == "USER_INPUT":
                self._user_input(node, position)
                position += 1
            else:
                self._state(node, kind, spec.target)
        for node in nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                raise UnsupportedError(
                    f"{OP}: {_module_of(node) or 'the model'} has control flow in its graph; "
                    'mode "data" needs no graph'
                )
        results = [node for node in nodes if node.op == "output"][0].args[0]
        for result, spec in zip(results, signature.output_specs, strict=True):
            value = self._argument(result)
            if spec.kind.name == "USER_OUTPUT":
                self.graph.outputs.append(value)
            elif spec.kind.name == "BUFFER_MUTATION":
                self.graph.mutations[spec.target] = value.number
        for name, parameter in self._module.named_parameters():
            if name not in self._first:  # the forward does not read it
                number = self._new_value(parameter, parameter.requires_grad)
                self.graph.parameters[number] = name

    def _user_input(self, node: Any, position: int) -> None:
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor):
            number = self._new_value(fake, fake.requires_grad)
            self.graph.inputs[number] = position
            self._of_node[node] = ValueRef(number)
        else:
            self._of_node[node] = fake

    def _state(self, node: Any, kind: str, target: str) -> None:
        fake = node.meta["val"]
        name = self._names.get(target, target)
        if name in self._first and kind in ("PARAMETER", "BUFFER"):
            self._of_node[node] = ValueRef(self._first[name])
            return
        number = self._new_value(fake, kind == "PARAMETER" and name in self._trained)
        self._of_node[node] = ValueRef(number)
        self._first[name] = number
        if kind == "PARAMETER":
            self.graph.parameters[number] = name
        elif kind == "BUFFER":
            self.graph.buffers[number] = name
        else:
            self.graph.constants[number] = self._program.constants[target]

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return self._of_node[argument]
        if isinstance(argument, (list, tuple)):
            return tuple(self._argument(element) for element in argument)
        if isinstance(argument, dict):
            return {name: self._argument(element) for name, element in argument.items()}
        return argument

    def _call(self, node: Any) -> None:
        if node.target is operator.getitem:
            self._of_node[node] = self._of_node[node.args[0]][node.args[1]]
            return
        if str(node.target).startswith(_CHECKS):
            return
        module = _module_of(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise UnsupportedError(
                f"{OP}: {module or 'the model'} calls {node.target}, which is no operator; "
                'mode "data" needs no graph'
            )
        args, kwargs = self._argument(node.args), self._argument(node.kwargs)
        inputs = tuple(references((args, kwargs)))
        needs_grad = any(self.graph.values[number].needs_grad for number in inputs)
        result = node.meta.get("val")
        fakes = result if isinstance(result, (list, tuple)) else [result]
        numbers = []
        for fake in fakes:
            if isinstance(fake, torch.Tensor):
                differentiable = fake.dtype.is_floating_point and needs_grad
                detached = str(node.target).startswith("aten.detach")
                numbers.append(self._new_value(fake, differentiable and not detached))
            else:
                numbers.append(-1)
        listed = isinstance(result, (list, tuple))
        references_of = tuple(ValueRef(n) if n >= 0 else None for n in numbers)
        self._of_node[node] = references_of if listed else references_of[0]
        key = self._key(node.target, args, kwargs, [n for n in numbers if n >= 0])
        if key not in self._measures:
            metas = [self.graph.values[number] for number in inputs]
            self._measures[key] = self._measured(node.target, args, kwargs, metas)
        saves, saves_others, flop = self._measures[key]
        self.graph.steps.append(
            GraphStep(
                op=node.target,
                args=args,
                kwargs=kwargs,
                inputs=inputs,
                outputs=tuple(numbers),
                listed=listed,
                key=key,
                module=module,
                random=_is_random(node.target, args, kwargs),
                saves=saves,
                saves_others=saves_others,
                flop=flop,
            )
        )

    def _key(self, op: Any, args: Any, kwargs: Any, outputs: Sequence[int]) -> int:
        values = self.graph.values

        def shown(argument: Any) -> Any:
            if isinstance(argument, ValueRef):
                return values[argument.number]
            if isinstance(argument, tuple):
                return tuple(shown(element) for element in argument)
            if isinstance(argument, dict):
                return tuple((name, shown(element)) for name, element in argument.items())
            return argument

        text = repr((str(op), shown(args), shown(kwargs), [values[number] for number in outputs]))
        return self._keys.setdefault(text, len(self._keys))


def references(arguments: Any) -> list[int]:
    """Return the numbers of all values in (nested) arguments, in order."""
    if isinstance(arguments, ValueRef):
        return [arguments.number]
    if isinstance(arguments, dict):
        arguments = tuple(arguments.values())
    if isinstance(arguments, tuple):
        return [number for element in arguments for number in references(element)]
    return []


def substituted(arguments: Any, replacements: Any) -> Any:
    """Return arguments with the next of ``replacements`` (an iterator) for each value."""
    if isinstance(arguments, ValueRef):
        return next(replacements)
    if isinstance(arguments, tuple):
        return tuple(substituted(element, replacements) for element in arguments)
    if isinstance(arguments, dict):
        return {name: substituted(element, replacements) for name, element in arguments.items()}
    return arguments


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


def _module_of(node: Any) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack.values())[-1][0] if stack else ""


def _is_random(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "scaled_dot_product" in str(op):
        return bool(arguments_by_name(op, args, kwargs).get("dropout_p"))
    return torch.Tag.nondeterministic_seeded in op.tags

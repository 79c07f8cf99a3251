"""``define_op``: from a description to a torch op, by means of ``torch.library``.

One description gives two dispatcher ops, ``fusedops::X`` and ``fusedops::X_backward``
(``docs/dev/operators.md``). With the compiled library, autograd, autocast and CPU routing are
generic boxed C++ kernels (``csrc/autograd.cpp``, ``csrc/router.cpp``): a small call then costs
about as much as torch's own. Without it, the same is done here in Python.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedops._core import backends, checks, dtypes, exchange_kernels, extension, sharding
from fusedops._core._contract_grammar import Contract
from fusedops._core.contract import Gradients, Program, Rules

_NAMESPACE = "fusedops"
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_SCHEMAS: list[str] = []


@dataclass(frozen=True)
class Gradient:
    """How an op is differentiated.

    Attributes:
        inputs: names of the differentiable inputs.
        outputs: names of the differentiable outputs.
        saves: names of the inputs and outputs that the backward receives.
        reference: the backward in differentiable torch operations. It receives one gradient
            (or ``None``) per differentiable output, what was saved, the non-tensor arguments in
            schema order, and ``output_mask``; it returns a tensor or ``None`` per differentiable
            input. Saved *outputs* must not be used as constants: it is also the double backward.
        fake: returns empty tensors. It receives those of the same arguments that it names. By
            default each gradient that is asked for has the dtype and shape of its input.
        layouts: input -> makes its empty gradient from it, where that is not contiguous.
        computed: returns which gradients the backward computes, by default those of
            ``output_mask``. It receives those of the same arguments that it names; in DTensor rules
            specs stand for the tensors.
        aliases: differentiable input -> another one, or ``"grad_<output>"``. Where the backward
            returns ``None`` for an input that was asked for, its gradient is that of the other
            input, or that incoming gradient, unchanged. An op must not return one tensor twice or
            an argument; autograd may, and saves the pass over memory that a copy would cost.
        saved_for: saved input -> the differentiable input whose gradient alone needs it. It is
            saved only where that one requires a gradient; else the backward receives ``None``.
        shape_only: a saved input, the differentiable input whose gradient alone reads more than its
            shape, an argument and a value: in calls with that value, and without that gradient,
            the compiled autograd gives the backward a tensor of that shape without memory.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    saves: tuple[str, ...]
    reference: Callable[..., Any]
    fake: Callable[..., Any] | None = None
    layouts: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    computed: Callable[..., Sequence[bool]] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    saved_for: Mapping[str, str] = field(default_factory=dict)
    shape_only: tuple[str, str, str, str] | None = None

    def alias_codes(self) -> list[int]:
        """Return per input: i for the gradient of input i, -2 - j for that of output j, or -1."""
        places = {name: i for i, name in enumerate(self.inputs)}
        places |= {f"grad_{name}": -2 - j for j, name in enumerate(self.outputs)}
        return [places[self.aliases[name]] if name in self.aliases else -1 for name in self.inputs]


@dataclass(frozen=True)
class _Schema:
    """A parsed schema string: ``(type, name)`` pairs."""

    arguments: tuple[tuple[str, str], ...]
    returns: tuple[tuple[str, str], ...]

    @property
    def tensors(self) -> list[str]:
        return [name for kind, name in self.arguments if kind.startswith("Tensor")]

    @property
    def others(self) -> list[tuple[str, str]]:
        return [(kind, name) for kind, name in self.arguments if not kind.startswith("Tensor")]


def define_op(
    name: str,
    schema: str,
    *,
    contract: Rules,
    reference: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    gradient: Gradient | None = None,
    autocast: str = "keep",
    triton: str | None = None,
    shard: sharding.Rule | None = None,
    shard_backward: sharding.Rule | None = None,
    part_of: str | None = None,
    check: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Register an op with torch and return what calls it.

    Args:
        name: the op's name: that of its files, its dispatcher name and its native kernels.
        schema: arguments and named returns, ``"(Tensor input, float eps) -> (Tensor output)"``.
            Sizes are ``SymInt``. Outputs never alias inputs. An op without a gradient may write
            to an argument, ``"(Tensor(a!) into, ...) -> ()"``.
        contract: dtypes and shapes of arguments and results, in the grammar of ``contract.py``.
            Every call is checked against it, before kernels and fakes run.
        reference: eager torch, the specification; also the backend ``"torch"``.
        fake: returns empty tensors of the right shapes, dtypes and strides. It receives the
            arguments that it names, and so do ``gradient.fake`` and the DTensor rules. By default
            the results are contiguous and as the contract describes them.
        gradient: how it is differentiated; ``None`` for an op without gradient.
        autocast: a word of ``dtypes.AUTOCAST_RULES``.
        triton: import path of the module with ``forward`` and ``backward``; ``supports`` and
            ``supports_backward``, if it has them, return why they cannot run, or ``None``.
        shard: DTensor rule of the forward, see ``sharding.Rule``.
        shard_backward: DTensor rule of the backward; by default that of the forward, transposed.
        part_of: name of the op whose public function calls this one: it has no spec of its own.
        check: takes the op's arguments and raises for those that do not fit, in the words of the
            public function. For ops of which small calls matter: it runs only where no compiled
            kernel runs, for the first call of a signature, or after the kernel has refused the
            call, which saves 1.7 of 7.3 us of a layer_norm of 16 x 768. What it refuses, the
            contract or the kernel must refuse too. Without it the public function checks.

    Returns:
        The overload ``torch.ops.fusedops.<name>.default``; with ``check`` a function around it.
    """
    if autocast not in dtypes.AUTOCAST_RULES:
        checks.choice("define_op", "autocast", autocast, dtypes.AUTOCAST_RULES)
    parsed = _parse(schema)
    if gradient is not None:
        _check_names(name, parsed, gradient)
    programs = _programs(name, parsed, gradient, contract)
    checked_fake = _checked_fake(programs[0], fake)
    op = _define(name, schema, checked_fake if check is None else _after(check, checked_fake))
    native = extension.cpu_library() is None
    derivative = gradient.reference if gradient else None
    kernels = backends.Kernels(name, reference, derivative, triton, part_of, check, programs)
    backends.register(kernels)
    _route(name, programs[0], native=native, schema=schema)
    if gradient is not None:
        assert programs[1] is not None
        backward_name = f"{name}_backward"
        backward_schema = _backward_schema(parsed, gradient)
        _define(backward_name, backward_schema, _checked_fake(programs[1], gradient.fake, gradient))
        _route(name, programs[1], native=native, schema=backward_schema)
        _LIBRARY.define(f"{backward_name}_composite{backward_schema}")
        _LIBRARY.impl(f"{backward_name}_composite", gradient.reference, "CompositeImplicitAutograd")
        if native:
            _differentiate_native(name, parsed, gradient)
        else:
            _differentiate_python(name, parsed, gradient)
        if shard_backward is None and shard is not None:
            shard_backward = _transposed_rule(programs[1], shard, parsed, gradient)
        if shard_backward is not None:
            backward_op = getattr(torch.ops.fusedops, backward_name).default
            sharding.register(backward_op, _complete_rule(programs[1], shard_backward, gradient))
    if autocast != "keep":
        _autocast(name, autocast, native)
    if shard is not None:
        sharding.register(op, _complete_rule(programs[0], shard))
    return op if check is None else _explaining(op, check)


def tag_compiled_code() -> None:
    """Make torch.compile's caches on disk tell the ops defined so far from those of other versions.

    A cached graph calls the backward of an op with the arguments that it had when the graph was
    made, but torch's key for it names the ops of the forward alone: after an update that gave a
    backward one more argument, the graph was found and failed.
    """
    from torch.compiler import config

    digest = hashlib.sha256("\n".join(sorted(_SCHEMAS)).encode()).hexdigest()[:12]
    others = re.sub(r"fusedops:\w+;", "", config.cache_key_tag)
    config.cache_key_tag = f"{others}fusedops:{digest};"


def define_exchange(
    name: str,
    schema: str,
    *,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register an op that talks to other processes and return it.

    It has one kernel for all devices, and no compiler drops it: a rank that left out a collective
    would leave the others waiting in theirs.

    Args:
        name: the op's name.
        schema: arguments and returns. Outputs alias neither inputs nor each other.
        kernel: runs below autograd.
        fake: returns empty tensors; sizes that only the run tells are new symbols.
        setup_context: saves for ``backward``, as ``torch.library.register_autograd`` describes.
        backward: itself made of ops; ``None`` for an op without gradient.

    Returns:
        The overload ``torch.ops.fusedops.<name>.default``.
    """
    op = _define(name, schema, fake)
    kernel = exchange_kernels.replaceable(kernel)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    if backward is not None:
        torch.library.register_autograd(
            f"{_NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_LIBRARY
        )
    # Not an ordered effect: of such an op Inductor (2.13) cannot bind a size that is used where
    # the tensor itself is not.
    torch.fx.node.has_side_effect(op)
    return op


def _selecting(program: Program, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of all arguments of an op that gives ``function`` those that it names."""
    parameters = inspect.signature(function).parameters
    arguments = [argument for _, argument in program.arguments]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()):
        return function
    for name in parameters:
        owner = f"define_op({program.op!r})"
        checks.choice(owner, f"argument of {function.__name__}", name, arguments)
    positions = [arguments.index(name) for name in parameters]
    return lambda *args: function(*(args[position] for position in positions))


def _checked_fake(
    program: Program, fake: Callable[..., Any] | None, gradient: Gradient | None = None
) -> Callable[..., Any]:
    """Return the fake kernel of an op, or of the backward of ``gradient``: it checks arguments."""
    selected = None if fake is None else _selecting(program, fake)
    computed = None if gradient is None else _computed(program, gradient)
    layouts = {} if gradient is None else gradient.layouts

    def checked(*args: Any) -> Any:
        known = program.check(args)
        if selected is not None:
            return selected(*args)
        requested = None if computed is None else computed(*args)
        results = program.empty_results(known, requested, layouts)
        return tuple(results) if len(results) > 1 else next(iter(results), None)

    return checked


def _computed(program: Program, gradient: Gradient) -> Callable[..., Sequence[bool]]:
    """Return a function of all arguments of a backward that says which gradients it computes."""

    def output_mask(*args: Any) -> Sequence[bool]:
        return args[-1]

    return _selecting(program, gradient.computed or output_mask)


def _complete_rule(
    program: Program, rule: sharding.Rule, gradient: Gradient | None = None
) -> sharding.CompleteRule:
    """Return the rule of all arguments of an op, or of the backward of ``gradient``."""
    selected = _selecting(program, rule)
    computed = None if gradient is None else _computed(program, gradient)
    tensors = [i for i, (kind, _) in enumerate(program.arguments) if kind.startswith("Tensor")]

    def complete(*args: Any) -> list[sharding.Sharding]:
        shardings: list[sharding.Sharding] = []
        for outputs, inputs in selected(*args):
            placements: list[sharding.Placement] = [None] * len(args)
            for place, placement in zip(tensors, inputs, strict=True):
                placements[place] = None if args[place] is None else placement
            if computed is not None:
                pairs = zip(outputs, computed(*args), strict=True)
                outputs = [placement if on else None for placement, on in pairs]
            shardings.append((outputs, placements))
        return shardings

    return complete


def _transposed_rule(
    backward: Program, rule: sharding.Rule, schema: _Schema, gradient: Gradient
) -> sharding.Rule:
    """Return the rule of the backward of an op whose own is ``rule``."""
    selected = _selecting(backward, rule)
    returns = [result for _, result in schema.returns]
    tensors = [name for kind, name in backward.arguments if kind.startswith("Tensor")]

    def transposed(*args: Any) -> list[sharding.Sharding]:
        shardings: list[sharding.Sharding] = []
        for outputs, inputs in selected(*args):
            placed = dict(zip([*schema.tensors, *returns], [*inputs, *outputs], strict=True))
            for output in gradient.outputs:
                placed[f"grad_{output}"] = sharding.of_gradient(placed[output], sharded=False)
            sharded = any(placement != sharding.REPLICATE for placement in outputs)
            gradients = [sharding.of_gradient(placed[name], sharded) for name in gradient.inputs]
            shardings.append((gradients, [placed[name] for name in tensors]))
        return shardings

    return transposed


def _after(check: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` that calls ``check`` first."""

    def checked(*args: Any) -> Any:
        check(*args)
        return function(*args)

    return checked


def _explaining(op: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Return ``op``, whose refusals get the words of ``check``; a compiler traces the check."""
    traced = _after(check, op)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return traced(*args)
        try:
            return op(*args)
        except Exception as error:
            refusal = error
        try:
            check(*args)
            raise refusal
        finally:
            del refusal  # its traceback refers to this frame: a cycle would keep the arguments

    return call


def _check_names(op: str, schema: _Schema, gradient: Gradient) -> None:
    returns = [name for _, name in schema.returns]
    for attribute, names, known in (
        ("inputs", gradient.inputs, schema.tensors),
        ("outputs", gradient.outputs, returns),
        ("saves", gradient.saves, [*schema.tensors, *returns]),
        ("saved_for", tuple(gradient.saved_for), gradient.saves),
        ("saved_for", tuple(gradient.saved_for.values()), gradient.inputs),
    ):
        for name in names:
            checks.choice(f"define_op({op!r})", f"each of Gradient.{attribute}", name, known)


def _define(name: str, schema: str, fake: Callable[..., Any]) -> Any:
    _SCHEMAS.append(name + schema)
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    if extension.cpu_library() is None and extension.has_operator("fusedops_cpp", name):
        extension.declare("fusedops_cpp", name, schema)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.fusedops, name).default
    if op._schema.is_mutable:
        _count_writes(name, op)
    return op


def _count_writes(name: str, op: Any) -> None:
    """Make an op count the versions of what it writes, as ``csrc/autograd.cpp`` describes."""
    if extension.cpu_library() is None:
        torch.ops.fusedops_native.count_writes(name)
        return
    written, _ = torch._library.utils.mutated_args_kwargs(op._schema)

    def kernel(keys: Any, *args: Any) -> Any:
        tensors = backends.tensors_in([args[index] for index in written])
        torch.autograd.graph.increment_version(tensors)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)

    _LIBRARY.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


def _programs(
    name: str, schema: _Schema, gradient: Gradient | None, rules: Rules
) -> tuple[Program, Program | None]:
    """Return the contracts of the op and of its backward, ready to be checked."""
    returns = [result for _, result in schema.returns]
    contract = Contract(name, schema.arguments, rules, returns)
    forward = contract.program(schema.arguments, returns)
    if gradient is None:
        return forward, None
    backward = _backward_arguments(schema, gradient)
    places = {argument: index for index, (_, argument) in enumerate(backward)}
    # Saved tensor -> the input whose gradient needs it: its own, or that of ``saved_for``.
    reasons = {name: name for name in gradient.inputs} | dict(gradient.saved_for)
    step = Gradients(
        incoming=tuple(places[f"grad_{output}"] for output in gradient.outputs),
        mask=places["output_mask"],
        count=len(gradient.inputs),
        needs=tuple(
            (gradient.inputs.index(reasons[saved]), places[saved])
            for saved in gradient.saves
            if saved in reasons
        ),
    )
    return forward, contract.program(backward, gradient.inputs, step)


def _route(name: str, program: Program, *, native: bool, schema: str) -> None:
    """Register the CPU and CUDA kernels, which choose a backend when they are called."""
    full = program.op
    backward = full != name

    def choose(*args: Any) -> Any:
        return backends.run(name, args, backward)

    chooser = full
    if native:
        # The compiled router calls this op for a new signature, which it checks against the
        # contract, on a GPU, when a backend is requested, and when a dtype has no C++ kernel.
        chooser = f"{full}_choose"
        _LIBRARY.define(f"{chooser}{schema}")
    _LIBRARY.impl(chooser, choose, "CPU")
    _LIBRARY.impl(chooser, choose, "CUDA")
    if not native:
        return
    torch.ops.fusedops_native.route(full, program.unread_numbers())


def _differentiate_native(name: str, schema: _Schema, gradient: Gradient) -> None:
    only = gradient.shape_only
    arguments = [argument for _, argument in schema.arguments]
    returns = [output for _, output in schema.returns]
    torch.ops.fusedops_native.differentiate(
        name,
        [arguments.index(argument) for argument in gradient.inputs],
        [returns.index(output) for output in gradient.outputs],
        [
            arguments.index(name) if name in arguments else -1 - returns.index(name)
            for name in gradient.saves
        ],
        [arguments.index(argument) for _, argument in schema.others],
        gradient.alias_codes(),
        [
            arguments.index(gradient.saved_for[tensor]) if tensor in gradient.saved_for else -1
            for tensor in gradient.saves
        ],
        [gradient.saves.index(only[0]), *map(arguments.index, only[1:3])] if only else [],
        only[3] if only else "",
    )


def _differentiate_python(name: str, schema: _Schema, gradient: Gradient) -> None:
    arguments = [argument for _, argument in schema.arguments]
    returns = [output for _, output in schema.returns]
    backward_op = getattr(torch.ops.fusedops, f"{name}_backward").default
    composite = getattr(torch.ops.fusedops, f"{name}_backward_composite").default

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        values = dict(zip([*arguments, *returns], [*inputs, *outputs], strict=True))
        # torch.library adds an argument of its own behind these.
        needed = dict(zip(arguments, ctx.needs_input_grad, strict=False))
        left_out = {saved for saved, reason in gradient.saved_for.items() if not needed[reason]}
        ctx.save_for_backward(
            *(None if saved in left_out else values[saved] for saved in gradient.saves)
        )
        ctx.others = [values[argument] for _, argument in schema.others]
        ctx.mark_non_differentiable(*(values[x] for x in returns if x not in gradient.outputs))
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        incoming = [grads[returns.index(output)] for output in gradient.outputs]
        if all(grad is None for grad in incoming):
            return (None,) * len(arguments)
        mask = _requested_gradients(ctx, schema, gradient)
        results = backward_op(*incoming, *ctx.saved_tensors, *ctx.others, mask)
        results = results if isinstance(results, tuple) else (results,)
        by_name = dict(zip(gradient.inputs, results, strict=True))
        named = by_name | {f"grad_{x}": y for x, y in zip(gradient.outputs, incoming, strict=True)}
        for argument, requested in zip(gradient.inputs, mask, strict=True):
            if requested and by_name[argument] is None:
                by_name[argument] = named.get(gradient.aliases.get(argument, ""))
        return tuple(by_name.get(argument) for argument in arguments)

    def differentiable_backward(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args
        ):
            return composite(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return backward_op(*args)

    torch.library.register_autograd(
        f"{_NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_LIBRARY
    )
    _LIBRARY.impl(f"{name}_backward", differentiable_backward, "Autograd")


def _requested_gradients(ctx: Any, schema: _Schema, gradient: Gradient) -> list[bool]:
    """Return which gradients the running backward pass asks for."""
    positions = {argument: i for i, (_, argument) in enumerate(schema.arguments)}
    requested = []
    for argument in gradient.inputs:
        index = positions[argument]
        needed = bool(ctx.needs_input_grad[index])
        edges = getattr(ctx, "next_functions", ())
        if needed and index < len(edges) and edges[index][0] is not None:
            # Of a leaf under autograd.grad() the engine does not tell: then it is computed.
            with contextlib.suppress(RuntimeError):
                needed = torch._C._will_engine_execute_node(edges[index][0])
        requested.append(needed)
    return requested


def _autocast(name: str, rule: str, native: bool) -> None:
    if native:
        torch.ops.fusedops_native.autocast(name, rule)
        return
    op = getattr(torch.ops.fusedops, name).default
    for device in ("cpu", "cuda"):
        if rule == "norm" and device == "cpu":
            continue
        key = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}")
        _LIBRARY.impl(name, _autocast_kernel(op, rule, device, key), key.name)


def _autocast_kernel(op: Any, rule: str, device: str, key: Any) -> Callable[..., Any]:
    """Return the kernel of ``op`` for the dispatch key of autocast on a type of device."""

    def eligible(arg: Any) -> bool:
        return (
            isinstance(arg, torch.Tensor)
            and arg.device.type == device
            and arg.dtype in (torch.float32, torch.bfloat16, torch.float16)
        )

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            if rule == "norm" and "hf" in (arg for arg in args if isinstance(arg, str)):
                return op(*args)  # with this rounding a norm keeps the dtypes, as the models do
            if rule == "lower":
                target = torch.get_autocast_dtype(device)
            elif rule == "norm":
                target = torch.float32
            else:
                dtypes_given = (arg.dtype for arg in args if eligible(arg))
                target = functools.reduce(torch.promote_types, dtypes_given)
            return op(*(arg.to(target) if eligible(arg) else arg for arg in args))

    return kernel


def _backward_arguments(schema: _Schema, gradient: Gradient) -> list[tuple[str, str]]:
    """Return kind and name of each argument of the backward."""
    kinds = {name: kind for kind, name in (*schema.arguments, *schema.returns)}
    kinds |= dict.fromkeys(gradient.saved_for, "Tensor?")
    return [
        *(("Tensor?", f"grad_{name}") for name in gradient.outputs),
        *((kinds[name], name) for name in gradient.saves),
        *schema.others,
        ("bool[]", "output_mask"),
    ]


def _backward_schema(schema: _Schema, gradient: Gradient) -> str:
    arguments = ", ".join(f"{kind} {name}" for kind, name in _backward_arguments(schema, gradient))
    returns = ", ".join("Tensor" for _ in gradient.inputs)
    returns = f"({returns})" if len(gradient.inputs) > 1 else returns
    return f"({arguments}) -> {returns}"


def _parse(schema: str) -> _Schema:
    match = re.fullmatch(r"\((.*)\) -> \((.*)\)", schema)
    if match is None:
        raise ValueError(f"define_op: schema must be '(args) -> (named returns)', got {schema!r}")
    arguments, returns = (
        tuple(
            (re.sub(r"\(\w!\)", "", kind), name.split("=")[0])
            for kind, name in (part.strip().split(" ") for part in group.split(",") if part)
        )
        for group in match.groups()
    )
    return _Schema(arguments, returns)

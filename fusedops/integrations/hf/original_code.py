"""What a patched module stands for, and whether it is still there.

Libraries put their own functions in the place of torch's and transformers'. A patched module calls
none of these. So it compares before each call whether they are the ones that its original's code
read when its rule was made, and runs the original where one is not.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from fusedops._core.checks import UnsupportedError
from fusedops.integrations.hf.class_table import ClassTable
from fusedops.runtime.host_module import load

_num_modes = torch._C._len_torch_function_stack
_innermost_transform: Any = torch._C._functorch.peek_interpreter_stack
_transforms = torch._C._functorch.get_interpreter_stack
_tracing_state = torch._C._get_tracing_state
_VMAP = torch._C._functorch.TransformType.Vmap
_NO_TRANSFORM = type(None)

# Modes of torch that look at no function which a fused op replaces: the default device, tracing.
_PASSIVE_MODES = (
    "torch.utils._device",
    "torch.overrides",
    "torch._dynamo",
    "torch._export",
    "torch._subclasses",
    "torch.export",
    "torch.fx",
)

# Replacements that compute the same: this one only keeps no reference to a gathered weight.
_EQUIVALENT = {"deepspeed.runtime.zero.linear.zero3_linear_wrap"}
_NUMBERS = (bool, int, float, str)
_DEFAULTS = ("__defaults__", "__kwdefaults__")  # Dynamo makes other tuples and dictionaries of them
_READS = ("LOAD_ATTR", "LOAD_METHOD")
_BETWEEN = ("CACHE", "EXTENDED_ARG", "PUSH_NULL")


class WatchedAttribute(NamedTuple):
    """An attribute that somebody may replace."""

    owner: Any  # a module, a class, a function or a cell of a closure
    name: str  # of the attribute
    # Its value when it was read first, or ``None`` if that was another library's function already
    known: Any


class WatchList(NamedTuple):
    """What a fused forward stands for: it runs only while all of this is unchanged."""

    attributes: tuple[WatchedAttribute, ...] = ()  # those that the original's code reads
    methods: tuple[str, ...] = ()  # that it calls, which an instance may have of its own

    def names(self) -> tuple[str, ...]:
        """Return the names of all attributes, for a reader."""
        return tuple(f"{_owner_name(owner)}.{name}" for owner, name, _ in self.attributes)


# What the classes are made of whose instances a fused forward may bypass.
KNOWN: ClassTable[WatchList] = ClassTable("watched")

_is_unchanged: Any = getattr(load(), "is_unchanged", None)  # none where the kernels are not built


def changed(watched: WatchList, module: Any, name: str = "it") -> str | None:
    """Return what keeps a module, ``name`` in messages, from being what its class was made for.

    That is something that was replaced, a method of its own, or a parameter that cannot be read
    directly. Called before every forward of a patched module and for each child that it bypasses:
    0.4 to 0.6 us for two to nine attributes in the compiled host module, on a Zen 4 core that
    others used too. Dynamo traces the comparison in Python and makes guards of it.
    """
    own = module.__dict__
    if (
        _is_unchanged is not None
        and not torch.compiler.is_compiling()
        and _is_unchanged(watched.attributes, own, watched.methods, _PLAIN)
    ):
        return None
    for method in watched.methods:
        if method in own:
            return f"{name}.{method} is overridden on the instance"
    return _parameter_obstacle(module, name) or replaced(watched)


_PLAIN = (torch.Tensor, nn.Parameter)
# Wrappers of torch that hand the fused ops on: DTensor, fake and functional tensors.
_WRAPPERS = ("torch.distributed.", "torch._subclasses.", "torch._functorch.")


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor is stored as it seems: subclasses may mean anything else."""
    kind = type(tensor)
    return kind in _PLAIN or kind.__module__.startswith(_WRAPPERS)


def _parameter_obstacle(module: Any, name: str) -> str | None:
    own, tensors = module.__dict__, module._parameters
    if "weight" in own or "bias" in own:  # assigned after the parameter was deleted
        assigned = {key: own[key] for key in ("weight", "bias") if key in own}
        # In some classes a flag has this name.
        tensors = tensors | {
            key: value for key, value in assigned.items() if type(value) is not bool
        }
    for tensor_name, tensor in tensors.items():
        if tensor is not None and not is_plain(tensor):
            return f"{name}.{tensor_name} is a {type(tensor).__name__}"
    return None


def replaced(watched: WatchList) -> str | None:
    """Return what of a watch list was replaced, as a reason, or ``None``."""
    if (
        _is_unchanged is not None
        and not torch.compiler.is_compiling()
        and _is_unchanged(watched.attributes, {}, (), ())
    ):
        return None
    for owner, name, known in watched.attributes:
        value = getattr(owner, name, None)
        # Dynamo cannot compare the identities of tuples, nor of dictionaries.
        if not (value != known if name in _DEFAULTS else value is not known):
            continue
        where = f"{_owner_name(owner)}.{name}"
        if isinstance(value, _NUMBERS) or name in _DEFAULTS:
            if type(value) is not type(known) or value != known:
                return f"{where} was {known!r} when its rule was made"
        elif name_of(value) not in _EQUIVALENT:
            return f"{where} was replaced by {name_of(value)}"
    return None


def _owner_name(owner: Any) -> str:
    name: str = "F" if owner is F else getattr(owner, "__name__", type(owner).__name__)
    return name.rpartition(".")[2]


def name_of(function: Any) -> str:
    """Return module and name of a function, for messages."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None)}.{name}"


def context_obstacle() -> str | None:
    """Return which active mode or transform the fused ops do not serve, or ``None``.

    These are a ``TorchFunctionMode``, which may answer for torch's functions; forward-mode
    differentiation and ``vmap``, for which the kernels have no rules; and an ONNX exporter, which
    knows torch's own operators.
    """
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if type(_innermost_transform()) is not _NO_TRANSFORM:  # Dynamo cannot trace "is None" here
        if torch.compiler.is_compiling():  # nor ask which transform it is
            return "a transform of torch.func is being compiled"
        if any(transform.key() == _VMAP for transform in _transforms()):
            return "torch.func.vmap is active"
    if _num_modes() == 0 and _tracing_state() is None:
        return None
    if torch.onnx.is_in_onnx_export():
        return "a model is being exported to ONNX"
    for index in range(_num_modes()):
        mode = type(torch._C._get_function_stack_at(index))
        if not mode.__module__.startswith(_PASSIVE_MODES):
            return f"{mode.__name__} intercepts torch's functions"
    return None


def remember(cls: type[nn.Module], watched: WatchList | None = None) -> None:
    """Keep the watch list of a class whose instances a fused forward bypasses."""
    KNOWN[cls] = watch_list(cls) if watched is None else watched


def watch_list(cls: type[nn.Module], *methods: str, copied: bool = False) -> WatchList:
    """Return what ``forward`` and further methods of a class read.

    What the functions and methods read counts as well, to any depth, up to torch's own files.

    Args:
        cls: the class.
        *methods: the further methods.
        copied: whether what runs in their place has their code: it reads the values of the file and
            calls other methods and functions as the original does, so that these may change.

    Raises:
        UnsupportedError: code of the class has other globals than those of a module.
    """
    reading = _Reading(follows=not copied)
    for name in dict.fromkeys(("forward", *methods)):
        reading.add_method(cls, name)
    return reading.result(omits=("forward", *methods))


def watched_function(module_name: str, name: str) -> WatchList:
    """Return a function of a module with what it reads."""
    module, reading = sys.modules[module_name], _Reading(follows=True)
    reading.add(module, name, getattr(module, name))
    return reading.result()


def functions(*names: str) -> WatchList:
    """Return functions of ``torch.nn.functional``."""
    return WatchList(tuple(_function(name) for name in names))


class _Reading:
    """Collects what methods and functions read, up to torch's own files."""

    def __init__(self, *, follows: bool) -> None:
        self._attributes: dict[tuple[int, str], WatchedAttribute] = {}
        self._methods: dict[str, None] = {}
        self._follows = follows

    def result(self, omits: tuple[str, ...] = ()) -> WatchList:
        """Return the list, without methods that an instance may have of its own."""
        methods = tuple(name for name in self._methods if name not in omits)
        return WatchList(tuple(self._attributes.values()), methods)

    def add_method(self, cls: type[nn.Module], name: str) -> None:
        method = getattr(cls, name)
        self._methods[name] = None
        owner = next(base for base in cls.__mro__ if name in vars(base))
        if self._adds(cls, name, _known(method, _root(owner))):
            self._add_code(cls, inspect.unwrap(method))

    def add(self, module: ModuleType, name: str, value: Any) -> None:
        follows = self._follows and _root(module) != "torch"
        if inspect.isclass(value):
            is_layer = issubclass(value, nn.Module)
            if (is_layer or follows) and self._adds(module, name, value):
                if is_layer:
                    self.add_method(value, "forward")
                elif issubclass(value, torch.autograd.Function):
                    self._add_class(value)
        elif callable(value):
            of_torch = str(getattr(value, "__module__", None)).partition(".")[0] == "torch"
            if (
                (self._follows or of_torch)
                and self._adds(module, name, _known(value, _root(module)))
                and follows
            ):
                self._add_function(value)
        elif follows:
            self._adds(module, name, value)

    def _adds(self, owner: Any, name: str, known: Any) -> bool:
        attribute = WatchedAttribute(owner, name, known)
        return self._attributes.setdefault((id(owner), name), attribute) is attribute

    def _add_class(self, cls: type) -> None:
        for name, member in vars(cls).items():
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                self._adds(cls, name, getattr(cls, name))
                self._add_function(function)

    def _add_function(self, value: Any) -> None:
        """Add what a function reads if it is written in Python, outside of torch."""
        function = inspect.unwrap(value)
        if isinstance(function, FunctionType):
            home = str(function.__globals__.get("__name__", ""))
            if not home.startswith(("torch.", "transformers.utils.")):
                self._add_code(nn.Module, function)

    def _add_code(self, cls: type[nn.Module], function: Any) -> None:
        """Add what a function reads; ``cls`` has the methods that it names."""
        names = list(names_in(function.__code__))
        module = sys.modules.get(function.__globals__.get("__name__", ""))
        if module is None or vars(module) is not function.__globals__:
            raise UnsupportedError(f"{function.__qualname__} is code of no module")
        for owner, name in _read_from_modules(function):
            if owner is F:
                self._adds(*_function(name))
            elif self._follows:
                self._adds(owner, name, getattr(owner, name))
        if _root(module) != "torch":
            for name in ("__code__", *_DEFAULTS):
                if getattr(function, name) is not None:
                    self._adds(function, name, getattr(function, name))
        for name in dict.fromkeys(names):
            if name in vars(module):
                self.add(module, name, vars(module)[name])
        if self._follows:
            self._add_cells(function)
            for name in dict.fromkeys(names):
                self._add_attribute(cls, name, inherited="super" in names)

    def _add_cells(self, function: Any) -> None:
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            content = _contents(cell)
            if name != "__class__" and self._adds(cell, "cell_contents", content):
                self._add_function(content)

    def _add_attribute(self, cls: type[nn.Module], name: str, *, inherited: bool) -> None:
        """Add an attribute of a class, and those of its bases if ``super`` may read them."""
        bases = [base for base in cls.__mro__ if base not in nn.Module.__mro__]
        owners = [base for base in bases if name in vars(base)]
        for owner in owners if inherited else owners[:1]:
            value: Any = vars(owner)[name]
            watched = owner if inherited and owner is not owners[0] else cls
            if isinstance(value, FunctionType):
                self.add_method(watched, name)
            elif self._adds(watched, name, getattr(watched, name)) and isinstance(value, property):
                getter: Any = value.fget
                self._add_code(cls, inspect.unwrap(getter))


def _read_from_modules(function: Any) -> Iterator[tuple[ModuleType, str]]:
    """Yield module and name of the routines that a function reads as ``module.name``."""
    for code in with_inner(function.__code__):
        value: Any = None
        for step in dis.get_instructions(code):
            if _is_global(step):
                value = function.__globals__.get(step.argval)
            elif step.opname in _READS and isinstance(value, ModuleType):
                owner, value = value, getattr(value, step.argval, None)
                if inspect.isroutine(value):
                    yield owner, step.argval
            elif step.opname not in _BETWEEN:
                value = None


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that ``code`` and the code inside it read."""
    for part in with_inner(code):
        yield from part.co_names


def with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and the code of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_inner(constant)


def global_names(code: CodeType) -> set[str]:
    """Return the names of globals that ``code`` and the code inside it read."""
    return {step.argval for part in with_inner(code) for step in _steps(part) if _is_global(step)}


def _steps(code: CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opcode in dis.hasname]


def _is_global(step: dis.Instruction) -> bool:
    return step.opname in ("LOAD_GLOBAL", "LOAD_NAME")


def with_globals(
    function: Any, namespace: dict[str, Any], closure: tuple[CellType, ...] | None = None
) -> FunctionType:
    """Return a function of the same code that reads other globals, and maybe another closure."""
    copy = FunctionType(
        function.__code__,
        namespace,
        function.__name__,
        function.__defaults__,
        function.__closure__ if closure is None else closure,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__doc__ = function.__doc__
    return copy


def with_others(function: Any, others: dict[str, Any], user: str) -> FunctionType | None:
    """Return a function of the same code that reads others in the place of some globals.

    The others are globals of the same file under further names, so that the code finds all else in
    its file with the values of the time of the call, and assigns to globals there. Decorators
    around the function are copied.

    Args:
        function: the function.
        others: name of a global -> what stands for it.
        user: the module of the rule; several of them change code of one file.

    Returns:
        ``None`` if a decorator does not hold what it wraps as one value of its closure, or if the
        code reads an attribute of the name of such a global.
    """
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        cells = list(function.__closure__ or ())
        holds = [i for i, cell in enumerate(cells) if _contents(cell) is wrapped]
        inner = with_others(wrapped, others, user) if len(holds) == 1 else None
        if inner is None:
            return None
        cells[holds[0]] = CellType(inner)
        copy = with_globals(function, function.__globals__, tuple(cells))
        vars(copy).update(vars(function))
        copy.__wrapped__ = inner  # type: ignore[attr-defined]
        return copy
    names = {name: f"__fusedops_{user.rpartition('.')[2]}_{name}__" for name in others}
    code = _renamed(function.__code__, names)
    if code is None:
        return None
    function.__globals__.update({names[name]: other for name, other in others.items()})
    copy = with_globals(function, function.__globals__)
    copy.__code__ = code
    return copy


def _renamed(code: CodeType, names: dict[str, str]) -> CodeType | None:
    """Return code with other names of globals; ``None`` if one is that of an attribute as well."""
    if any(step.argval in names and not _is_global(step) for step in _steps(code)):
        if any(step.argval in names and _is_global(step) for step in _steps(code)):
            return None
        names = {}
    constants: list[Any] = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and (constant := _renamed(constant, names)) is None:
            return None
        constants.append(constant)
    renamed = tuple(names.get(name, name) for name in code.co_names)
    return code.replace(co_names=renamed, co_consts=tuple(constants))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned to it
        return None


def with_other(
    function: Any, calls: set[str], replacement: Callable[[Any], Any], user: str
) -> FunctionType | None:
    """Return a function of the same code that calls others instead of some, or ``None``.

    ``calls`` are the names of some; ``replacement`` returns what stands for a global, or ``None``;
    ``user`` is that of ``with_others``.
    """
    code: Any = inspect.unwrap(function)
    names, values = set(names_in(code.__code__)), code.__globals__
    replaced_by = {name: replacement(values[name]) for name in names & values.keys()}
    others = {name: other for name, other in replaced_by.items() if other is not None}
    # Code may have imported a function under another name: ``import ... as sdpa``.
    called = names.union(getattr(values[name], "__name__", name) for name in others)
    if calls.isdisjoint(called):
        return None
    read = global_names(code.__code__)  # not those that name attributes alone
    others = {name: other for name, other in others.items() if name in read}
    return with_others(function, others, user) if others else None


def in_torch(
    user: str, of_functional: dict[str, Any], of_nn: dict[str, Any]
) -> Callable[[Any], Any]:
    """Return a function that tells what stands for a global in code that uses others of torch.

    These are the others themselves, and modules that are ``torch``, ``torch.nn`` and its
    ``functional`` but for the others.
    """
    functional = _copy_of_module(F, user, of_functional)
    copy_of_nn = _copy_of_module(nn, user, {"functional": functional, **of_nn})
    others = [(torch, _copy_of_module(torch, user, {"nn": copy_of_nn}))]
    others += [(nn, copy_of_nn), (F, functional)]
    others += [(getattr(F, name), other) for name, other in of_functional.items()]
    others += [(getattr(nn, name), other) for name, other in of_nn.items()]
    return lambda value: next((other for stock, other in others if stock is value), None)


def _copy_of_module(module: ModuleType, user: str, others: dict[str, Any]) -> Any:
    """Return a module with ``others``, and all else as a module has it at the time.

    It can be imported under the name of its user, as torch.compile does.
    """
    name = f"{user}.{module.__name__}"
    copy = sys.modules[name] = ModuleType(name, module.__doc__)
    vars(copy).update(others, __getattr__=functools.partial(getattr, module))
    return copy


def _function(name: str) -> WatchedAttribute:
    known = _known(getattr(F, name), "torch")
    # Most of these names are built-in functions, which are known wherever they are gone.
    return WatchedAttribute(F, name, getattr(torch._C._nn, name, None) if known is None else known)


def _known(function: Any, root: str) -> Any:
    """Return ``function``, or ``None`` where it or a wrapper of it comes from another library."""
    if isinstance(function, BuiltinFunctionType):
        return function
    layer, homes = function, {root, "torch"}
    if root != "torch":  # code of a model in the style of transformers has its decorators
        homes.add("transformers")
    while layer is not None:
        home = getattr(layer, "__globals__", {}).get("__name__", root)
        if home.partition(".")[0] not in homes or home.startswith("torch.distributed"):
            return None
        layer = getattr(layer, "__wrapped__", None)
    return function


def _root(owner: Any) -> str:
    name = owner.__module__ if inspect.isclass(owner) else owner.__name__
    return name.partition(".")[0]

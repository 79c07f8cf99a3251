"""What a patched module stands for, and whether it is still there.

Libraries put their own functions in the place of torch's and transformers': context parallelism
takes ``F.scaled_dot_product_attention``, sequence parallelism an entry of ``AttentionInterface``,
others ``apply_rotary_pos_emb`` of a modeling file or a class's ``forward``. A patched module calls
none of these, so it asks before each call whether they are the ones that it was written for, and
runs its original forward where one is not: the replacement is called then. The places to look at
are read from the code of the original, once, when its rule is made.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

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


class CodePlace(NamedTuple):
    """An attribute that somebody may replace."""

    owner: Any  # a module or a class
    name: str  # of the attribute
    known: Any  # its value when it was read first, or ``None`` if that was a replacement already


Places = tuple[CodePlace, ...]

# What the classes are made of whose instances a fused forward may bypass.
KNOWN: dict[type, Places] = {}


def replaced(places: Places) -> str | None:
    """Return which of ``places`` holds something else now, as a reason, or ``None``.

    Called before every forward of a patched module and for each child that it bypasses; 130 ns
    for one place, 200 for two and 270 for three, on a Zen 4 core that others used too.
    """
    for owner, name, known in places:
        if getattr(owner, name) is not known:
            reason = _replacement(owner, name)
            if reason is not None:
                return reason
    return None


def _replacement(owner: Any, name: str) -> str | None:
    replacement = name_of(getattr(owner, name))
    if replacement in _EQUIVALENT:
        return None
    where = "F" if owner is F else owner.__name__.rpartition(".")[2]
    return f"{where}.{name} was replaced by {replacement}"


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
    if (
        _num_modes() == 0
        and forward_ad._current_level < 0
        and type(_innermost_transform()) is _NO_TRANSFORM  # Dynamo cannot trace "is None" here
        and _tracing_state() is None
    ):
        return None
    return _active_context()


def _active_context() -> str | None:
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if type(_innermost_transform()) is not _NO_TRANSFORM:
        if torch.compiler.is_compiling():  # Dynamo cannot ask which transform it is
            return "a transform of torch.func is being compiled"
        if any(transform.key() == _VMAP for transform in _transforms()):
            return "torch.func.vmap is active"
    if torch.onnx.is_in_onnx_export():
        return "a model is being exported to ONNX"
    for index in range(_num_modes()):
        mode = type(torch._C._get_function_stack_at(index))
        if not mode.__module__.startswith(_PASSIVE_MODES):
            return f"{mode.__name__} intercepts torch's functions"
    return None


def remember(cls: type[nn.Module], places: Places | None = None) -> None:
    """Keep the places of a class whose instances a fused forward bypasses.

    Args:
        cls: the class.
        places: what its instances stand for; those of its own forward by default.
    """
    KNOWN[cls] = places_of(cls) if places is None else places


def places_of(cls: type[nn.Module], *methods: str) -> Places:
    """Return what the forward of ``cls`` is made of: itself, its file's functions, those of ``F``.

    Functions that the forward's own functions call are not looked for, classes of modules are.

    Args:
        cls: the class.
        *methods: further methods that count, in addition to ``forward``.
    """
    places: dict[CodePlace, None] = {}
    for name in dict.fromkeys(("forward", *methods)):
        method = getattr(cls, name)
        places[CodePlace(cls, name, _known(method, _root(cls)))] = None
        places.update(dict.fromkeys(_used(inspect.unwrap(method))))
    return tuple(places)


def global_function(module_name: str, name: str) -> Places:
    """Return the place of a function of a module, and those of what it is made of."""
    module = sys.modules[module_name]
    function = getattr(module, name)
    return (
        CodePlace(module, name, _known(function, _root(module))),
        *_used(inspect.unwrap(function)),
    )


def functions(*names: str) -> Places:
    """Return the places of functions of ``torch.nn.functional``."""
    return tuple(_function(name) for name in names)


def _used(function: Any) -> Iterator[CodePlace]:
    names = list(names_in(function.__code__))
    if "functional" in names or function.__globals__.get("F") is F:
        yield from functions(*(name for name in names if inspect.isroutine(vars(F).get(name))))
    module = sys.modules[function.__globals__["__name__"]]
    for name in names:
        value = vars(module).get(name)
        if inspect.isclass(value) and issubclass(value, nn.Module):
            yield CodePlace(module, name, value)
            yield from places_of(value)
        elif callable(value) and not inspect.isclass(value):
            yield CodePlace(module, name, _known(value, _root(module)))


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


def namespace(module_name: str, user: str) -> dict[str, Any]:
    """Return the globals for code of a file in which some functions are replaced.

    They are those of a module of their own, which torch.compile looks for under its name. Several
    rules change code of one file, one the attention and another the loss, and the code of both
    reads ``F``: neither may read that of the other.

    Args:
        module_name: holds the patched classes of the file.
        user: the module of the rule.
    """
    name = f"{module_name}.__{user.rpartition('.')[2]}__"
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name)
        vars(module)["__builtins__"] = vars(sys.modules[module_name])["__builtins__"]
    return vars(sys.modules[name])


def with_inner_globals(function: Any, namespace: dict[str, Any]) -> FunctionType | None:
    """Return ``with_globals`` of a function that decorators wrap, in copies of these decorators.

    ``None`` if one of them does not hold what it wraps as one value of its closure.
    """
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        return with_globals(function, namespace)
    cells = list(function.__closure__ or ())
    holds = [i for i, cell in enumerate(cells) if _contents(cell) is wrapped]
    inner = with_inner_globals(wrapped, namespace) if len(holds) == 1 else None
    if inner is None:
        return None
    cells[holds[0]] = CellType(inner)
    copy = with_globals(function, function.__globals__, tuple(cells))
    vars(copy).update(vars(function))
    copy.__wrapped__ = inner  # type: ignore[attr-defined]
    return copy


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned to it
        return None


def own_methods(cls: type[nn.Module]) -> dict[str, FunctionType]:
    """Return the plain methods of a class and its bases, up to ``nn.Module``."""
    methods: dict[str, FunctionType] = {}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, method in vars(base).items():
            if name not in methods and isinstance(method, FunctionType):
                methods[name] = method
    return methods


def globals_read(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function may read: an attribute may have the name of one."""
    names = {name for name in names_in(function.__code__) if not name.startswith("__")}
    return {key: function.__globals__[key] for key in names & function.__globals__.keys()}


def methods_with(
    cls: type[nn.Module],
    module_name: str,
    calls: set[str],
    replacement: Callable[[Any], Any],
) -> dict[str, FunctionType]:
    """Return the methods of a class that call some functions, with others in their place.

    Args:
        cls: the class.
        module_name: holds the patched class, with its ``namespace`` for this replacement.
        calls: names of these functions.
        replacement: returns what stands for a global, or ``None``.
    """
    ours = namespace(module_name, replacement.__module__)
    methods = {}
    for name, method in own_methods(cls).items():
        takes_input = len(inspect.signature(inspect.unwrap(method)).parameters) > 1
        changed = with_other(method, ours, calls, replacement) if takes_input else None
        if changed is not None:
            methods[name] = changed
    return methods


def with_other(
    function: Any, ours: dict[str, Any], calls: set[str], replacement: Callable[[Any], Any]
) -> FunctionType | None:
    """Return a function of the same code that calls others instead of some, or ``None``.

    Args:
        function: the function, maybe one that decorators wrap.
        ours: the globals that it reads; what it reads in its own module is put there.
        calls: names of the functions to replace.
        replacement: returns what stands for a global, or ``None``.
    """
    code: Any = inspect.unwrap(function)
    names = set(names_in(code.__code__))
    read = globals_read(code)
    replaced_by = {key: replacement(value) for key, value in read.items()}
    if not names & calls or set(replaced_by.values()) <= {None}:
        return None
    changed = with_inner_globals(function, ours)
    if changed is not None:
        ours.update({k: v if replaced_by[k] is None else replaced_by[k] for k, v in read.items()})
    return changed


def copies_of_torch(
    name: str, of_nn: dict[str, Any], of_functional: dict[str, Any]
) -> tuple[ModuleType, ...]:
    """Return copies of ``torch``, ``torch.nn`` and ``torch.nn.functional`` that differ in values.

    Args:
        name: of the module that uses them.
        of_nn: what differs in ``torch.nn``.
        of_functional: what differs in ``torch.nn.functional``.
    """
    copies = tuple(copy_of_module(module, name) for module in (torch, nn, F))
    vars(copies[0])["nn"], vars(copies[1])["functional"] = copies[1:]
    vars(copies[1]).update(of_nn)
    vars(copies[2]).update(of_functional)
    return copies


def copy_of_module(module: ModuleType, name: str) -> ModuleType:
    """Return a module with the same contents, which is imported under the name of its user.

    torch.compile imports a function's module by the name in its globals.
    """
    name_of_copy = f"{name}.{module.__name__}"
    copy = sys.modules[name_of_copy] = ModuleType(name_of_copy, module.__doc__)
    vars(copy).update({key: value for key, value in vars(module).items() if key != "__name__"})
    return copy


def _function(name: str) -> CodePlace:
    known = _known(getattr(F, name), "torch")
    # Most of these names are built-in functions, which are known wherever they are gone.
    return CodePlace(F, name, getattr(torch._C._nn, name, None) if known is None else known)


def _known(function: Any, root: str) -> Any:
    """Return ``function``, or ``None`` where it or a wrapper of it comes from another library."""
    if isinstance(function, BuiltinFunctionType):
        return function
    layer = function
    while layer is not None:
        home = getattr(layer, "__globals__", {}).get("__name__", root)
        if home.partition(".")[0] not in (root, "torch") or home.startswith("torch.distributed"):
            return None
        layer = getattr(layer, "__wrapped__", None)
    return function


def _root(owner: Any) -> str:
    """Return the name of the package that ``owner``, a class or a module, belongs to."""
    name = owner.__module__ if inspect.isclass(owner) else owner.__name__
    return name.partition(".")[0]

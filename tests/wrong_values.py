"""Wrong values for every kind of argument, and what a refusal of one must look like.

The kind of an argument is its annotation. A value is either ``wrong``: it must be refused; or it
``means`` another one, as ``numpy.float64(2)`` means 2.0: it is refused or gives the same result.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

import fusedops
from fusedops.ops import RoutingPlan
from fusedops.specs import tensors_in

NAN, INF = float("nan"), float("inf")
REFUSALS = (TypeError, ValueError, fusedops.UnsupportedError)


@dataclasses.dataclass(frozen=True)
class Value:
    """One value to try in an argument's place.

    Attributes:
        label: for messages.
        value: what to pass.
        means: a value that may be meant; ``WRONG`` where none is.
    """

    label: str
    value: Any
    means: Any


WRONG = object()


def values_for(annotation: str, present: Any, like: torch.Tensor | None) -> list[Value]:
    """Return what to try for an argument.

    Args:
        annotation: the argument's, as written.
        present: its value in a call that is right.
        like: a tensor that stands for one that is absent.
    """
    kinds = {part.strip() for part in annotation.split("|")}
    wrong: dict[str, Any] = {"an object": object(), "a set": {1}}
    meant: dict[str, tuple[Any, Any]] = {}
    if "None" not in kinds and present is not None:
        wrong["None"] = None
    if "torch.Tensor" in kinds:
        tensor = present if isinstance(present, torch.Tensor) else like
        wrong |= _tensors(tensor)
        if tensor is not None and not tensor.is_floating_point():
            meant |= {"floats": (tensor.float(), tensor)}
    if "RoutingPlan" in kinds:
        wrong |= _plans(present)
    if "bool" in kinds:
        wrong |= {"'yes'": "yes", "1": 1, "0": 0, "1.0": 1.0, "[]": [], "numpy bool": np.True_}
        wrong |= {"tensor": torch.tensor(True), "tensors": torch.ones(2, dtype=torch.bool)}
    if "float" in kinds:
        wrong |= {"'1'": "1", "1j": 1j, "[1.0]": [1.0], "10**400": 10**400}
        wrong |= {"numpy array": np.ones(3), "tensors": torch.ones(2)}
        number = 0.5 if present is None else present
        meant |= {"Fraction": (Fraction(1, 2), 0.5), "2**70": (2**70, 2.0**70)}
        meant |= {"numpy float64": (np.float64(number), number), "True": (True, 1.0)}
        exact = float(np.float32(number))
        meant |= {"numpy float32": (np.float32(exact), exact), "int": (1, 1.0)}
        meant |= {"tensor": (torch.tensor(exact), exact)}
    if "int" in kinds:
        wrong |= {"'1'": "1", "2.0": 2.0, "nan": NAN, "1j": 1j, "[1]": [1], "True": True}
        wrong |= {"2**63": 2**63, "-2**63 - 1": -(2**63) - 1}
        wrong |= {"numpy array": np.array([1, 2]), "tensors": torch.tensor([1, 2])}
        number = 1 if present is None else present
        meant |= {"numpy int64": (np.int64(number), number)}
        meant |= {"tensor": (torch.tensor(number), number)}
    if "str" in kinds and "torch.device" not in kinds:
        wrong |= {"''": "", "'no such'": "no such", "1": 1, "[]": [], "tensor": torch.ones(2)}
        if isinstance(present, str):
            wrong |= {"bytes": present.encode(), "in a list": [present]}
            meant |= {"numpy str": (np.str_(present), present)}
    if "Sequence[int]" in kinds:
        size = tuple(present)
        wrong |= {"one number": size[0], "string": "8", "()": (), "float": 8.0, "2**70": (2**70,)}
        wrong |= {"floats": tuple(map(float, size)), "bools": (True,), "nested": [list(size)]}
        wrong |= {"iterator": iter(size), "[None]": [None], "strings": tuple(map(str, size))}
        meant |= {"tensor": (torch.tensor(size), size)}
        meant |= {"tensors": (tuple(map(torch.tensor, size)), size)}
        meant |= {"list": (list(size), size), "torch.Size": (torch.Size(size), size)}
        meant |= {"numpy": (np.array(size), size), "numpy ints": (tuple(map(np.int64, size)), size)}
    if "tuple[int, int]" in kinds:
        wrong |= {"4": 4, "'ab'": "ab", "one": (1,), "three": (1, 2, 3), "floats": (1.0, 0.0)}
        wrong |= {"nan": (NAN, 0), "strings": ("1", "2"), "bools": (True, False)}
        wrong |= {"2**70": (2**70, 0), "-2": (-2, 0), "tensor": torch.tensor([1, 0])}
        meant |= {"list": ([1, 0], (1, 0)), "numpy": (np.array([1, 0]), (1, 0))}
    if "torch.device" in kinds:
        wrong = {"'no such'": "no such", "''": "", "1.5": 1.5, "[]": [], "True": True}
    if "torch.dtype" in kinds:
        wrong |= {"-1": -1, "6": 6, "200": 200, "'float32'": "float32", "float": float}
        wrong |= {"numpy": np.float32, "layout": torch.strided, "int64": torch.int64}
        wrong |= {"float8": torch.float8_e4m3fn, "complex": torch.complex64}
    if annotation == "Any":  # a process group
        wrong |= {"'group'": "group", "1": 1, "[0]": [0], "nan": NAN}
    if "list[int]" in kinds:
        wrong.pop("[1]")
    listed = [Value(label, value, WRONG) for label, value in wrong.items()]
    return listed + [Value(label, *pair) for label, pair in meant.items()]


def _tensors(tensor: torch.Tensor | None) -> dict[str, Any]:
    """Return what is no dense tensor of a sensible dtype, in the shape of ``tensor``."""
    assert tensor is not None
    dense = tensor.detach().clone()
    real = dense if tensor.is_floating_point() else dense.float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all of these are prototypes
        quantized = torch.quantize_per_tensor(real.float(), 0.5, 0, torch.qint8)
        found: dict[str, Any] = {
            "complex": real.to(torch.complex64),
            "sparse": dense.to_sparse(),
            "mkldnn": real.float().to_mkldnn(),
            "quantized": quantized,
            "float8": real.to(torch.float8_e4m3fn),
            "int16": dense.to(torch.int16),
        }
        if dense.dim() == 2:
            found["sparse_csr"] = dense.to_sparse_csr()
        for layout in (torch.strided, torch.jagged):
            parts = [dense[0], dense[0]] if dense.dim() > 1 and len(dense) else [dense.reshape(-1)]
            found[f"nested {layout}"] = torch.nested.nested_tensor(parts, layout=layout)
    found |= {"text": "text", "1.5": 1.5, "[1.0]": [1.0], "nan": NAN, "True": True}
    found |= {"numpy": np.ones(3, np.float32), "storage": dense.untyped_storage()}
    return found


def _plans(plan: Any) -> dict[str, Any]:
    """Return what is no plan, and plans that are none."""
    found: dict[str, Any] = {"'plan'": "plan", "tensors": tensors_in(plan), "{}": {}}
    if isinstance(plan, RoutingPlan):
        found["its class"] = RoutingPlan
        for name in ("positions", "offsets"):
            for label, value in (("None", None), ("list", [1]), ("sparse", "to_sparse")):
                broken = getattr(plan, name).to_sparse() if value == "to_sparse" else value
                found[f"{name} {label}"] = dataclasses.replace(plan, **{name: broken})
    return found


def complaint(
    call: Callable[[], Any],
    name: str | tuple[str, ...],
    argument: str,
    value: Value,
    meant: Callable[[], Any],
) -> str | None:
    """Return what is wrong with how ``call`` takes a value, or ``None``.

    Args:
        call: passes the value.
        name: what a message begins with: an op, or one of several.
        argument: what it names.
        value: what is passed.
        meant: passes what the value means.
    """
    where = f"{argument}={value.label}"
    before = torch.get_rng_state()
    try:
        result = call()
    except REFUSALS as error:
        text = str(error)
        if type(error) not in REFUSALS:
            return f"{where}: {type(error).__name__}: {text[:200]}"
        names = (name,) if isinstance(name, str) else name
        if not text.startswith(tuple(f"{each}: " for each in names)) or argument not in text:
            return f"{where}: the message names not both: {text[:200]}"
        drawn = not torch.equal(torch.get_rng_state(), before)
        return f"{where}: numbers were drawn before the refusal" if drawn else None
    except Exception as error:
        return f"{where}: {type(error).__name__}: {str(error)[:200]}"
    if value.means is WRONG:
        return f"{where}: accepted"
    pairs = zip(tensors_in(result), tensors_in(meant()), strict=True)
    same = all(torch.equal(got, want) for got, want in pairs)
    return None if same else f"{where}: accepted with another result"


def complaints_about(
    function: Callable[..., Any],
    names: str | tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    argument: str | None = None,
    takes_any_number: Iterable[str] = (),
    nested: bool = True,
) -> list[str]:
    """Return what is wrong with how a function takes wrong values for its arguments.

    Args:
        function: of which a call is known that is right.
        names: what a message begins with.
        args: of the right call.
        kwargs: of the right call.
        argument: the one to try; all by default, but for those that take any number of values.
        takes_any_number: arguments that may be NaN and infinite.
        nested: whether nested tensors are wrong.
    """
    found: list[str | None] = []
    signature = inspect.signature(function)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL or argument not in (None, name):
            continue
        annotation, bound = str(parameter.annotation), signature.bind(*args, **kwargs)
        bound.apply_defaults()
        like = next((arg for arg in bound.args if isinstance(arg, torch.Tensor)), None)
        like = torch.linspace(-1, 1, 24).view(3, 8) if like is None else like
        values = values_for(annotation, bound.arguments[name], like)
        if "float" in annotation and name not in takes_any_number:
            values += [Value(str(each), each, WRONG) for each in (NAN, INF, -INF)]

        def call(given: Any, name: str = name, bound: Any = bound) -> Any:
            bound.arguments[name] = given
            result = function(*bound.args, **bound.kwargs)
            # A module's parameters are drawn at random: its constructor is right or refuses.
            return None if isinstance(result, torch.nn.Module) else result

        def attempt(value: Value, name: str = name, call: Any = call) -> str | None:
            passes, meant = (functools.partial(call, v) for v in (value.value, value.means))
            return complaint(passes, names, name, value, meant)

        tried = [value for value in values if nested or not value.label.startswith("nested")]
        fusedops.reset_counters()
        found += [attempt(value) for value in tried if value.means is WRONG]
        # Of these the compiled kernel is called, and refuses.
        ran = {op for op, _ in fusedops.counters()} - {"layer_norm", "cross_entropy"}
        found.append(f"{name}: {sorted(ran)} ran before a refusal" if ran else None)
        found += [attempt(value) for value in tried if value.means is not WRONG]
    return [each for each in found if each is not None]

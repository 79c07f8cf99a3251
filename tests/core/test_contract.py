"""Contracts of operators: the language, and that operators and fake kernels refuse by them."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from fuzz import mutate
from torch.utils import _pytree as pytree

import fusedops
from fusedops._core import backends, contract, extension
from fusedops._core._contract_grammar import Contract
from fusedops.specs import MultiTensorSpec, all_specs, multi_tensor_specs, tensors_in
from fusedops.specs.comparison import floating, fresh, incoming
from fusedops.specs.recorder import RecordOps

CPU = torch.device("cpu")
SPECS = [*all_specs().values(), *multi_tensor_specs().values()]
by_spec = pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
native = pytest.mark.skipif(
    extension.cpu_library() is not None, reason="the compiled library is not there"
)


def program(rules: contract.Rules, *arguments: tuple[str, str]) -> contract.Program:
    return Contract("op", arguments, rules).program(arguments)


def f32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


BF16, F64 = torch.bfloat16, torch.float64
NAN = float("nan")


def case(words: str | None, rules: str, *args: Any, others: str = "", **more: Any) -> Any:
    """A call with arguments x, w (tensors) and others, its rules, and what refuses it."""
    read = dict(rule.split(": ") for rule in rules.split("; ")) | more
    tensors = [("Tensor", name) for name in read if name in ("x", "w")]
    kinds = [tuple(part.split()) for part in others.split(",") if part]
    return pytest.param(read, [*tensors, *kinds], args, words)


VECTORS = "x: T [n]; w: T [n]"
LISTED = {"others": "int[] list"}
BROADCAST = "x: T [*a, m]; w: T [*b, m]; c: broadcast(a, b)"
OF_BROADCASTS = "; d: broadcast(b, c); e: broadcast(d, a); f: broadcast(e, b); g: broadcast(c, f)"
ALL_THREE = "; h: c[0] + d[0] + e[0] + f[0] + g[0] == 15"
MODES = {"others": "str mode", "mode": ("sum", "mean")}
OPTIONAL = {"others": "int k, Tensor? z"}
CASES = [
    case(None, "x: T [*rows, n]; w: T [n]", f32(2, 3), f32(3)),
    case(r"w must be of shape \[3\]", "x: T [*rows, n]; w: T [n]", f32(2, 3), f32(2)),
    case(r"x must be of shape \[\*rows, n\]", "x: T [*rows, n]; w: T [n]", f32(), f32(2)),
    case("w must have dtype float32, got float64", VECTORS, f32(3), f32(3).double()),
    case(None, "x: T [n]; w: param(T) [n]", f32(3).bfloat16(), f32(3)),
    case("w must have dtype float32", "x: T [n]; w: param(T) [n]", f32(3), f32(3).bfloat16()),
    case(None, "x: T [n]; w: stat(T) [n]", f32(3).bfloat16(), f32(3)),
    case("w must have dtype float64", "x: T [n]; w: stat(T) [n]", f32(3).double(), f32(3)),
    case("x must have dtype float16 or bfloat16 or", "x: T [n]", f32(3).long()),
    case(None, "x: T [n] | [0]; w: T [n] | [0]", f32(3), f32(0)),
    case(r"w must be of shape \[3\] or \[0\]", "x: T [n]; w: T [n] | [0]", f32(3), f32(1)),
    case(None, "x: T [n, m]; w: T [~n, ~m]", f32(3, 2), f32(1, 2)),
    case(r".*shape \[1 or 3, 1 or 2\]", "x: T [n, m]; w: T [~n, ~m]", f32(3, 2), f32(2, 2)),
    case(None, "x: T [*all]; w: T [~...all]", f32(3, 2), f32(1)),
    case("w must be of shape", "x: T [*all]; w: T [~...all]", f32(3, 2), f32(3)),
    case("w must be of shape", "x: T [*all]; w: T [~...all]", f32(3, 2), f32(1, 3, 2)),
    case(None, BROADCAST, f32(1, 2), f32(4, 2)),
    case("c must be sizes that", BROADCAST, f32(3, 2), f32(4, 2)),
    case(None, "x: T [n]; w: T [2 * n + 1]", f32(2), f32(5)),
    case(r"w must be of shape \[5\]", "x: T [n]; w: T [2 * n + 1]", f32(2), f32(4)),
    case("n must be such that n % 2 == 0, got n = 3", "x: T [n]; n: n % 2 == 0", f32(3)),
    case("k must be such .*k = 4, n = 3", "x: T [n]; k: 1 <= k <= n", f32(3), 4, others="int k"),
    case("p must be a number", "x: T [n]; p: 0 <= p < 1", f32(3), 1.0, others="float p"),
    case("p must be a number", "x: T [n]; p: 0 <= p < 1", f32(3), NAN, others="float p"),
    case("mode .*did you mean 'mean'", "x: T [n]", f32(3), "meen", **MODES),
    case(
        None,
        "n: 2 + 1; x: T [n if mode == 'all' else 0]",
        f32(0),
        "none",
        others="str mode",
        mode=("all", "none"),
    ),
    case(None, "x: T [*list]; list: len(list) >= 1", f32(2, 3), [2, 3], **LISTED),
    case("list must be such that", "x: T [*list]; list: len(list) >= 1", f32(), [], **LISTED),
    case("list must be such that", "x: T [n]; list: list[1] == n", f32(2), [2], **LISTED),
    case("x must have dtype bfloat16", "x: dtype [n]", f32(2), BF16, others="ScalarType dtype"),
    case("dtype must be a float", "x: dtype [n]", f32(2), torch.int8, others="ScalarType dtype"),
    case("w must be a torch.Tensor, got None", VECTORS, f32(3), None),
    case("w must be on cpu, the device of x", VECTORS, f32(3), f32(3).to("meta")),
    case(None, BROADCAST + OF_BROADCASTS + ALL_THREE, f32(3, 2), f32(1, 2)),
    case(None, "x: T [n]; z: T [n]; k: k == itemsize(z)", f32(3), 8, None, **OPTIONAL),
    case("k must be", "x: T [n]; z: T [n]; k: k == itemsize(z)", f32(3), 8, f32(3), **OPTIONAL),
    case(r".*shape \[n // k\]", "x: T [n]; w: T [n // k]", f32(3), f32(3), 0, others="int k"),
    case("part must be such that n // k", "x: T [n]; part: n // k", f32(3), 0, others="int k"),
]
# What decides where one operand cannot be computed (k // 0) or is not known (m), for k = 1.
TWO = "int k, int zero"
CASES += [
    case(None if allowed else "k must be such", "x: T [n]", f32(3), 1, 0, others=TWO, k=rule)
    for rule, allowed in {
        "k == 1 or k // zero": True,
        "k // zero or k == 1": False,
        "k != 1 and k // zero": False,
        "zero == 0 or zero > 0 and k % zero == 0": True,
        "k // zero + m": False,
        "m + k // zero": True,
        "k == 1 or m": True,
        "k != 1 or m": True,
        "k != 1 and m": False,
        "m and k != 1": True,
        "1 if k // zero else 1": False,
        "1 if m else k // zero": True,
        "1 if k else k // zero": True,
        "k // zero if k else 1": False,
    }.items()
]
# Every operator around the values where its result changes, negative ones too.
CASES += [
    case(None if holds else "k must be", "x: T [n]", f32(3), k, others="int k", k=rule)
    for sign in contract.OPERATORS
    for k in (-7, 2, 3, 4, 7)
    for rule, holds in (
        [(f"k {sign} 3", eval(f"{k} {sign} 3"))]
        if sign in ("<", "<=", ">", ">=", "==", "!=")
        else [(f"k {sign} 3 == {eval(f'{k} {sign} 3')}", True)]
    )
]


@pytest.mark.parametrize(("rules", "arguments", "args", "words"), CASES)
def test_rules_mean_what_they_say(
    rules: contract.Rules, arguments: Any, args: Sequence[Any], words: str | None
) -> None:
    checked = program(rules, *arguments)
    if words is None:
        checked.check(args)
    else:
        with pytest.raises((TypeError, ValueError), match=f"op: ({words})"):
            checked.check(args)


def test_what_is_not_given_is_not_asked() -> None:
    rules = {"x": "T [n]", "w": "T [m]", "m": "m == 2 * n"}
    checked = program(rules, ("Tensor", "x"), ("Tensor?", "w"))
    checked.check((f32(3), None))
    with pytest.raises(ValueError, match="m must be such that"):
        checked.check((f32(3), f32(3)))


def test_an_argument_without_a_rule_is_told() -> None:
    with pytest.raises(ValueError, match="contract of op: no rule for w"):
        program({"x": "T [n]"}, ("Tensor", "x"), ("Tensor", "w"))


def test_a_rule_that_cannot_be_read_is_told() -> None:
    for rule in ("1 +", "sizes(x) == 1"):
        with pytest.raises(ValueError, match="contract of op: cannot read"):
            program({"x": "T [n]", "k": rule}, ("Tensor", "x"), ("int", "k"))


def _calls(spec: Any, dtype: torch.dtype) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the operator calls of a spec's samples, forward and backward."""
    if isinstance(spec, MultiTensorSpec):
        operator = getattr(torch.ops.fusedops, spec.name).default
        return [(operator, sample.args) for sample in spec.calls(CPU, dtype)]
    with RecordOps() as recorded:
        for sample in map(fresh, spec.samples(CPU, dtype)[:6]):
            outputs = floating(spec.op(*sample.args, **sample.kwargs))
            if sample.leaves:
                torch.autograd.grad(outputs, sample.leaves, incoming(outputs))
    detach = torch.Tensor.detach
    return [(op, pytree.tree_map_only(torch.Tensor, detach, args)) for op, args in recorded.calls]


def _wrong_calls(
    func: Any, args: tuple[Any, ...], pick: random.Random, count: int
) -> Iterator[tuple[Any, ...]]:
    for _ in range(count):
        changed = list(args)
        for place in pick.sample(range(len(args)), min(len(args), pick.choice((1, 1, 1, 2)))):
            changed[place] = mutate.argument(pick, func, place, args[place])
        yield tuple(changed)


def _refusal(function: Callable[..., Any], *args: Any) -> str | None:
    try:
        function(*args)
    except (TypeError, ValueError, IndexError, RuntimeError, NotImplementedError) as error:
        return str(error)
    return None


@by_spec
def test_operators_refuse_what_the_contract_refuses(spec: Any) -> None:
    """Each valid call with one or two arguments changed, right after the valid one.

    The compiled router must not take the changed call for a call that was checked.
    """
    pick = random.Random(zlib.crc32(spec.name.encode()))
    refused = 0
    for func, args in itertools.chain(_calls(spec, torch.float32), _calls(spec, torch.bfloat16)):
        programs = backends._KERNELS[func._opname.removesuffix("_backward")].contracts
        checked = programs[func._opname.endswith("_backward")]
        for wrong in _wrong_calls(func, args, pick, 12):
            words = _refusal(checked.check, wrong)
            if words is None or not tensors_in(wrong):
                continue  # what it computes is for others to look at
            with torch.no_grad():
                func(*pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, args))
                error = _refusal(func, *wrong)
            refused += 1
            assert error is not None, f"{func} ran what the contract refuses: {words}"
            # The dispatcher itself refuses another type than the schema says; some ops have words
            # of their own (define_op(check=...)).
            others = "fusedops::" in error or error.startswith(f"{spec.name}: ")
            assert error == words or others, f"{func}: {error!r}, the contract: {words!r}"
    assert refused > 0


@native
def test_a_learning_rate_makes_no_other_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [torch.nn.Parameter(torch.randn(3, 47)) for _ in range(2)]
    optimizer = fusedops.optim.AdamW(params, lr=0.1)
    calls = []
    run = backends.run
    monkeypatch.setattr(backends, "run", lambda *args: [calls.append(args[0]), run(*args)][1])
    for step in range(4):
        for param in params:
            param.grad = torch.randn(3, 47)
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step()
    assert calls.count("adamw") == 1


@by_spec
def test_fake_kernels_refuse_what_the_contract_refuses(spec: Any) -> None:
    pick = random.Random(7)
    for func, args in _calls(spec, torch.float32)[:6]:
        programs = backends._KERNELS[func._opname.removesuffix("_backward")].contracts
        checked = programs[func._opname.endswith("_backward")]
        for wrong in _wrong_calls(func, args, pick, 6):
            if any(tensor.is_meta for tensor in tensors_in(wrong)):
                continue  # the device alone may be wrong, and here all tensors have this one
            words = _refusal(checked.check, wrong)
            meta = pytree.tree_map_only(torch.Tensor, lambda each: each.to("meta"), wrong)
            if words is not None and tensors_in(wrong):
                with torch.no_grad():
                    assert _refusal(func, *meta) is not None, f"{func}: {words}"


def test_a_requested_backend_is_held_to_the_contract_too() -> None:
    x = torch.randn(3, 8)
    with (
        fusedops.use_backend("torch"),
        pytest.raises(ValueError, match="gelu_backward: (input|grad_output) must"),
    ):
        torch.ops.fusedops.gelu_backward(x, x[:2], "none", [True])

"""Each argument of each op takes each wrong value of its kind: all are refused, in clear words.

Or they mean what they seem to: ``wrong_values`` says which values may be accepted for another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close
from wrong_values import INF, NAN, complaints_about

import fusedops
from fusedops.specs import Spec, all_specs, tensors_in

CPU = torch.device("cpu")

# Numbers for which torch takes NaN and infinities; the result is then that of the formula.
TAKES_ANY_NUMBER = {
    ("layer_norm", "eps"),
    ("rms_norm", "eps"),
    ("add_layer_norm", "eps"),
    ("add_rms_norm", "eps"),
    ("attention", "scale"),
    ("attention_decode", "scale"),
    ("attention_varlen", "scale"),
    ("scaled_masked_softmax", "scale"),
    ("baddbmm", "alpha"),
    ("baddbmm", "beta"),
}


def each_argument() -> Any:
    pairs = [
        (spec, parameter)
        for spec in all_specs().values()
        for parameter in inspect.signature(spec.op).parameters
    ]
    return pytest.mark.parametrize(
        ("spec", "argument"), pairs, ids=[f"{spec.name}-{argument}" for spec, argument in pairs]
    )


def first_sample(spec: Spec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    sample = spec.samples(CPU, torch.float32)[0].map(lambda tensor: tensor.detach().clone())
    return sample.args, dict(sample.kwargs)


@each_argument()
@pytest.mark.parametrize("backend", [None, "torch"])
def test_wrong_values_are_refused_in_clear_words(
    spec: Spec, argument: str, backend: str | None
) -> None:
    args, kwargs = first_sample(spec)
    numbers = [of for name, of in TAKES_ANY_NUMBER if name == spec.name]
    with fusedops.use_backend(backend):
        complaints = complaints_about(
            spec.op, spec.name, args, kwargs, argument=argument, takes_any_number=numbers
        )
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("spec", all_specs().values(), ids=list(all_specs()))
def test_a_tensor_on_another_device_is_refused(spec: Spec) -> None:
    tried: set[str] = set()
    for sample in spec.samples(CPU, torch.float32):
        bound = inspect.signature(spec.op).bind(*sample.args, **sample.kwargs)
        given = dict(bound.arguments)
        _, *others = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
        for name in set(others) - tried:
            bound.arguments = given | {name: given[name].to("meta")}
            with pytest.raises(ValueError, match=f"^{spec.name}: .*must be on .*, got (meta|cpu)"):
                spec.op(*bound.args, **bound.kwargs)
            tried.add(name)


@pytest.mark.parametrize(("name", "argument"), sorted(TAKES_ANY_NUMBER))
@pytest.mark.parametrize("number", [NAN, INF, -1.0])
def test_numbers_that_torch_takes_give_the_formulas_result(
    name: str, argument: str, number: float
) -> None:
    spec = all_specs()[name]
    args, kwargs = first_sample(spec)
    bound = inspect.signature(spec.op).bind(*args, **kwargs)
    bound.arguments[argument] = number
    results = [tensors_in(spec.op(*bound.args, **bound.kwargs))]
    # Torch's fused attention makes 0 of a row of NaN, where its other one makes NaN.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        results.append(tensors_in(spec.eager(*bound.args, **bound.kwargs)))
    got, want = (torch.cat([each.flatten() for each in result]) for result in results)
    assert torch.equal(got.isnan(), want.isnan())
    assert_close(got.nan_to_num(0.0), want.nan_to_num(0.0).double(), want.nan_to_num(0.0), name)


def _enter(name: str | None) -> None:
    with fusedops.use_backend(name):
        pass


IDS, PROBS = torch.tensor([[1, 0], [1, 2]]), torch.full((2, 2), 0.5)
PLAN = fusedops.RoutingPlan.from_choices(IDS, PROBS, 3)
MODEL = torch.nn.Sequential(torch.nn.LayerNorm(4))

# Public functions that are no registered op, with a right call of each.
OTHERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "RoutingPlan.from_choices": (fusedops.RoutingPlan.from_choices, (IDS, PROBS, 3), {}),
    "RoutingPlan.with_probs": (PLAN.with_probs, (PROBS,), {}),
    "hash_route": (
        fusedops.hash_route,
        (torch.tensor([7, 8]), 4),
        {"domains": torch.tensor([1, 0]), "domain_experts": (1, 3)},
    ),
    "keep_routing": (fusedops.keep_routing, (len,), {}),
    "merge_attention": (fusedops.merge_attention, (PROBS, PROBS[0], PROBS, PROBS[0]), {}),
    "moe_capacity": (fusedops.moe_capacity, (2, 8, 1.0, 4), {}),
    "compile_passes": (fusedops.compile_passes, (["norm"],), {}),
    "describe": (fusedops.describe, (MODEL,), {}),
    "patch": (fusedops.patch, (MODEL,), {}),
    "resolve": (fusedops.resolve, ("gelu", PROBS, "none"), {}),
    "routing_contexts": (fusedops.routing_contexts, (), {}),
    "tune_host": (fusedops.tune_host, (), {}),
    "unpatch": (fusedops.unpatch, (MODEL,), {}),
    "update_balancing_bias": (fusedops.update_balancing_bias, (PROBS[0], IDS[0]), {}),
    "use_backend": (_enter, ("torch",), {}),
}
TYPES = {"PatchReport", "RoutingPlan", "UnsupportedError"}
# tests/generate/test_decoding.py, testing/test_verify.py, planner/test_auto_parallel.py
WITH_ITS_OWN = {"generate", "verify", "auto_parallel"}
WITHOUT_ARGUMENTS = {
    *("counters", "decompositions"),
    *("register_attention", "register_experts", "reset_counters"),
}


def test_every_public_function_is_tested() -> None:
    functions = {name for name in fusedops.__all__ if callable(getattr(fusedops, name))}
    assert functions - TYPES - WITH_ITS_OWN - WITHOUT_ARGUMENTS <= {*OTHERS, *all_specs()}
    for name in WITHOUT_ARGUMENTS:
        assert not inspect.signature(getattr(fusedops, name)).parameters


@pytest.mark.parametrize("name", OTHERS)
def test_functions_that_are_no_op_refuse_as_ops_do(name: str) -> None:
    function, args, kwargs = OTHERS[name]
    complaints = complaints_about(function, name, args, kwargs)
    assert not complaints, "\n".join(complaints)

"""Each argument of each op takes each wrong value of its kind: all are refused, in clear words.

Or they mean what they seem to: ``wrong_values`` says which values may be accepted for another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_bits
from wrong_values import INF, NAN, complaints_about

import fusedops
from fusedops._core import extension
from fusedops.ops._weight_gradients import summed
from fusedops.specs import Spec, all_specs, tensors_in
from fusedops.specs.comparison import fresh, run
from fusedops.specs.recorder import RecordOps

CPU = torch.device("cpu")

# Numbers for which torch takes NaN and infinities; the result is then that of the formula.
TAKES_ANY_NUMBER = {
    ("layer_norm", "eps"),
    ("rms_norm", "eps"),
    ("gated_rms_norm", "eps"),
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
            with pytest.raises(ValueError, match=f"^{spec.name}: .*meta") as caught:
                spec.op(*bound.args, **bound.kwargs)
            assert name in str(caught.value)
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
TYPES = {"PatchReport", "QuantizationReport", "RoutingPlan", "TokenLogprobs", "UnsupportedError"}
# tests/generate/test_decoding.py, testing/test_verify.py, planner/test_auto_parallel.py,
# nn/test_quantized.py, models/test_load_quantized.py
WITH_ITS_OWN = {"generate", "verify", "auto_parallel", "quantize", "load_quantized"}
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


# Below are calls of ``torch.ops.fusedops.*`` that killed or hung the process: what only data can
# tell. A public function checks its arguments; an operator is called past it by compiled and
# exported code. The fuzzers (``tests/fuzz``) find such calls; those that were found stand here.
compiled = pytest.mark.skipif(
    extension.cpu_library() is not None, reason="the checks are those of the compiled kernels"
)
Change = Callable[[Any], Any]


def to(value: Any) -> Change:
    return lambda _: value


def first(value: float) -> Change:
    """Return what sets the first element of a tensor, or the first of a list."""

    def change(given: Any) -> Any:
        new = list(given) if isinstance(given, (list, tuple)) else given.clone()
        (new if isinstance(new, list) else new.view(-1))[0] = value
        return new

    return change


# operator, the spec's sample that calls it, argument -> change, words of the error
CASES = [
    ("moe_pack", "slots", {"layout": first(-8)}, "layout"),
    ("moe_pack", "slots", {"span": to(-1)}, "span"),
    ("moe_pack", "every_token", {"span": to(3)}, "span"),
    ("moe_unpack", "rows", {"layout": first(0)}, "layout"),
    ("moe_unpack", "rows", {"layout": to([24, 40, 2**40, 2**40 + 16])}, "payload"),
    ("gated_delta_rule", "packed", {"cu_seqlens": first(-1)}, "cu_seqlens"),
    ("gated_delta_rule_backward", "packed", {"cu_seqlens": first(22)}, "cu_seqlens"),
    ("moe_route", "plain", {"top_k": to(0)}, "top_k"),
    ("moe_route", "plain", {"num_groups": to(0)}, "num_groups"),
    ("moe_route", "plain", {"topk_groups": to(-2)}, "topk_groups"),
    ("moe_mlp", "default", {"gated": to(False)}, "w1"),
    ("moe_mlp", "plain", {"gated": to(True)}, "w1"),
    ("moe_mlp_backward", "plain", {"gated": to(True)}, "w1"),
    ("moe_mlp", "default", {"permutation": first(-1)}, "permutation"),
    ("moe_mlp", "default", {"positions": first(10**6)}, "positions"),
    ("moe_mlp", "default", {"offsets": first(-5)}, "offsets"),
    ("cross_entropy_backward", "rows", {"target": first(33)}, "target"),
    ("cross_entropy_backward", "rows", {"target": first(-1)}, "target"),
    ("linear_cross_entropy", "rows", {"chunk_size": to(0)}, "chunk_size"),
    ("linear_cross_entropy_backward", "rows", {"chunk_size": to(0)}, "chunk_size"),
    ("linear_cross_entropy_backward", "rows", {"target": first(19)}, "target"),
    ("selective_state_space", "packed", {"cu_seqlens": first(-1)}, "cu_seqlens"),
    ("selective_scan", "packed", {"cu_seqlens": first(-1)}, "cu_seqlens"),
    ("causal_conv1d", "packed", {"cu_seqlens": first(-1)}, "cu_seqlens"),
    ("causal_conv1d_backward", "packed", {"cu_seqlens": to(torch.tensor([0, 50] * 3))}, "rise"),
]


def recorded(operator: str, sample_name: str) -> tuple[Any, dict[str, Any]]:
    """Return an operator and the arguments, by name, that a sample calls it with."""
    spec = all_specs()[operator.removesuffix("_backward").removesuffix("_add_gradients")]
    dtype = torch.bfloat16 if operator.endswith("_add_gradients") else torch.float32
    samples = spec.samples(torch.device("cpu"), dtype)
    (sample,) = [each for each in samples if each.name == sample_name]
    with RecordOps() as heard, summed(operator.endswith("_add_gradients")):
        run(spec.op, fresh(sample))
    func, args = next(call for call in heard.calls if call[0]._opname == operator)
    names = [argument.name for argument in func._schema.arguments]
    plain = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
    return func, dict(zip(names, plain, strict=True))


@compiled
@pytest.mark.parametrize(
    ("operator", "sample_name", "changes", "words"),
    CASES,
    ids=[f"{case[0]}-{'-'.join(case[2])}-{place}" for place, case in enumerate(CASES)],
)
def test_wrong_data_is_refused(
    operator: str, sample_name: str, changes: dict[str, Change], words: str
) -> None:
    func, arguments = recorded(operator, sample_name)
    func(*arguments.values())
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=words):
        func(*arguments.values())


@compiled
def test_choices_handed_in_are_looked_through_before_a_drop_counts_them() -> None:
    func, arguments = recorded("moe_route", "plain")
    tokens, top_k = arguments["logits"].shape[0], arguments["top_k"]
    arguments["capacity"] = 1
    for wrong in (-1, arguments["logits"].shape[1], 2**31 - 1):
        arguments["chosen"] = torch.full((tokens, top_k), wrong, dtype=torch.int32)
        with pytest.raises(ValueError, match="chosen"):
            func(*arguments.values())


@compiled
@pytest.mark.parametrize(
    ("operator", "kept"),
    [("linear_glu", "gate"), ("linear_glu", "up"), ("linear_act", "preactivation")],
)
def test_preactivations_that_were_not_kept_are_made_again(operator: str, kept: str) -> None:
    func, arguments = recorded(f"{operator}_backward", "gelu")
    want = func(*arguments.values())
    arguments[kept] = arguments[kept].new_empty(0)
    assert_same_bits(func(*arguments.values()), want)


@compiled
@pytest.mark.parametrize("change", ["shape", "dtype", "spread"])
@pytest.mark.parametrize(
    ("operator", "buffer"),
    [
        ("moe_mlp_add_gradients", "into_w1"),
        ("moe_mlp_add_gradients", "into_b2"),
        ("grouped_mm_add_gradients", "into_weight"),
        ("grouped_mm_add_gradients", "into_bias"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(operator: str, buffer: str, change: str) -> None:
    """Neither one of another shape nor one that is spread over memory that is not its own."""
    func, arguments = recorded(operator, "biases" if operator.startswith("moe") else "bias")
    func(*arguments.values())
    right = arguments[buffer]
    wrong = {
        "shape": right[..., 1:].contiguous(),
        "dtype": right.double(),
        "spread": right[..., :1].expand_as(right),
    }
    arguments[buffer] = wrong[change]
    with pytest.raises((TypeError, ValueError), match=f"{buffer}|must be dense"):
        func(*arguments.values())

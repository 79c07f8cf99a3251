"""Gradients of experts' weights that are added to buffers: ``grad_weight_into`` and the like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_bits

import fusedops
from fusedops.specs import Sample, _routing, all_specs
from fusedops.specs.comparison import incoming, run, truth
from fusedops.specs.make import randn

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
Tensors = list[torch.Tensor]


def grouped_mm(dtype: torch.dtype, *, few: bool) -> Sample:
    ends = torch.tensor([30, 30, 71], dtype=torch.int32)
    x, weight = _new(dtype, 74, 24), _new(dtype, 3, 17, 24, transposed=True)
    return Sample("groups", (x, weight, ends, _new(dtype, 3, 17)))


def moe_mlp(dtype: torch.dtype, *, few: bool) -> Sample:
    routing = (30, 2, 3) if few else (70, 3, 5)
    experts = routing[2]
    plan = _routing.plan(*routing, device=CPU, dtype=dtype, pattern="empty_experts")
    weights = [_new(dtype, experts, *s, transposed=True) for s in ((80, 48), (56, 40))]
    biases = [_new(dtype, experts, width) for width in (80, 56)]
    return Sample("experts", (_new(dtype, routing[0], 48), plan, *weights, *biases))


def _new(dtype: torch.dtype, *shape: int, transposed: bool = False) -> torch.Tensor:
    scale = shape[-1] ** -0.5 if transposed else 1.0
    made = randn(*shape, device=CPU, dtype=dtype, scale=scale, grad=False)
    return (made.mT if transposed else made).requires_grad_()


MAKE = {"grouped_mm": grouped_mm, "moe_mlp": moe_mlp}
# Label -> op, options.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "groups": ("grouped_mm", {}),
    "groups, activated": ("grouped_mm", {"activation": "silu"}),
    "experts": ("moe_mlp", {"recompute": False}),
    "experts, recomputed": ("moe_mlp", {"recompute": True}),
}


def call(name: str, sample: Sample, into: Tensors) -> torch.Tensor:
    """Return the output of a call that adds the weights' gradients to buffers."""
    given = {"grad_weight_into": into[0]} if name == "grouped_mm" else {"grad_weights_into": into}
    output: torch.Tensor = getattr(fusedops, name)(*sample.args, **sample.kwargs, **given)
    return output


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "label",
    [pytest.param(label, marks=[pytest.mark.ci] * ("experts" in label)) for label in CASES],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_gradients_add_to_buffers(
    label: str, backend: str, dtype: torch.dtype, transposed: bool
) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("no Triton kernel takes float64")
    name, options = CASES[label]
    made = MAKE[name](dtype, few=backend == "triton")
    sample = Sample(label, made.args, options)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    places = [place for place, leaf in enumerate(sample.leaves) if leaf.dim() == 3]
    before = [torch.full(sample.leaves[place].shape, 0.5, dtype=wide) for place in places]
    into = [each.mT.contiguous().mT if transposed else each.clone() for each in before]
    with fusedops.use_backend(backend):
        plain = run(all_specs()[name].op, sample)
        output = call(name, sample, into)
        grads = torch.autograd.grad(output, sample.leaves, incoming((output,)), allow_unused=True)
    exact = truth(all_specs()[name], sample)
    assert_same_bits(output, plain.outputs[0], "output")
    empty = 1 if name == "grouped_mm" else sample.args[1].tokens_per_expert.tolist().index(0)
    for place, (got, want) in enumerate(zip(grads, plain.grads, strict=True)):
        if place not in places:
            assert_same_bits(got, want, f"gradient {place}")
            continue
        assert got is None, "a weight whose gradient is added gets none"
        added, start = into[places.index(place)], before[places.index(place)]
        assert torch.equal(added[empty], start[empty]), "a group without rows adds nothing"
        rounded = (want.to(wide) + start).to(dtype)
        total = start.double() + exact.grads[place]
        assert_close(added.to(dtype), total, rounded, "buffer", depth=210)
        if label == "groups":  # sums as they are: nothing is rounded to the weight's dtype
            assert_close(added, total, added, "buffer", depth=41)


@pytest.mark.parametrize("name", MAKE)
def test_buffers_work_in_compiled_code_and_under_autocast(name: str) -> None:
    sample = MAKE[name](torch.float32, few=False)
    narrow = [leaf for leaf in sample.leaves if leaf is not getattr(sample.args[1], "probs", None)]
    weights = [leaf for leaf in narrow if leaf.dim() == 3]
    pairs = [tuple(torch.zeros(weight.shape) for weight in weights) for _ in range(4)]

    def gradients(function: Any, sample: Sample, into: Tensors) -> list[Any]:
        loss = function(name, sample, into).float().square().sum()
        return list(torch.autograd.grad(loss, sample.leaves, allow_unused=True))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same_bits(gradients(compiled, sample, pairs[1]), gradients(call, sample, pairs[0]))
    with torch.autocast("cpu", torch.bfloat16):
        gradients(call, sample, pairs[2])
    halves = sample.map(
        lambda t: t.detach().bfloat16().requires_grad_() if any(t is n for n in narrow) else t
    )
    gradients(call, halves, pairs[3])
    for one, other in (pairs[:2], pairs[2:]):
        assert_same_bits(one, other)
        assert all(buffer.any() for buffer in one)

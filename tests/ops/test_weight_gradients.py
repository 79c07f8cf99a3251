"""Gradients of weights: added to buffers, or summed in float32 over several calls, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_bits
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.ops._weight_gradients import are_summed, summed
from fusedops.specs import Sample, _routing, all_specs
from fusedops.specs.comparison import incoming, run, truth
from fusedops.specs.make import TensorFactory

TOKENS, HIDDEN, INNER, EXPERTS = 96, 16, 12, 3
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])


def plan_of(ids: torch.Tensor) -> fusedops.RoutingPlan:
    return fusedops.RoutingPlan.from_choices(ids, torch.full(ids.shape, 0.5), EXPERTS)


class Experts:
    """A layer of experts, called with parts of the tokens."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(4)

        def new(*shape: int) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator).bfloat16() * 0.5
            return drawn.to(dtype).requires_grad_()

        self.x = new(TOKENS, HIDDEN)
        self.w1, self.w2 = new(EXPERTS, 2 * INNER, HIDDEN), new(EXPERTS, INNER, HIDDEN)
        self.b1, self.b2 = new(EXPERTS, 2 * INNER), new(EXPERTS, HIDDEN)
        self.ids = torch.rand(TOKENS, 2, EXPERTS, generator=generator).argmax(2)
        self.grad = new(TOKENS, HIDDEN).detach()
        # How a part is called: as it is, but for tests that change it.
        self.wrap: Callable[..., Any] = lambda function, *args, **given: function(*args, **given)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [self.w1, self.w2, self.b1, self.b2]

    def part(self, x: torch.Tensor, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        parameters = self.w1.mT, self.w2, self.b1, self.b2
        return fusedops.moe_mlp(x, plan_of(ids), *parameters, **options)

    def output(self, parts: int, *, on: bool = True, **options: Any) -> torch.Tensor:
        with summed(on):
            cut = zip(self.x.tensor_split(parts), self.ids.tensor_split(parts), strict=True)
            return torch.cat([self.wrap(self.part, x, ids, **options) for x, ids in cut])

    def gradients(self, parts: int, **options: Any) -> list[torch.Tensor]:
        return list(torch.autograd.grad(self.output(parts, **options), self.parameters, self.grad))

    def accumulated(self, output: torch.Tensor) -> list[torch.Tensor | None]:
        output.backward(self.grad)
        return [parameter.grad for parameter in self.parameters]

    def sums(self, parts: int) -> list[torch.Tensor]:
        """Return those of the weights before they are rounded."""
        into = torch.zeros(self.w1.mT.shape), torch.zeros(self.w2.shape)
        output = self.output(parts, on=False, grad_weights_into=into)
        torch.autograd.grad(output, self.b1, self.grad.to(output.dtype))
        return [into[0].mT, into[1]]


def errors(grads: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    return [float((a.double() - b).square().mean()) for a, b in zip(grads, truth, strict=True)]


@HALF
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_the_float32_sum_is_rounded_once(dtype: torch.dtype, parts: int) -> None:
    layer, exact = Experts(dtype), Experts(torch.float64)
    truth = exact.gradients(1)
    whole, cut = layer.gradients(1), layer.gradients(parts)
    assert_same_bits(cut[:2], [each.to(dtype) for each in layer.sums(parts)])
    one, many = errors(whole, truth), errors(cut, truth)
    usual = errors(layer.gradients(parts, on=False), truth)
    for alone, together, added in zip(one, many, usual, strict=True):
        # Equal but for the order of a float32 sum, which may turn a rounding or two.
        assert together < 1.01 * alone
        assert together < added, "the test sees what autograd's own sum costs"
    assert cut[0].stride() == layer.gradients(1)[0].stride()


@HALF
def test_grouped_mm_sums_as_well(dtype: torch.dtype) -> None:
    layer = Experts(dtype)
    weight, bias = layer.w1.mT, layer.b1
    ends = torch.tensor([5, 9, 12], dtype=torch.int32)

    def grads(on: bool, **options: Any) -> list[Any]:
        with summed(on):
            parts = [
                fusedops.grouped_mm(x, weight, ends, bias, activation="silu", **options)
                for x in layer.x.split(12)
            ]
        output = torch.stack(parts)
        grad = torch.linspace(-1, 1, output.numel()).to(dtype).view_as(output)
        leaves = [layer.x, layer.w1, layer.b1]
        return list(torch.autograd.grad(output, leaves, grad, allow_unused=True))

    into = torch.zeros_like(weight, dtype=torch.float32)
    expected = grads(False, grad_weight_into=into)
    usual, got = grads(False), grads(True)
    assert expected[1] is None
    assert_same_bits([got[0], got[1]], [expected[0], into.mT.to(dtype)])
    assert not torch.equal(got[1], usual[1]) and not torch.equal(got[2], usual[2])


def test_under_autocast_the_sum_is_handed_on_as_it_is() -> None:
    layer, halves = Experts(torch.float32), Experts(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer.output(3)
    grads = torch.autograd.grad(output, layer.parameters, layer.grad.bfloat16())
    assert_same_bits(grads[:2], halves.sums(3))
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_a_graph_can_be_differentiated_again() -> None:
    layer = Experts()
    output = layer.output(3)
    first = torch.autograd.grad(output, layer.parameters, layer.grad, retain_graph=True)
    # Passes that ask for other gradients, or for some, leave nothing behind.
    torch.autograd.grad(output, layer.x, layer.grad, retain_graph=True)
    (alone,) = torch.autograd.grad(output, layer.w2, layer.grad, retain_graph=True)
    assert torch.equal(alone, first[1])
    assert_same_bits(layer.accumulated(output), first)


def test_a_pass_that_failed_leaves_nothing_to_the_next() -> None:
    layer = Experts()
    expected = layer.gradients(3)
    seen: list[int] = []

    def fail(grad: torch.Tensor) -> None:
        seen.append(1)
        if len(seen) == 2:
            raise ArithmeticError("as a test wants it")

    def hooked(function: Any, *args: Any) -> torch.Tensor:
        output = function(*args)
        output.register_hook(fail)
        return output

    layer.wrap = hooked
    output = layer.output(3)
    with pytest.raises(ArithmeticError):
        torch.autograd.grad(output, layer.parameters, layer.grad, retain_graph=True)
    assert len(seen) == 2, "one part had been added"
    assert_same_bits(torch.autograd.grad(output, layer.parameters, layer.grad), expected)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("way", ["around", "around, reentrant", "inside"])
def test_checkpoints_around_all_calls_and_inside_of_each(way: str, recompute: bool) -> None:
    """What is computed again inside of a call is computed by the ops as they are."""
    layer = Experts()
    expected = layer.gradients(3, recompute=recompute)
    if way == "inside":
        layer.wrap = lambda *args, **options: checkpoint(*args, use_reentrant=False, **options)
        output = layer.output(3, recompute=recompute)
    else:  # the reentrant form needs an argument with a gradient
        output = checkpoint(
            lambda _: layer.output(3, recompute=recompute),
            layer.x,
            use_reentrant="reentrant" in way,
        )
    assert_same_bits(layer.accumulated(output), expected)


def test_what_needs_no_gradient_gets_none() -> None:
    layer = Experts()
    _, w2, b1, _ = layer.gradients(3)
    layer.w1.requires_grad_(False)
    layer.b2.requires_grad_(False)
    assert_same_bits(layer.accumulated(layer.output(3)), [None, w2, b1, None])
    with torch.no_grad():
        assert not layer.output(3).requires_grad


def test_a_parameter_may_stand_twice_in_a_call_and_in_calls_of_both_ops() -> None:
    layer = Experts()
    stack = torch.nn.Parameter(layer.w1[:, :HIDDEN].detach().clone())
    ends = torch.tensor([4, 4, 8], dtype=torch.int32)
    plans = [plan_of(ids) for ids in layer.ids.split(8)]

    def grad(on: bool, weight: torch.Tensor) -> torch.Tensor:
        x = layer.x.detach().to(weight.dtype)
        total = x.new_zeros(())
        with summed(on):
            for rows, plan in zip(x.split(8), plans, strict=True):
                both = fusedops.moe_mlp(rows, plan, weight, weight, gated=False)
                both = both + fusedops.grouped_mm(rows, weight, ends)
                total = total + both.sum()
        return torch.autograd.grad(total, weight)[0]

    exact = grad(False, stack.detach().double().requires_grad_())
    once, usual = grad(True, stack), grad(False, stack)
    (better,), (worse,) = errors([once], [exact]), errors([usual], [exact])
    assert better < 0.5 * worse


class _Scaled(torch.autograd.Function):
    """A view of which only its own backward knows the factor."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def test_views_are_one_parameter_and_functions_of_the_user_are_not() -> None:
    layer = Experts()
    w1, others = layer.w1, layer.parameters[1:]
    expected = layer.gradients(2)
    hooked: list[torch.Tensor] = []
    w1.register_hook(hooked.append)
    halves = layer.output(2)
    torch.autograd.grad(halves, [w1, *others], layer.grad)
    assert len(hooked) == 1 and torch.equal(hooked[0], expected[0])
    parts = []
    with summed(True):
        for factor, x, ids in zip(
            (1.0, 0.0), layer.x.tensor_split(2), layer.ids.tensor_split(2), strict=True
        ):
            layer.w1 = _Scaled.apply(w1, factor)
            parts.append(layer.part(x, ids))
    (scaled,) = torch.autograd.grad(torch.cat(parts), w1, layer.grad)
    layer.w1 = w1
    first = layer.part(layer.x[:48], layer.ids[:48])
    assert torch.equal(scaled, torch.autograd.grad(first, w1, layer.grad[:48])[0])


def test_views_of_a_tensor_that_is_no_leaf() -> None:
    layer = Experts()
    expected = layer.gradients(3)
    leaf = layer.w1
    layer.w1 = leaf * 1.0
    grads = torch.autograd.grad(layer.output(3), [leaf, *layer.parameters[1:]], layer.grad)
    assert_same_bits(grads, expected)


def test_an_error_in_the_middle_ends_it() -> None:
    layer = Experts()

    def fail(*_: Any) -> torch.Tensor:
        assert are_summed()
        raise ArithmeticError("as a test wants it")

    layer.wrap = fail
    with pytest.raises(ArithmeticError):
        layer.output(2)
    assert not are_summed()
    with summed(True), summed(False):
        assert are_summed(), "an inner call leaves the outer one as it is"


def test_there_is_no_second_derivative_inside_alone() -> None:
    layer = Experts()

    def slope(on: bool) -> torch.Tensor:
        loss = layer.output(2, on=on).float().square().sum()
        return torch.autograd.grad(loss, layer.w2, create_graph=True)[0].float().square().sum()

    slope(False).backward()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope(True).backward()


def test_compiled_calls_are_left_to_autograd() -> None:
    layer = Experts()
    expected = layer.gradients(2, on=False)
    plans = [plan_of(ids) for ids in layer.ids.tensor_split(2)]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def part(x: torch.Tensor, plan: Any) -> torch.Tensor:
        return fusedops.moe_mlp(x, plan, layer.w1.mT, layer.w2, layer.b1, layer.b2)

    with summed(True):
        cut = zip(layer.x.tensor_split(2), plans, strict=True)
        output = torch.cat([part(x, plan) for x, plan in cut])
    assert_same_bits(torch.autograd.grad(output, layer.parameters, layer.grad), expected)


CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
Tensors = list[torch.Tensor]


def transposed(new: Any, *shape: int) -> torch.Tensor:
    return new(*shape, scale=shape[-1] ** -0.5, grad=False).mT.requires_grad_()


def grouped_mm(dtype: torch.dtype, *, few: bool) -> Sample:
    new, ends = TensorFactory(CPU, dtype), torch.tensor([30, 30, 71], dtype=torch.int32)
    return Sample("groups", (new(74, 24), transposed(new, 3, 17, 24), ends, new(3, 17)))


def moe_mlp(dtype: torch.dtype, *, few: bool) -> Sample:
    new, routing = TensorFactory(CPU, dtype), (30, 2, 3) if few else (70, 3, 5)
    tokens, _, experts = routing
    plan = _routing.plan(*routing, device=CPU, dtype=dtype, pattern="empty_experts")
    weights = transposed(new, experts, 80, 48), transposed(new, experts, 56, 40)
    return Sample("experts", (new(tokens, 48), plan, *weights, new(experts, 80), new(experts, 56)))


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

"""Calls that must have the same bits: on any threads, in parts, recomputed.

The specs' samples are small, and ``test_all_ops.py`` asks the same of them; here are the sizes at
which the kernels share work, block it, or write around the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from comparing import assert_same_bits, assert_same_bits_on_threads
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops._core.activation import GELU_VARIANTS
from fusedops._core.generators import seed_generators
from fusedops.specs import Sample, Spec, _routing, all_specs
from fusedops.specs.comparison import floating, incoming, run
from fusedops.specs.make import randn

CPU = torch.device("cpu")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16, torch.float64], ids=str)


def leaves(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [
        randn(*shape, device=CPU, dtype=dtype, key=str(place)) for place, shape in enumerate(shapes)
    ]


PLAN_OF_MANY = _routing.plan(301, 2, 7, device=CPU, dtype=F32, pattern="dropped")
ENDS = torch.tensor([100, 103, 103, 303], dtype=torch.int32)
# Label, which begins with the op's name -> shapes of the leaves and other arguments, options.
THREADED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "linear_act": ([(301, 200), (130, 200), (130,)], {"activation": "gelu"}),
    "linear_glu": ([(301, 200), (130, 200), (130, 200)], {"activation": "gelu"}),
    "mlp": ([(201, 60), (130, 60), (130,), (50, 130), (50,)], {"recompute": True}),
    "mlp, tiles": ([(201, 60), (130, 60), (130,), (50, 130), (50,)], {"tile_tokens": 90}),
    "baddbmm": ([(3, 1, 130), (2, 3, 200, 64), (3, 64, 130)], {"alpha": 0.125}),
    "grouped_mm": ([(305, 200), (4, 200, 130), ENDS], {"activation": "silu"}),
    "moe_mlp": ([(301, 200), PLAN_OF_MANY, (7, 200, 260), (7, 130, 90), (7, 260), (7, 90)], {}),
    "attention, few heads": ([(1, 1, 70, 16), (1, 1, 3000, 16), (1, 1, 3000, 16)], {}),
    "attention, odd": ([(1, 1, 70, 16), (1, 1, 4097, 16), (1, 1, 4097, 16)], {}),
    **{
        f"bias_gelu, sum over {rows} rows": ([(rows, columns), (columns,)], {})
        for rows, columns in ((3, 5000), (40, 600), (300, 130), (3000, 24))
    },
    **{
        f"scaled_masked_softmax, gradient of mask {shape}": ([(500, 4, 3, 9), shape], {})
        for shape in ((9,), (4, 1, 9), (4, 3, 9), (1, 1))
    },
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("label", THREADED)
def test_any_number_of_threads(label: str, dtype: torch.dtype) -> None:
    given, options = THREADED[label]
    args = [
        randn(*each, device=CPU, dtype=dtype, key=str(i)) if isinstance(each, tuple) else each
        for i, each in enumerate(given)
    ]
    spec, sample = all_specs()[label.split(",")[0]], Sample(label, tuple(args), options)
    assert_same_bits_on_threads(spec, sample, (1, 2, 3, 5))


def halves(rows: int, columns: int) -> list[torch.Tensor]:
    return list(torch.randn(rows, 2 * columns).bfloat16().chunk(2, -1))


def rotated() -> list[torch.Tensor]:
    q, k = (torch.randn(2, 1100, heads, 64).bfloat16().transpose(1, 2) for heads in (64, 1))
    return [q, k, *torch.randn(2, 1, 1100, 64).bfloat16()]


Op = Callable[..., Any]
SOFTMAX = functools.partial(fusedops.scaled_masked_softmax, mask=None, scale=0.5)
# Above 16 MiB the kernels write around the cache. Label -> op, what makes its arguments, the dim in
# which each is cut (``None``: it is whole in every part), and the length of a part.
LARGE: dict[str, tuple[Op, Callable[[], list[torch.Tensor]], tuple[int | None, ...], int]] = {
    **{
        f"gelu {form}": (
            functools.partial(fusedops.gelu, approximate=form),
            lambda dtype=dtype: [torch.randn(4096 * 2049 + 17).to(dtype)],
            (0,),
            1_000_003,
        )
        for form, dtype in (("none", BF16), ("tanh", F16), ("fast", F16))
    },
    **{
        f"bias_gelu {form}": (
            functools.partial(fusedops.bias_gelu, approximate=form),
            lambda: [torch.randn(2080, 4096).bfloat16(), torch.randn(4096).bfloat16()],
            (0, None),
            1040,
        )
        for form in GELU_VARIANTS
    },
    "swiglu": (fusedops.swiglu, lambda: halves(2080, 4160), (0, 0), 260),
    **{
        f"geglu {form}": (
            functools.partial(fusedops.geglu, approximate=form),
            lambda: halves(2080, 4160),
            (0, 0),
            260,
        )
        for form in GELU_VARIANTS
    },
    **{
        f"rotary {form}": (
            functools.partial(fusedops.rotary_embedding, interleaved=form == "interleaved"),
            rotated,
            (2, 2, 1, 1),
            275,
        )
        for form in ("half", "interleaved")
    },
    **{
        f"softmax {form}": (
            functools.partial(SOFTMAX, is_causal=form == "causal"),
            lambda: [torch.randn(33, 512, 512).bfloat16()],
            (0,),
            11,
        )
        for form in ("whole", "causal")
    },
}


def by_parts(dims: tuple[int | None, ...], args: list[torch.Tensor], size: int) -> Iterator[Any]:
    length = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    for begin in range(0, length, size):
        count = min(size, length - begin)
        yield [
            arg if dim is None else arg.narrow(dim, begin, count)
            for arg, dim in zip(args, dims, strict=True)
        ]


def output_and_gradients(op: Op, args: list[torch.Tensor], wanted: int) -> list[torch.Tensor]:
    """Return the first output, and the gradients of the first arguments for one of its own."""
    given = [arg.detach().requires_grad_(place < wanted) for place, arg in enumerate(args)]
    output = op(*given)
    output = output[0] if isinstance(output, tuple) else output
    grads = torch.autograd.grad(output, given[:wanted], output.detach().cos(), allow_unused=True)
    return [output.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("label", LARGE)
def test_large_outputs_and_small_ones(label: str) -> None:
    op, make, dims, size = LARGE[label]
    args = make()
    dim = next(dim for dim in dims if dim is not None)
    wanted = 2 if label.startswith(("swiglu", "geglu")) else 1
    parts = [output_and_gradients(op, part, wanted) for part in by_parts(dims, args, size)]
    for given in (args, [arg.contiguous() for arg in args]):
        whole = output_and_gradients(op, given, wanted)
        assert_same_bits(whole, [torch.cat(pieces, dim) for pieces in zip(*parts, strict=True)])


@DTYPES
@pytest.mark.parametrize("name", ["linear_act", "linear_glu"])
def test_a_row_of_a_product_in_every_batch(name: str, dtype: torch.dtype) -> None:
    op = all_specs()[name].op
    x, *weights = (leaf.detach() for leaf in leaves(dtype, (300, 800), (70, 800), (70, 800)))
    weights = weights[: 1 + (name == "linear_glu")]
    whole = op(x, *weights)
    for count in (1, 2, 14, 15, 56, 57, 128, 299):
        assert torch.equal(op(x[:count], *weights), whole[:count]), f"{count} rows"


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("name", "sample_name"), [("mlp", "odd_sizes"), ("moe_mlp", "biases"), ("moe_mlp", "plain")]
)
def test_a_hidden_layer_that_is_kept_or_recomputed(
    name: str, sample_name: str, dtype: torch.dtype
) -> None:
    spec = all_specs()[name]
    (sample,) = [each for each in spec.samples(CPU, dtype) if each.name == sample_name]
    kept, again = (
        Sample(sample_name, sample.args, {**sample.kwargs, "recompute": recompute})
        for recompute in (False, True)
    )
    assert_same_bits(run(spec.op, again), run(spec.op, kept))


def drawing() -> list[tuple[Spec, Sample]]:
    """Return the ops that draw numbers, each with a call: the others have no state."""
    found = []
    for spec in all_specs().values():
        calls = [each for each in spec.samples(CPU, F32) if each.random and each.leaves]
        found += [(spec, call) for call in calls[:1]]
    return found


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("spec", "sample"), drawing(), ids=lambda each: each.name)
def test_a_recomputation_draws_the_same(spec: Spec, sample: Sample, use_reentrant: bool) -> None:
    leaves = sample.leaves

    def block(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        replaced = {id(leaf): value for leaf, value in zip(leaves, values, strict=True)}
        call = sample.map(lambda tensor: replaced.get(id(tensor), tensor))
        return floating(spec.op(*call.args, **call.kwargs))

    results = []
    for function in (functools.partial(checkpoint, block, use_reentrant=use_reentrant), block):
        seed_generators(5)
        outputs = function(*leaves)
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(outputs, incoming(outputs))
        results.append([*outputs, *(leaf.grad for leaf in leaves)])
    assert_same_bits(*results)


def apart(values: torch.Tensor, *strides: int) -> torch.Tensor:
    """Return the values with these strides, in memory that is mostly untouched.

    Of numpy: torch may be told to fill what it leaves uninitialised, here gigabytes.
    """
    length = 1 + sum((n - 1) * step for n, step in zip(values.shape, strides, strict=True))
    memory = torch.from_numpy(np.empty(length, dtype=np.int16)).view(torch.bfloat16)
    return memory.as_strided(values.shape, strides).copy_(values)


FAR, MIDWAY = 2**31 + 64, 2**30 + 64  # 32 bits count the elements from one to the next, or not
PLAN = _routing.plan(2, 1, 2, device=CPU, dtype=BF16)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape).bfloat16()


# Ops whose rows ``test_all_ops.py`` does not move apart: the call with one argument, whose shape
# and strides follow.
DISTANT: dict[str, tuple[Op, tuple[int, ...], tuple[int, ...]]] = {
    "baddbmm, batch1": (
        lambda a: fusedops.baddbmm(ones(5), a, ones(2, 4, 5)),
        (2, 3, 4),
        (FAR, 4, 1),
    ),
    "moe_permute": (lambda x: fusedops.moe_permute(x, PLAN), (2, 64), (FAR, 1)),
    "moe_unpermute": (lambda x: fusedops.moe_unpermute(x, PLAN), (2, 64), (FAR, 1)),
    "moe_pack": (
        lambda x: fusedops.moe_pack(x, torch.ones(2, 1), index=torch.tensor([1, 0]).int()),
        (2, 4),
        (FAR, 1),
    ),
}
COLUMNS: dict[str, tuple[Op, tuple[int, ...], tuple[int, ...]]] = {
    "baddbmm, batch2": (
        lambda b: fusedops.baddbmm(ones(3), ones(1, 2, 4), b),
        (1, 4, 3),
        (4, 1, MIDWAY),
    ),
    "baddbmm, addend": (
        lambda x: fusedops.baddbmm(x, ones(1, 2, 2), ones(1, 2, 2)),
        (2, 2),
        (1, MIDWAY),
    ),
}


@pytest.mark.parametrize(
    ("backend", "label"),
    [
        *(("cpp", label) for label in (*DISTANT, *COLUMNS)),
        # The interpreter reads what lies between rows.
        *(pytest.param("triton", label, marks=pytest.mark.interpreter) for label in COLUMNS),
    ],
)
def test_elements_2_to_the_31_apart(label: str, backend: str) -> None:
    op, shape, strides = (DISTANT | COLUMNS)[label]
    dense = torch.randn(shape).bfloat16()
    results = []
    with fusedops.use_backend(backend):
        for given in (apart(dense, *strides), dense):
            leaf = given.detach().requires_grad_(label != "moe_pack")
            output = op(leaf)
            wanted = [leaf] if leaf.requires_grad else []
            grads = torch.autograd.grad(output, wanted, output.detach()) if wanted else ()
            results.append([output, *grads])
    assert_same_bits(*results)

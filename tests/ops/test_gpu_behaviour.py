"""What a GPU can do to a kernel beside running it: graphs, streams, large tensors, compilation.

Every op runs as users get it (CUDA C++, or Triton's launches repeated by the compiled router) and
by Triton through Python, with a hot sample in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import hot_samples
import pytest
import torch
from comparing import assert_same_bits, assert_within_budget

import fusedops
from fusedops.specs import Sample, all_specs, tensors_in
from fusedops.specs.comparison import floating, fresh, incoming, run

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
NEW = hot_samples.New(CUDA, BF16)
Tensors = list[torch.Tensor]
# Ops whose integers are data of their own, which may be put in any order.
_INTEGERS_ARE_DATA = ("moe_sort", "moe_unpack")


def _without_dropout(call: hot_samples.HotCall) -> hot_samples.HotCall:
    return dataclasses.replace(call, make=lambda new: call.make(new)[:3], random=False)


def calls() -> dict[str, hot_samples.HotCall]:
    """Return op -> one hot call that draws nothing and writes to no buffer."""
    found: dict[str, hot_samples.HotCall] = {}
    for kernels in hot_samples.ops():
        for call in hot_samples.calls(kernels, BF16):
            if call.op in all_specs() and not call.buffers:
                if call.op == "bias_dropout_add":
                    call = _without_dropout(call)
                if not call.random:
                    found.setdefault(call.op, call)
    return found


CALLS = calls()
each_op = pytest.mark.parametrize("op", CALLS)


@pytest.fixture(params=["default", "triton"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with fusedops.use_backend(None if request.param == "default" else "triton"):
        yield


def sample_of(op: str) -> Sample:
    return CALLS[op].sample(NEW)


def step(op: str, sample: Sample, given: Tensors) -> Tensors:
    """Return all outputs and gradients of a call; ``given`` are the incoming gradients."""
    outputs = tensors_in(all_specs()[op].op(*sample.args, **sample.kwargs))
    pairs = [pair for pair in zip(floating(outputs), given, strict=True) if pair[0].requires_grad]
    if not pairs:
        return [output.detach() for output in outputs]
    grads = torch.autograd.grad([each for each, _ in pairs], sample.leaves, [g for _, g in pairs])
    return [*(each.detach() for each in outputs), *grads]


def incoming_of(op: str, sample: Sample) -> Tensors:
    with torch.no_grad():
        return incoming(floating(all_specs()[op].op(*sample.args, **sample.kwargs)))


def data_of(op: str, sample: Sample) -> Tensors:
    """Return the tensors whose values may change while the call stays right."""
    return [
        tensor
        for tensor in sample.tensors
        if tensor.dim() > 0 and (tensor.is_floating_point() or op in _INTEGERS_ARE_DATA)
    ]


def turn_around(tensors: Tensors) -> None:
    """Change the values: rows in the opposite order."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(tensor.flip(0))


def copies(tensors: Tensors) -> Tensors:
    return [tensor.detach().clone() for tensor in tensors]


@each_op
def test_a_graph_runs_with_changed_inputs(op: str) -> None:
    sample = sample_of(op)
    given, data = incoming_of(op, sample), data_of(op, sample)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            before = copies(step(op, sample, given))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(op, sample, given)
    for _ in range(2):
        turn_around(data)
        graph.replay()
        got = copies(results)
        assert_same_bits(got, copies(step(op, sample, given)))
    turn_around(data)
    graph.replay()
    got = copies(results)
    turn_around(data)
    graph.replay()
    assert_same_bits(copies(results), before)
    assert any(not torch.equal(a, b) for a, b in zip(got, before, strict=True)), (
        "other inputs gave the same results: the test tells nothing"
    )


@each_op
def test_two_streams_at_once_give_what_one_gives(op: str) -> None:
    """Inputs arrive late on each stream: a launch on another one would read what was there."""
    both = [sample_of(op) for _ in range(2)]
    turn_around(data_of(op, both[1]))
    given = incoming_of(op, both[0])
    want = [copies(step(op, sample, given)) for sample in both]
    data = [data_of(op, sample) for sample in both]
    values = [copies(tensors) for tensors in data]
    streams = [torch.cuda.Stream() for _ in both]
    for _ in range(5):
        with torch.no_grad():
            for each in (*data[0], *data[1]):
                # Integers are no place for rubbish: out of range they would be read as indices.
                each.fill_(float("nan")) if each.is_floating_point() else each.zero_()
        torch.cuda.synchronize()
        got = []
        for stream, sample, tensors, right in zip(streams, both, data, values, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)  # about 10 ms
                with torch.no_grad():
                    for tensor, value in zip(tensors, right, strict=True):
                        tensor.copy_(value)
                got.append(step(op, sample, given))
        torch.cuda.synchronize()
        for mine, right in zip(got, want, strict=True):
            assert_same_bits(mine, right)


def fill_free_memory() -> None:
    """Leave NaN where the next calls allocate, so that what they do not write shows."""
    large = [torch.full((1 << 26,), float("nan"), device=CUDA) for _ in range(8)]
    small = [torch.full((1 << 12,), float("nan"), device=CUDA) for _ in range(256)]
    del large, small


@each_op
def test_three_runs_give_the_same_bits(op: str) -> None:
    sample = sample_of(op)
    given = incoming_of(op, sample)
    first = copies(step(op, sample, given))
    for _ in range(2):
        fill_free_memory()
        assert_same_bits(step(op, sample, given), first)


@each_op
def test_compiled_without_a_graph_break(op: str) -> None:
    spec, sample = all_specs()[op], sample_of(op)
    torch._dynamo.reset()
    compiled = torch.compile(spec.op, fullgraph=True)
    assert_within_budget(run(compiled, sample), spec, fresh(sample_of(op)))


# More than 2 ** 31 elements: rows of 8192, 64 more than fit 31 bits.
_COLS, _ROWS = 8192, 2**31 // 8192 + 64
_MEMORY = 100 * 2**30


def new(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=CUDA, dtype=BF16)


# Op -> the op as a function of a weight (or table) that rows share, and of tensors of rows.
LARGE: dict[str, Callable[..., Any]] = {
    "gelu": lambda w, x: fusedops.gelu(x),
    "bias_gelu": lambda w, x: fusedops.bias_gelu(x, w),
    "swiglu": lambda w, gate, up: fusedops.swiglu(gate, up),
    "geglu": lambda w, gate, up: fusedops.geglu(gate, up),
    "bias_dropout_add": lambda w, x, r: fusedops.bias_dropout_add(x, w, r, 0.0),
    "layer_norm": lambda w, x: fusedops.layer_norm(x, (_COLS,), w, w),
    "rms_norm": lambda w, x: fusedops.rms_norm(x, (_COLS,), w),
    "add_layer_norm": lambda w, x, r: fusedops.add_layer_norm(x, r, (_COLS,), w, w),
    "add_rms_norm": lambda w, x, r: fusedops.add_rms_norm(x, r, (_COLS,), w),
    "scaled_masked_softmax": lambda w, x: fusedops.scaled_masked_softmax(x, None, 0.5, True),
    "cross_entropy": lambda w, x, y: fusedops.cross_entropy(x, y, reduction="none"),
    "rotary_embedding": lambda table, q, k: fusedops.rotary_embedding(q, k, table, table),
}


def large_tensors(op: str) -> tuple[torch.Tensor, Tensors]:
    """Return what rows share, and tensors with a row for each row of the result."""
    if op == "rotary_embedding":
        return new(128, 128), [new(_ROWS // 64, heads, 128, 128) for heads in (32, 1)]
    shared = new(_COLS)
    if op == "scaled_masked_softmax":
        return shared, [new(_ROWS // 64, 1, 64, _COLS)]
    if op == "cross_entropy":
        return shared, [new(_ROWS, _COLS), torch.randint(_COLS, (_ROWS,), device=CUDA)]
    count = LARGE[op].__code__.co_argcount - 1
    return shared, [new(_ROWS, _COLS) for _ in range(count)]


def _pieces(rows: int, elements: int) -> list[slice]:
    """Return the first rows, those about element 2 ** 31, and the last."""
    middle = 2**31 // (elements // rows)
    return [slice(0, 8), slice(middle - 8, min(rows, middle + 8)), slice(rows - 8, rows)]


@pytest.mark.parametrize("op", LARGE)
def test_more_than_2_to_the_31_elements(op: str) -> None:
    """Rows are independent: some of a large call are those of a small one, to the bit."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < _MEMORY:
        pytest.skip(f"{free >> 30} GiB of GPU memory are free, {_MEMORY >> 30} are wanted")
    (shared, tensors), call = large_tensors(op), LARGE[op]
    assert tensors[0].numel() > 2**31
    leaves = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point()]
    outputs = floating(call(shared, *tensors))
    given = [torch.randn_like(output) for output in outputs]
    grads = torch.autograd.grad(outputs, leaves, given)
    for rows in _pieces(len(tensors[0]), tensors[0].numel()):
        few = [each.detach()[rows].clone() for each in tensors]
        few_leaves = [each.requires_grad_() for each in few if each.is_floating_point()]
        want = floating(call(shared, *few))
        want_grads = torch.autograd.grad(want, few_leaves, [each[rows] for each in given])
        assert_same_bits(
            [each.detach()[rows] for each in (*outputs, *grads)],
            [each.detach() for each in (*want, *want_grads)],
        )

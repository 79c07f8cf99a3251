"""What ops keep for their backward and write to; they read only what was written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from reachable import reachable
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils import deterministic

import fusedops
from fusedops._core import backends, extension
from fusedops._core.generators import seed_generators
from fusedops.ops._weight_gradients import summed
from fusedops.specs import Sample, Spec, _routing, all_specs, multi_tensor_specs, tensors_in
from fusedops.specs.comparison import fresh, incoming, run
from fusedops.specs.recorder import RecordOps

CPU = torch.device("cpu")
PLAN = _routing.plan(13, 4, 6, device=CPU, dtype=torch.float32)
FIXED = PLAN.with_probs(PLAN.probs.detach())
INDICES = "plan.offsets plan.positions"
EXPERTS = f"input {INDICES} plan.permutation plan.probs w1 w2"


def new(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


NORM = [(16,), new(16)]
ADDED = [new(6, 16), new(6, 16), *NORM]
LINEAR = [new(6, 8), new(10, 8)]
PACKED = [new(6, 8), torch.zeros(1, 1, 64, dtype=torch.uint8), torch.ones(1, 1, 16)]
GROUPS = [new(6, 8), new(2, 8, 10), torch.tensor([4, 6], dtype=torch.int32)]
MLP = [new(9, 16), new(32, 16), new(32), new(12, 32), new(12)]
MOE = [new(13, 8), PLAN, new(6, 8, 10), new(6, 5, 7)]
ROTARY = [new(2, 3, 6, 8), new(2, 1, 6, 8), *torch.randn(2, 1, 6, 8)]
DELTA = [*(new(1, 6, 2, 8) for _ in range(3)), *(new(1, 6, 2) for _ in range(2))]
ROWS = new(52, 64)
SCAN = [new(2, 70, 4), new(2, 70, 4), new(4, 16), new(2, 70, 16), new(2, 70, 16)]
SPACE = [new(2, 70, 4, 8), new(2, 70, 4), new(4), new(2, 70, 1, 16), new(2, 70, 1, 16)]
LCE = [new(300, 4), new(700, 4), torch.arange(300)]
SUM, DROPS, SILU = {"reduction": "sum"}, {"dropout_p": 0.1}, {"activation": "silu"}
IN_CHUNKS, IDENTITY = {"chunk_size": 64, "recompute": True}, {"activation": "identity"}

# Label, which begins with the op's name -> arguments, options, names of arguments and outputs that
# are kept, and the bytes of each other tensor.
KEPT: dict[str, tuple[list[Any], dict[str, Any], str, list[int]]] = {
    "gelu": ([new(8, 64)], {}, "input", []),
    "bias_gelu": ([new(8, 64), new(64)], {}, "bias input", []),
    "swiglu": ([new(8, 64), new(8, 64)], {}, "gate up", []),
    "geglu": ([new(8, 64), new(8, 64)], {}, "gate up", []),
    "rotary_embedding": (ROTARY, {}, "cos sin", []),
    "causal_conv1d": ([new(2, 5, 9), new(5, 4), new(5)], {}, "bias input weight", []),
    "selective_state_space": (SPACE, {}, "A B C dt input", []),
    "gated_delta_rule": (DELTA, {}, "beta gate key query value", []),
    "selective_scan": (SCAN, {}, "A B C dt input", []),
    # Mean and reciprocal deviation of a row; a seed.
    "layer_norm": ([new(6, 16), *NORM], {}, "input weight", [24, 24]),
    "add_layer_norm": (ADDED, {}, "output_1 weight", [24, 24]),
    "add_layer_norm, drops": (ADDED, DROPS, "output_1 weight", [16, 24, 24]),
    "add_rms_norm, drops": (ADDED, DROPS, "output_1 weight", [16, 24]),
    "gated_rms_norm": ([new(6, 16), new(6, 16), new(16)], {}, "gate input weight", [24]),
    "linear_act": (LINEAR, {"activation": "gelu"}, "input weight", [240]),
    "linear_act, identity": (LINEAR, IDENTITY, "input weight", []),
    "linear_act, frozen": ([LINEAR[0], torch.ones(10, 8)], IDENTITY, "weight", []),
    "quantized_linear": (PACKED, {"out_features": 10, "group": 8}, "qweight scales", []),
    "linear_glu": ([*LINEAR, new(10, 8)], {}, "gate_weight input up_weight", [240, 240]),
    "mlp": (MLP, {}, "b1 b2 input w1 w2", [9 * 32 * 4]),
    "mlp, tiles": (MLP, {"tile_tokens": 4}, "b1 b2 input w1 w2", []),
    "mlp, recompute": (MLP, {"recompute": True}, "b1 b2 input w1 w2", []),
    "baddbmm": ([new(2, 3, 5), new(2, 3, 4), new(2, 4, 5)], {}, "batch1 batch2", []),
    "grouped_mm": (GROUPS, SILU, "input offsets weight", [240]),
    "grouped_mm, identity": (GROUPS, {}, "input offsets weight", []),
    "moe_mlp": (MOE, {}, EXPERTS, []),
    "moe_mlp, kept": (MOE, {"recompute": False}, EXPERTS, [13 * 4 * 10 * 4]),
    "moe_permute": ([new(13, 64), PLAN], {}, INDICES, []),
    # The rows are for the gradient of the probabilities alone.
    "moe_unpermute": ([ROWS, PLAN], {}, f"{INDICES} input plan.probs", []),
    "moe_unpermute, fixed": ([ROWS, FIXED], {}, f"{INDICES} plan.probs", []),
    "moe_unpermute, unweighted": ([ROWS, PLAN], {"weighted": False}, INDICES, []),
    # Two numbers a row, and nothing of the size of the logits.
    "cross_entropy": ([new(5, 33), torch.arange(5)], SUM, "logits target", [4, 40]),
    "linear_cross_entropy": (LCE, IN_CHUNKS, "hidden target weight", [4, 2400]),
    "token_logprobs": ([new(5, 33), torch.arange(5)], {}, "logits target", [80]),
    "linear_token_logprobs": (LCE, IN_CHUNKS, "input target weight", [4800]),
    # Of each query and nothing of each pair: 2 heads of 64 queries.
    "attention": (
        [new(1, 2, 64, 16) for _ in range(3)],
        {},
        "key output_0 query value",
        [512, 1024],
    ),
}


def kept(name: str, args: list[Any], options: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Return the names of what a call keeps, and the bytes of what has none."""
    op = all_specs()[name].op
    bound = inspect.signature(op).bind(*args, **options).arguments
    found: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        outputs = tensors_in(op(*args, **options))
    names = {output.data_ptr(): f"output_{i}" for i, output in enumerate(outputs)}
    for path, value in pytree.tree_flatten_with_path(bound)[0]:
        if isinstance(value, torch.Tensor):
            names[value.data_ptr()] = "".join(map(str, path))[2:].replace("']", "")
    full = {each.data_ptr(): each for each in found if each.numel()}
    others = [tensor.nbytes for address, tensor in full.items() if address not in names]
    return sorted({names[address] for address in full if address in names}), sorted(others)


@pytest.mark.parametrize("label", KEPT)
def test_what_is_kept_for_the_backward(label: str) -> None:
    args, options, names, sizes = KEPT[label]
    assert kept(label.split(",")[0], args, options) == (sorted(names.split()), sizes)


@pytest.mark.parametrize("label", KEPT)
def test_without_gradients_nothing_is_kept(label: str) -> None:
    args, options, *_ = KEPT[label]
    with torch.no_grad():
        assert kept(label.split(",")[0], args, options) == ([], [])


TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
BACKENDS = pytest.mark.parametrize(
    "backend", [*(["cpp"] if extension.cpu_library() is None else []), "torch", TRITON]
)


def _operator(name: str) -> Any:
    return getattr(torch.ops.fusedops, name).default


def _writing() -> list[str]:
    """Return the names of all operators that write, but for those that the router alone calls."""
    names = (
        name.removeprefix("fusedops::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fusedops::") and not name.endswith("_choose")
    )
    return sorted(name for name in names if _operator(name)._schema.is_mutable)


WRITING = pytest.mark.parametrize("name", _writing())


def _calls(name: str) -> list[tuple[Any, ...]]:
    """Return the arguments of calls of an operator, with tensors that nobody else has."""
    if name in multi_tensor_specs():
        samples = multi_tensor_specs()[name].calls(CPU, torch.float32)
        calls = [sample.args for sample in samples if sample.name != "strides"]
    else:  # it is a backward of the op that it is a part of
        spec = all_specs()[str(backends._KERNELS[name].part_of)]
        calls = []
        for sample in spec.samples(CPU, torch.bfloat16):
            with summed(True), RecordOps() as recorder:
                run(spec.op, fresh(sample))
            calls += [args for func, args in recorder.calls if func is _operator(name)]
    assert calls
    return [pytree.tree_map_only(torch.Tensor, torch.clone, args) for args in calls]


def _written(name: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
    described = zip(_operator(name)._schema.arguments, args, strict=True)
    return [
        tensor
        for argument, value in described
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(value)
    ]


def _assert_counts(name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    written = _written(name, args)
    others = {id(tensor) for tensor in tensors_in(args)} - set(map(id, written))
    before = {id(tensor): tensor._version for tensor in tensors_in(args)}
    call(*args)
    assert written
    assert all(tensor._version > before[id(tensor)] for tensor in written)
    read = [tensor for tensor in tensors_in(args) if id(tensor) in others]
    assert all(tensor._version == before[id(tensor)] for tensor in read)


@BACKENDS
@WRITING
def test_what_is_written_gets_a_new_version(name: str, backend: str) -> None:
    for args in _calls(name):
        with fusedops.use_backend(backend), reachable(tensors_in(args)), torch.no_grad():
            _assert_counts(name, _operator(name), args)


@WRITING
def test_without_values_and_in_compiled_code_too(name: str) -> None:
    args = _calls(name)[0]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        _assert_counts(name, _operator(name), fakes)
    torch._dynamo.reset()
    compiled = torch.compile(_operator(name), backend="aot_eager")
    with torch.no_grad():
        _assert_counts(name, compiled, args)


@WRITING
def test_tensors_of_inference_mode_have_no_version_and_others_have(name: str) -> None:
    args = _calls(name)[0]
    with torch.inference_mode():
        _operator(name)(*pytree.tree_map_only(torch.Tensor, torch.clone, args))
        _assert_counts(name, _operator(name), args)
        written = _written(name, args)
        mixed = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.clone() if tensor is written[0] else tensor, args
        )
    before = [tensor._version for tensor in written[1:]]
    with torch.no_grad():
        _operator(name)(*mixed)
    assert all(a._version > b for a, b in zip(written[1:], before, strict=True))


def each_sample(*dtypes: torch.dtype, with_one: bool = False) -> Any:
    """Run a test with every sample, or with those that have a dim of one element."""
    chosen = [
        pytest.param(spec, sample, id=f"{spec.name}-{sample.name}-{str(dtype)[6:]}")
        for spec in all_specs().values()
        for dtype in dtypes
        for sample in spec.samples(CPU, dtype)
        if not with_one or any(1 in tensor.shape for tensor in sample.tensors)
    ]
    return pytest.mark.parametrize(("spec", "sample"), chosen)


def with_odd_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with strides that say nothing, those of dims of one element, changed."""
    strides = [
        stride if size > 1 else 3
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    odd = tensor.detach().clone().as_strided(tensor.shape, strides)
    return odd.requires_grad_(tensor.requires_grad)


@pytest.mark.ci(every=5)
@BACKENDS
@each_sample(torch.float32, with_one=True)
def test_strides_of_dims_of_one_element_say_nothing(
    spec: Spec, sample: Sample, backend: str
) -> None:
    dense = fresh(sample).map(lambda t: t.detach().contiguous().requires_grad_(t.requires_grad))
    call = dense.map(with_odd_strides)
    with fusedops.use_backend(backend), reachable(call.tensors):
        odd = run(
            spec.op,
            call,
            lambda outputs: [with_odd_strides(grad) for grad in incoming(outputs)],
        )
    with fusedops.use_backend(backend):
        assert_same_bits(odd, run(spec.op, dense))


@pytest.fixture
def uninitialized_memory_is_nan() -> Iterator[None]:
    """New tensors, and the kernels' workspaces, are full of NaN."""
    assert deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@each_sample(torch.float32, torch.bfloat16, torch.float64)
def test_nothing_is_read_that_was_not_written(
    spec: Spec, sample: Sample, uninitialized_memory_is_nan: None
) -> None:
    with fusedops.use_backend("cpp"):
        poisoned = run(spec.op, fresh(sample))
        torch.use_deterministic_algorithms(False)
        assert_same_bits(poisoned, run(spec.op, fresh(sample)))


def test_blocks_of_queries_without_keys_read_nothing(uninitialized_memory_is_nan: None) -> None:
    seed_generators(3)
    query, key, value = (torch.randn(1, 2, rows, 16) for rows in (160, 56, 56))
    sinks = torch.tensor([-104.0, 0.3], requires_grad=True)
    with fusedops.use_backend("cpp"):
        output, lse = fusedops.attention(
            query, key, value, window=(0, 0), sinks=sinks, return_lse=True
        )
        (grad,) = torch.autograd.grad(lse[:, :, 56:].sum(), sinks)
    assert torch.equal(lse[0, :, 56:], sinks.detach()[:, None].expand(2, 104))
    assert torch.equal(output[:, :, 56:], torch.zeros(1, 2, 104, 16))
    assert torch.equal(grad, torch.full((2,), 104.0))

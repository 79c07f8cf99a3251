"""Triton kernels as they are compiled for a GPU: their PTX is executed, and compared with float64.

``tools/ptx_machine`` executes what Triton's runtime launches. Of each op one sample for sm_80 and
sm_90 runs in CI, all samples and those of the static report in ``make test-gpu-code``.
"""

from __future__ import annotations

import re

import hot_samples
import ptx_gpu
import pytest
import torch
from comparing import assert_close, assert_within_budget
from hot_samples import products
from ptx_machine import MachineError

import fusedops
from fusedops._core import backends, env
from fusedops.specs import Spec, all_specs
from fusedops.specs.comparison import difference_from_truth, fresh, run

pytest.importorskip("triton")
if env.triton_interpreted():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the machine needs a process that sees no GPU", allow_module_level=True)

CPU = torch.device("cpu")
CAPABILITIES = (80, 90, 120)
# The code of sm_80 with less shared memory: RTX 30 and 40.
SMALLER = (86, 89)
SPECS = [spec for spec in all_specs().values() if backends._KERNELS[spec.name].triton is not None]
# docs/dev/gpu_kernels.md has the reasons of both: products of the backward read their operands in
# float16, and Triton moves the fence between cp.async and wgmma out of the loop.
ROUNDED = {("attention", "dropout_causal"), ("attention_varlen", "fewer_keys")}
WITHOUT_A_FENCE = {("attention", "D256 of 1, window, bias, soft-cap, alibi, sinks")}
# Lists of tensors, which reach a kernel as a table of addresses.
OF_LISTS = ("adamw", "square_sums")
# Products by wgmma: of tensor maps, and of cp.async.
HOT_IN_CI = ("272x272x528 along", "272x272x528 apart")


@pytest.mark.parametrize(
    "capability",
    [80, 90, *(pytest.param(each, marks=pytest.mark.slow) for each in (*SMALLER, 120))],
)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.ci
def test_the_first_sample_matches_float64(spec: Spec, capability: int) -> None:
    assert_executed(spec, spec.samples(CPU, torch.bfloat16)[0].name, torch.bfloat16, capability)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 10))
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_another_order_is_no_error(spec: Spec, capability: int, seed: int) -> None:
    name = spec.samples(CPU, torch.bfloat16)[0].name
    assert_executed(spec, name, torch.bfloat16, capability, 1000 * seed)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("spec", "name"),
    [
        pytest.param(spec, sample.name, id=f"{spec.name}-{sample.name}")
        for spec in SPECS
        for sample in spec.samples(CPU, torch.float32)
    ],
)
def test_every_sample_matches_float64(
    spec: Spec, name: str, dtype: torch.dtype, capability: int, request: pytest.FixtureRequest
) -> None:
    if dtype == torch.float16 and (spec.name, name) in ROUNDED:
        request.applymarker(pytest.mark.xfail(strict=True, raises=AssertionError))
    assert_executed(spec, name, dtype, capability)


def assert_executed(
    spec: Spec, name: str, dtype: torch.dtype, capability: int, seed: int = 0
) -> None:
    found = [sample for sample in spec.samples(CPU, dtype) if sample.name == name]
    if not found:
        pytest.skip(f"no sample of {dtype}")
    sample = fresh(found[0])
    fusedops.reset_counters()
    with ptx_gpu.present(capability, seed) as gpu, fusedops.use_backend("triton"):
        result = run(spec.op, sample)
    assert {backend for _, backend in fusedops.counters()} == {"triton"}
    assert gpu.kernels or not all(tensor.numel() for tensor in sample.tensors)
    assert_within_budget(result, spec, fresh(found[0]))


def marks_of(call: hot_samples.HotCall, capability: int) -> list[pytest.MarkDecorator]:
    """Return CI for two products, else the slow tier; and what is known to fail."""
    in_ci = call.op == "linear_act" and call.name in HOT_IN_CI and capability == 90
    marks = [pytest.mark.ci if in_ci else pytest.mark.slow]
    if (call.op, call.name) in WITHOUT_A_FENCE and capability == 90:
        marks.append(pytest.mark.xfail(strict=True, raises=MachineError))
    return marks


@pytest.mark.parametrize(
    ("call", "capability"),
    [
        pytest.param(call, capability, marks=marks_of(call, capability), id=f"{name}-{capability}")
        for op in hot_samples.ops()
        for call in hot_samples.calls(op, torch.bfloat16)
        if call.op not in OF_LISTS
        for name in [f"{call.op}-{call.name}"]
        for capability in CAPABILITIES
    ],
)
def test_hot_samples_match_float64(
    call: hot_samples.HotCall, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Instead of 64 groups, in a quarter of the time: the code differs in the size of one table.
    monkeypatch.setattr(products, "GROUPS", 12)
    sample = call.sample(hot_samples.New(CPU, torch.bfloat16))
    with ptx_gpu.present(capability) as gpu, fusedops.use_backend("triton"):
        result = call.run(sample)
    assert gpu.kernels
    assert_within_budget(result, all_specs()[call.op], call.plain(sample))


@pytest.mark.ci
@pytest.mark.parametrize("capability", [80, 90, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, id=f"{op}-{call.name}")
        for op in OF_LISTS
        for call in hot_samples.calls(op, torch.bfloat16)
    ],
)
def test_lists_of_tensors_match_the_reference(call: hot_samples.HotCall, capability: int) -> None:
    given = call.sample(hot_samples.New(CPU, torch.bfloat16))
    executed, expected = fresh(given), fresh(given)
    with ptx_gpu.present(capability) as gpu, fusedops.use_backend("triton"):
        gpu.tensors = [*executed.tensors]
        result = call.run(executed)
    assert gpu.kernels
    with fusedops.use_backend("torch"):
        reference = call.run(expected)
    found = [*result.outputs, *executed.tensors]
    for one, other in zip(found, [*reference.outputs, *expected.tensors], strict=True):
        assert_close(one, other, other)  # the reference stands for the truth


@pytest.mark.ci
@pytest.mark.parametrize(
    "dropped",
    [
        r"bar\.sync\s+0;",
        r"fence\.proxy\.async\.shared::cta;",
        r"@!complete\s+bra\.uni\s+waitLoop;",
        r"wgmma\.wait_group\.sync\.aligned\s+0;",
        r"cp\.async\.wait_group\s+\d+;",
    ],
)
def test_synchronization_that_is_dropped_is_found(dropped: str) -> None:
    """In one of two products: of tensor maps, and of cp.async. Not each needs each fence."""
    num_planted, num_found = 0, 0

    def change(text: str) -> str:
        nonlocal num_planted
        changed, count = re.subn(dropped, "", text)
        num_planted += count
        return changed

    for call in hot_samples.calls("linear_act", torch.bfloat16):
        before = num_planted
        if call.name not in HOT_IN_CI:
            continue
        sample = call.sample(hot_samples.New(CPU, torch.bfloat16))
        wrong = None
        with ptx_gpu.present(90) as gpu, fusedops.use_backend("triton"):
            gpu.change = change
            try:
                result = call.run(sample)
            except MachineError as error:
                wrong = str(error)
        wrong = wrong or difference_from_truth(result, all_specs()[call.op], call.plain(sample))
        assert wrong is None or num_planted > before
        num_found += wrong is not None
    assert num_found

"""Operators over lists of tensors: every backend against float64, and what their contract refuses.

Optimizers call them past no public function's checks, and so may anybody.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reachable import reachable
from torch.utils import _pytree as pytree

import fusedops
from fusedops._core import backends, dtypes, env, extension
from fusedops.specs import Sample, multi_tensor_specs, tensors_in

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
Arguments = dict[str, Any]


def operator(name: str) -> Any:
    return getattr(torch.ops.fusedops, name).default


def arguments(name: str, sample_name: str, dtype: torch.dtype = torch.float32) -> Arguments:
    """Return the arguments of a call by name, with tensors that nobody else has."""
    calls = multi_tensor_specs()[name].calls(CPU, dtype)
    (sample,) = [call for call in calls if call.name == sample_name]
    names = [argument.name for argument in operator(name)._schema.arguments]
    return dict(zip(names, sample.args, strict=True))


def test_every_operator_over_lists_has_a_spec() -> None:
    over_lists = {
        name
        for name, kernels in backends._KERNELS.items()
        if kernels.contracts
        and any(kind == "Tensor[]" for kind, _ in kernels.contracts[0].arguments)
    }
    assert set(multi_tensor_specs()) == over_lists


def _outcome(name: str, sample: Sample, wide: bool) -> list[torch.Tensor]:
    """Return the results of a call and what it left in its arguments."""

    def copy(each: torch.Tensor) -> torch.Tensor:
        copied = each.clone(memory_format=torch.preserve_format)
        return copied.double() if wide else copied

    args = pytree.tree_map_only(torch.Tensor, copy, list(sample.args))
    with reachable(tensors_in(args)):
        result = operator(name)(*args)
    return [*tensors_in(args), *tensors_in(result)]


@pytest.mark.parametrize("backend", ["cpp", "torch", TRITON])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", multi_tensor_specs())
def test_values_match_float64(name: str, dtype: torch.dtype, backend: str) -> None:
    torch.manual_seed(0)
    for sample in multi_tensor_specs()[name].calls(CPU, dtype):
        if sample.name in ("draws", "half states"):
            continue  # random roundings: tests/optim/test_rounding.py
        if backend == "triton" and sample.name == "strides":
            continue  # the interpreter is not told of the copies that the launcher makes
        if backend == "triton" and torch.float64 in {tensor.dtype for tensor in sample.tensors}:
            continue  # no Triton kernel takes float64
        with fusedops.use_backend("torch"):
            truth = _outcome(name, sample, wide=True)
            eager = _outcome(name, sample, wide=False)
        with fusedops.use_backend(backend):
            got = _outcome(name, sample, wide=False)
        for actual, reference, wanted in zip(got, eager, truth, strict=True):
            # A step is a few operations per element; a sum has up to 130 terms.
            budget = dtypes.error_budget(reference, wanted, actual.dtype, depth=130)
            assert actual.dtype == reference.dtype
            assert bool(((actual.double() - wanted).abs() <= budget).all()), sample.name


def _with(number: int, change: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    """Return what changes one tensor of a list."""
    return lambda given: [change(each) if i == number else each for i, each in enumerate(given)]


def _wide(given: torch.Tensor) -> torch.Tensor:
    return torch.zeros((*given.shape, 3), dtype=given.dtype)[..., 1]


# Changes of the call "transposed", float64 unless named, and the words of the error.
REFUSED = [
    ("exp_avgs", lambda _: [], r"exp_avgs must be a list of 5 tensors, .* params .*got 0"),
    ("exp_avg_sqs", lambda _: [], "exp_avg_sqs must be a list of 5 tensors"),
    ("grads", lambda given: given[:-1], "grads must be a list of 5 tensors"),
    ("steps", lambda given: [*given, given[0]], "steps must be a list of 5 tensors"),
    ("params", lambda given: given[1:], r"weight_decays must .* len\(params\) = 4"),
    ("max_exp_avg_sqs", lambda _: [torch.ones(7)], "a list of 5 tensors.* or empty, got 1"),
    ("weight_decays", lambda given: given[:2], "weight_decays must be such that"),
    ("draws", lambda _: [1, 0, 1], "draws must be such that"),
    ("copies", _with(0, torch.Tensor.bfloat16), r"copies\[0\] must have dtype float64"),
    ("copies", _with(4, torch.Tensor.float), r"copies\[4\] must have dtype float64"),
    ("grads", _with(1, torch.Tensor.float), r"grads\[1\] must have dtype float64"),
    ("exp_avgs", _with(2, torch.Tensor.half), r"exp_avgs\[2\] must have dtype float64"),
    ("params", _with(0, torch.Tensor.long), r"params\[0\] must have dtype"),
    ("steps", _with(3, torch.Tensor.long), r"steps\[3\] must have dtype float32 or float64"),
    ("steps", _with(3, lambda _: torch.ones(2)), r"steps\[3\] must be of shape \[\] or \[1\]"),
    ("grads", _with(0, lambda given: given[:3]), r"grads\[0\] must be of shape \[7\], got \[3\]"),
    ("exp_avgs", _with(1, torch.Tensor.contiguous), r"exp_avgs\[1\] must be without gaps and of"),
    ("grads", _with(4, _wide), r"grads\[4\] must be without gaps"),
    ("params", _with(4, lambda given: given[:1].expand(66)), r"params\[4\] must be without gaps"),
    (
        "copies",
        _with(0, lambda given: given.to("meta")),
        r"copies\[0\] must be on cpu.*params\[0\]",
    ),
    ("params", _with(0, lambda given: given.to("meta")), r"params\[1\] must be on meta"),
    ("grad_factor", lambda _: torch.ones(2), r"grad_factor must be of shape \[\] or \[1\]"),
    ("found_inf", lambda _: torch.ones((), dtype=torch.int32), "found_inf must have dtype float32"),
]


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize(
    ("name", "change", "words"), REFUSED, ids=[f"{i}-{each[0]}" for i, each in enumerate(REFUSED)]
)
def test_adamw_refuses_lists_that_do_not_fit_and_writes_nothing(
    name: str, change: Callable[[Any], Any], words: str, backend: str | None
) -> None:
    given = arguments("adamw", "transposed", torch.float64)
    given[name] = change(given[name])
    real = [each for each in tensors_in(list(given.values())) if not each.is_meta]
    before = [each.clone() for each in real]
    with (
        fusedops.use_backend(backend),
        pytest.raises((TypeError, ValueError), match=f"adamw: .*{words}"),
    ):
        operator("adamw")(*given.values())
    assert all(torch.equal(a, b) for a, b in zip(real, before, strict=True))


@pytest.mark.parametrize(
    ("place", "number", "words"),
    [(1, -1, "base"), (1, -(2**63), "base"), (2, 0, "run"), (3, -4, "pitch")],
)
def test_adamw_refuses_draws_outside_of_the_parameter(place: int, number: int, words: str) -> None:
    given = arguments("adamw", "draws", torch.bfloat16)
    operator("adamw")(*given.values())
    given["draws"][4 + place] = number
    with pytest.raises(ValueError, match=f"adamw: {words} must be such that"):
        operator("adamw")(*given.values())


@pytest.mark.skipif(extension.cpu_library() is not None, reason="the kernel is the C++ one")
def test_element_numbers_past_2_to_the_63_wrap_around() -> None:
    """The words of the last elements are those of their number modulo 2**64."""
    given = arguments("adamw", "draws", torch.bfloat16)
    given["draws"] = [7, 2**63 - 5, 3, 2**62] * 5
    operator("adamw")(*given.values())
    assert all(bool(each.isfinite().all()) for each in given["params"])


@pytest.mark.parametrize("place", range(2))
def test_square_sums_refuses_a_tensor_of_another_device(place: int) -> None:
    inputs = [torch.ones(3), torch.ones(3)]
    inputs[place] = inputs[place].to("meta")
    with pytest.raises(ValueError, match=r"square_sums: inputs\[1\] must be on (cpu|meta)"):
        operator("square_sums")(inputs)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_square_sums_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"square_sums: inputs\[1\] must have dtype"):
        operator("square_sums")([torch.ones(3), torch.ones(3).to(dtype)])


def test_fake_kernels_hold_lists_to_the_contract() -> None:
    for name, sample_name in itertools.product(("adamw",), ("plain", "master weights")):
        given = arguments(name, sample_name)
        meta = pytree.tree_map_only(torch.Tensor, lambda each: each.to("meta"), given)
        assert operator(name)(*meta.values()) is None
        meta["exp_avgs"] = meta["exp_avgs"][:-1]
        with pytest.raises(ValueError, match="adamw: exp_avgs must be a list of 5 tensors"):
            operator(name)(*meta.values())
    (sums,) = tensors_in(operator("square_sums")([torch.ones(3, device="meta")] * 2))
    assert sums.shape == (2,) and sums.dtype == torch.float64


def test_numbers_in_float64_beside_the_data_do_not_keep_adamw_from_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(extension, "triton_missing", lambda: None)
    monkeypatch.setattr(env, "triton_interpreted", lambda: True)
    monkeypatch.setitem(backends._ORDER, "cpu", ("triton", "torch"))
    for sample in multi_tensor_specs()["adamw"].calls(CPU, torch.float32):
        names = [argument.name for argument in operator("adamw")._schema.arguments]
        given = dict(zip(names, sample.args, strict=True))
        given["grad_factor"] = torch.tensor(0.5, dtype=torch.float64)
        assert backends.resolve("adamw", *given.values()).backend == "triton"
        given["params"] = [each.double() for each in given["params"]]
        assert backends.resolve("adamw", *given.values()).backend == "torch"

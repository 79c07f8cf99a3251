"""What gated_delta_rule promises beyond its values: the same bits however a call is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_bits, assert_same_bits_on_threads

import fusedops
from fusedops import gated_delta_rule
from fusedops.specs import Sample, all_specs
from fusedops.specs.comparison import fresh, run
from fusedops.specs.gated_delta_rule import _call
from fusedops.specs.make import TensorFactory

SPEC = all_specs()["gated_delta_rule"]
NEW = TensorFactory(torch.device("cpu"), torch.float32)
channels = pytest.mark.parametrize("per_channel", [False, True])


def call(tokens: int, *, per_channel: bool, heads: int = 4) -> tuple[torch.Tensor, ...]:
    return _call(NEW, 1, tokens, heads, 2, 24, 80, per_channel=per_channel)


def results(args: Any, state: torch.Tensor | None, **options: Any) -> list[torch.Tensor]:
    options = {"qk_norm": True, "return_state": True, "initial_state": state} | options
    found = run(gated_delta_rule, fresh(Sample("", args, options)))
    return [*found.outputs, *found.grads]


@channels
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences_have_the_bits_of_separate_calls(
    *, per_channel: bool, with_state: bool
) -> None:
    lengths = [70, 0, 1, 17, 64]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    args = call(sum(lengths), per_channel=per_channel)
    state = NEW(5, 4, 24, 80, grad=False, key="state") if with_state else None
    options = {"qk_norm": True, "return_state": True}
    leaves = [t.detach().requires_grad_() for t in args]
    output, last = gated_delta_rule(*leaves, initial_state=state, cu_seqlens=ends, **options)
    incoming = torch.ones_like(output)
    grads = torch.autograd.grad([output, last], leaves, [incoming, torch.ones_like(last)])
    for n, (begin, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        part = [t[:, begin:end].detach().requires_grad_() for t in args]
        before = None if state is None else state[n : n + 1]
        alone, after = gated_delta_rule(*part, initial_state=before, **options)
        ones = [torch.ones_like(alone), torch.ones_like(after)]
        of_part = torch.autograd.grad([alone, after], part, ones)
        assert_same_bits(output[:, begin:end], alone, f"output {n}")
        assert_same_bits(last[n : n + 1], after, f"state {n}")
        assert_same_bits([grad[:, begin:end] for grad in grads], list(of_part), f"gradients {n}")


@channels
def test_pieces_of_chunks_have_the_bits_of_one_call(*, per_channel: bool) -> None:
    args = call(200, per_channel=per_channel)
    whole, last = gated_delta_rule(*args, return_state=True)
    outputs, state = [], None
    chunk = 16 if per_channel else 64
    for begin, end in ((0, chunk), (chunk, 3 * chunk), (3 * chunk, 200)):
        part = [t[:, begin:end] for t in args]
        output, state = gated_delta_rule(*part, initial_state=state, return_state=True)
        outputs.append(output)
    assert_same_bits(torch.cat(outputs, 1), whole)
    assert_same_bits(state, last)


@channels
@pytest.mark.parametrize("tokens", [1, 90])
def test_the_number_of_threads_does_not_change_the_bits(*, per_channel: bool, tokens: int) -> None:
    sample = Sample("", call(tokens, per_channel=per_channel, heads=2), {"return_state": True})
    assert_same_bits_on_threads(SPEC, sample, (1, 2, 7))


@channels
def test_strong_decays_stay_finite(*, per_channel: bool) -> None:
    query, key, value, gate, beta = call(70, per_channel=per_channel)
    strong = (gate.detach() * 100).requires_grad_()
    found = results((query, key, value, strong, beta), None)
    assert all(tensor.isfinite().all() for tensor in found)


@channels
@pytest.mark.parametrize(
    "backend", ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
)
@pytest.mark.parametrize("strongest", [-200.0, -1e6, -torch.inf])
def test_tokens_after_a_strong_decay_are_exact(
    *, per_channel: bool, backend: str, strongest: float
) -> None:
    """Where the sums of gates are large, their differences are not; a gate may be -inf."""
    args = [tensor.detach() for tensor in call(70, per_channel=per_channel)]
    args[3][:, ::9] = strongest
    exact = [tensor.double() for tensor in args]
    if strongest < -1000:
        exact[3][:, ::9] = -1000.0
    with fusedops.use_backend(backend):
        found = results([tensor.requires_grad_() for tensor in args], None)
    with fusedops.use_backend("torch"):
        expected = results([tensor.requires_grad_() for tensor in exact], None)
    for tensor, wanted in zip(found, expected, strict=True):
        assert_close(tensor, wanted, wanted.float(), depth=70)


@channels
def test_the_first_gate_of_a_zero_state_has_a_gradient_of_zero(*, per_channel: bool) -> None:
    *_, grad_gate, _ = results(call(70, per_channel=per_channel), None)
    assert not grad_gate[:, 0].any()
    assert grad_gate[:, 1:].all()

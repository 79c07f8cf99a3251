"""What is special about log-probabilities of tokens: small entropies, masked classes, same bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_bits

import fusedops
from fusedops.specs import token_logprobs as spec

NUMBERS = ("logprobs", "logsumexp", "entropy")
by_backend = pytest.mark.parametrize("backend", ["cpp", "torch"])


def with_gradients(tokens: fusedops.TokenLogprobs, leaves: Any) -> tuple[torch.Tensor, ...]:
    """Return the numbers and what the gradients of their weighted sum are."""
    numbers = [getattr(tokens, name) for name in NUMBERS]
    torch.manual_seed(1)
    weights = [torch.randn(number.shape).to(number) for number in numbers]
    total = sum((number * weight).sum() for number, weight in zip(numbers, weights, strict=True))
    return (*numbers, *torch.autograd.grad(total, leaves))


@by_backend
@pytest.mark.parametrize("gap", [1.0, 8.0, 20.0, 60.0])
def test_a_small_entropy_keeps_its_digits(gap: float, backend: str) -> None:
    """One class has nearly all: its entropy is a sum of small terms, without a large difference."""
    torch.manual_seed(0)
    logits = torch.randn(4, 5000)
    logits[torch.arange(4), torch.tensor([0, 2500, 4999, 7])] = logits.amax() + gap
    target = torch.zeros(4, dtype=torch.int64)
    with fusedops.use_backend(backend):
        got = fusedops.token_logprobs(logits, target, return_entropy=True).entropy
    want = spec.eager(logits.double(), target, return_entropy=True).entropy
    assert got is not None and want is not None
    assert_close(got, want, spec.eager(logits, target, return_entropy=True).entropy, "entropy")
    assert (got >= 0).all()


@by_backend
def test_masked_classes_add_nothing_and_have_no_gradient(backend: str) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(6, 50), torch.arange(6)
    masked = logits.clone()
    masked[:, 30:] = -math.inf
    leaves = [each.requires_grad_() for each in (logits[:, :30].clone(), masked)]
    with fusedops.use_backend(backend):
        want, got = (
            with_gradients(fusedops.token_logprobs(leaf, target, return_entropy=True), [leaf])
            for leaf in leaves
        )
    assert (got[3][:, 30:] == 0).all()
    for mine, other in zip((*got[:3], got[3][:, :30]), want, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("ignored", [0, 50])
def test_kept_and_recomputed_logits_give_the_same_bits(dtype: torch.dtype, ignored: int) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(300, 40), torch.randn(700, 40) * 0.2, torch.randn(700)
    leaves = [each.to(dtype).requires_grad_() for each in (hidden, weight, bias)]
    target = torch.randint(700, (300,))
    target[:ignored] = -100
    options: dict[str, Any] = {"chunk_size": 128, "return_entropy": True, "temperature": 0.8}
    results, threads = [], torch.get_num_threads()
    try:
        for recompute, count in ((True, 1), (False, 1), (True, 3), (False, 2)):
            torch.set_num_threads(count)
            options["recompute"] = recompute
            args = (leaves[0], leaves[1], target, leaves[2])
            tokens = fusedops.linear_token_logprobs(*args, **options)
            results.append((tokens.is_argmax, *with_gradients(tokens, leaves)))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert_same_bits(result, results[0])
    rows = slice(ignored, ignored + 20)
    part = fusedops.linear_token_logprobs(
        leaves[0][rows], leaves[1], target[rows], leaves[2], **options
    )
    assert_same_bits(
        [part.is_argmax, *(getattr(part, name) for name in NUMBERS)],
        [result[rows] for result in results[0][:4]],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_log_probabilities_of_half_precision_are_those_of_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, target = (torch.randn(20, 3000) * 4).to(dtype), torch.randint(3000, (20,))
    got = fusedops.token_logprobs(logits, target, return_entropy=True)
    want = spec.eager(logits.double(), target, return_entropy=True)
    base = spec.eager(logits.float(), target, return_entropy=True)
    for name in NUMBERS:
        mine, exact, eager = (getattr(each, name) for each in (got, want, base))
        assert mine.dtype == torch.float32
        assert_close(mine, exact, eager, name, depth=3000)
    assert torch.equal(got.is_argmax, logits.argmax(-1) == target)


def test_the_log_probability_is_minus_the_loss() -> None:
    logits, target = torch.randn(9, 77), torch.randint(77, (9,))
    target[3] = -100
    tokens = fusedops.token_logprobs(logits, target, softcap=5.0)
    assert tokens.entropy is None
    loss = fusedops.cross_entropy(logits, target, softcap=5.0, reduction="none")
    torch.testing.assert_close(tokens.logprobs, -loss)

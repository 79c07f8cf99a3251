"""What the generic tests leave out of the Triton kernels of attention: all options together,
gradients one by one, layouts. The truth is the reference; dropout draws the same numbers there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import assert_close

import fusedops
from fusedops.specs.comparison import ComparisonResult

pytestmark = pytest.mark.interpreter


def run(backend: str, call: Any, leaves: list[torch.Tensor], wanted: list[int]) -> ComparisonResult:
    torch.manual_seed(3)
    with fusedops.use_backend(backend):
        outputs = call()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = [torch.randn_like(output.float()).to(output) for output in outputs]
        found = torch.autograd.grad(outputs, [leaves[i] for i in wanted], grads)
    return ComparisonResult([output.detach() for output in outputs], list(found))


def layout(tensor: torch.Tensor) -> list[int]:
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in pairs if size > 1]


def assert_agree(call: Any, leaves: list[torch.Tensor], wanted: list[int] | None = None) -> None:
    wanted = list(range(len(leaves))) if wanted is None else wanted
    got = run("triton", call, leaves, wanted)
    want = run("torch", call, leaves, wanted)
    depth = max(leaf.numel() for leaf in leaves)
    for index, (a, b) in enumerate(
        zip(got.outputs + got.grads, want.outputs + want.grads, strict=True)
    ):
        assert_close(a, b.double(), b, f"result {index}", depth)
        assert layout(a) == layout(b)


def new(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


OPTIONS: dict[str, Any] = {
    "dropout_p": 0.3,
    "window": (20, 9),
    "softcap": 3.0,
    "alibi_slopes": torch.tensor([[0.5, 0.25, 0.125, 0.0625]]),
    "return_lse": True,
}


@pytest.mark.parametrize("keys", [50, 52], ids=["counters_apart", "counters_in_fours"])
def test_all_options_together(keys: int) -> None:
    leaves = [new(1, 4, 37, 20), new(1, 2, keys, 20), new(1, 2, keys, 12)]
    leaves += [new(1, 4, 1, keys), new(4)]
    q, k, v, mask, sinks = leaves
    assert_agree(
        lambda: fusedops.attention(q, k, v, mask, enable_gqa=True, sinks=sinks, **OPTIONS), leaves
    )


def test_all_options_of_packed_sequences_together() -> None:
    q_ends, k_ends = torch.tensor([0, 20, 20, 41]), torch.tensor([0, 33, 36, 52])
    leaves = [new(41, 4, 20), new(52, 2, 20), new(52, 2, 12), new(4)]
    q, k, v, sinks = leaves
    options = OPTIONS | {"alibi_slopes": torch.rand(3, 4)}
    assert_agree(
        lambda: fusedops.attention_varlen(
            q, k, v, q_ends, k_ends, 21, 33, is_causal=True, sinks=sinks, **options
        ),
        leaves,
    )


@pytest.mark.parametrize("wanted", range(5))
def test_each_gradient_alone(wanted: int) -> None:
    leaves = [new(2, 2, 18, 8), new(2, 2, 21, 8), new(2, 2, 21, 8), new(2, 1, 18, 21), new(2)]
    q, k, v, mask, sinks = leaves
    assert_agree(lambda: fusedops.attention(q, k, v, mask, sinks=sinks), leaves, [wanted])


def test_any_layout() -> None:
    leaves = [new(8, 18, 2, 2), new(2, 8, 21).unsqueeze(1), new(2, 1, 1, 8)]
    q, k, v = leaves[0].permute(3, 2, 1, 0), leaves[1].mT, leaves[2].expand(2, 1, 21, 8)
    mask = torch.rand(18, 2, 1).permute(1, 2, 0).unsqueeze(-1).expand(2, 2, 18, 21) > 0.2

    def call() -> torch.Tensor:
        return fusedops.attention(q, k, v, mask, enable_gqa=True)

    assert_agree(call, leaves)
    total = torch.autograd.grad(call().sum(), leaves)  # an incoming gradient of stride 0
    with fusedops.use_backend("triton"):
        triton = torch.autograd.grad(call().sum(), leaves)
    for a, b in zip(triton, total, strict=True):
        assert_close(a, b.double(), b, "gradient of a sum", 100)


def test_decoding_merges_many_parts() -> None:
    q, lengths = torch.randn(3, 4, 2, 24), torch.tensor([300, 77, 1])
    keys, values = torch.randn(3, 2, 300, 24), torch.randn(3, 2, 300, 40)
    for options in ({}, OPTIONS | {"window": (45, 0), "alibi_slopes": torch.rand(3, 4)}):
        options = {name: option for name, option in options.items() if name != "dropout_p"}
        sinks = torch.randn(4)
        found = []
        for backend in ("triton", "torch"):
            with fusedops.use_backend(backend):
                found.append(
                    fusedops.attention_decode(
                        q, keys, values, lengths, sinks=sinks, **options | {"return_lse": True}
                    )
                )
        for got, want in zip(*found, strict=True):
            assert_close(got, want.double(), want, "decoded", 300)


@pytest.mark.parametrize("capacity", [20, 300])  # one part, and many
def test_a_length_past_the_cache_reads_nothing_and_gives_nan(capacity: int) -> None:
    """What a GPU does where nobody has looked: in compiled code, in a captured graph."""
    cache = torch.randn(1, 2, 4 * capacity, 16)[:, :, :capacity].expand(4, -1, -1, -1)
    q, lengths = torch.randn(4, 4, 1, 16), torch.tensor([capacity, capacity + 1, -1, 2**40])
    with fusedops.use_backend("triton"):
        found, _ = torch.ops.fusedops.attention_decode(
            q, cache, cache, lengths, None, None, 0.25, -1, 0.0
        )
    assert found[0].isfinite().all()
    assert found[1:].isnan().all()

"""The PTX machine executes Triton kernels that are not those of fusedops, and finds no errors."""

from __future__ import annotations

import re

import pytest
import torch
from comparing import assert_close
from ptx_machine import MachineError
from ptx_machine.gpu import executing
from torch.nn import functional as F

from fusedops._core import env

pytest.importorskip("triton")
if env.triton_interpreted():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the machine needs a process that sees no GPU", allow_module_level=True)

import triton_kernels as kernels
from triton.tools.tensor_descriptor import TensorDescriptor

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))]
pytestmark = [
    pytest.mark.ci,
    pytest.mark.parametrize("capability", [80, 90, 120]),
    pytest.mark.parametrize("seed", SEEDS),
]


def new(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def test_layer_norm(capability: int, seed: int) -> None:
    x, w, b = new(7, 300, dtype=torch.float32), new(300).float(), new(300).float()
    y = torch.empty_like(x)
    with executing(capability, seed) as gpu:
        kernels.layer_norm[(7,)](x, y, w, b, 300, 1e-5, BLOCK=128)
    assert gpu.kernels == ["layer_norm"]
    torch.testing.assert_close(y, F.layer_norm(x, (300,), w, b))


def sum_rows(capability: int, seed: int, *, wait: bool, dropped: str = "none") -> None:
    x, sums = new(9, 300, dtype=torch.float32), torch.full((2, 300), torch.nan)
    locks = torch.zeros(4, dtype=torch.int32)
    with executing(capability, seed) as gpu:
        gpu.change = lambda text: re.sub(dropped, "", text)
        kernels.sum_rows[(9,)](x, sums, locks, 300, GROUPS=2, BLOCK=512, WAIT=wait)
    torch.testing.assert_close(sums, torch.stack([x[::2].sum(0), x[1::2].sum(0)]))


def test_locks_order_blocks(capability: int, seed: int) -> None:
    sum_rows(capability, seed, wait=True)


def test_locks_without_order_are_found(capability: int, seed: int) -> None:
    with pytest.raises(MachineError, match="which another block"):
        sum_rows(capability, seed, wait=True, dropped=r"(\.gpu)?\.acq_rel(\.gpu)?")


def test_a_warp_that_reads_too_late_is_found(capability: int, seed: int) -> None:
    """As in a tutorial of Triton: one warp may set the mark before another one has read it."""
    with pytest.raises((MachineError, AssertionError), match=r"without a barrier|not close"):
        sum_rows(capability, seed, wait=False)


def test_matmul(capability: int, seed: int) -> None:
    a, b, c = new(200, 136), new(136, 168), torch.empty(200, 168, dtype=torch.float16)
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP": 2, "num_stages": 3}
    strides = a.stride(0), b.stride(0), c.stride(0)
    with executing(capability, seed):
        kernels.matmul[(12,)](a, b, c, 200, 168, 136, *strides, **blocks)
    torch.testing.assert_close(c, (a.float() @ b.float()).half())


def matmul_of_descriptors(capability: int, seed: int, dropped: str = "none") -> int:
    """Return how many instructions were dropped."""
    num_dropped = 0

    def change(text: str) -> str:
        nonlocal num_dropped
        changed, num_dropped = re.subn(dropped, "", text)
        return changed

    a, b, c = new(200, 136), new(168, 136), torch.empty(200, 168, dtype=torch.float16)
    sizes = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    maps = [
        TensorDescriptor.from_tensor(tensor, [64, size])
        for tensor, size in ((a, 32), (b, 32), (c, 64))
    ]
    with executing(capability, seed) as gpu:
        gpu.change = change
        kernels.matmul_of_descriptors[(4, 3)](*maps, 136, **sizes, num_stages=3)
    torch.testing.assert_close(c, (a.float() @ b.float().T).half())
    return num_dropped


def test_matmul_of_descriptors(capability: int, seed: int) -> None:
    matmul_of_descriptors(capability, seed)


@pytest.mark.parametrize(
    "dropped", [r"cp\.async\.bulk\.wait_group(\.read)?\s+0;", r"fence\.proxy\.async\.shared::cta;"]
)
def test_a_store_of_a_box_needs_its_order(capability: int, seed: int, dropped: str) -> None:
    if capability < 90:
        pytest.skip("no tensor maps")
    with pytest.raises(MachineError, match="before the wait for a box|without fence"):
        assert not matmul_of_descriptors(capability, seed, dropped)


def test_attention(capability: int, seed: int) -> None:
    q, k, v = (new(2, 150, 64).roll(shift, -1) for shift in range(3))
    out = torch.empty_like(q)
    with executing(capability, seed):
        kernels.attention[(3, 2)](q, k, v, out, 150, 0.125, SIZE=64, BLOCK=64)
    eager = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    assert_close(out, exact, eager, depth=150)

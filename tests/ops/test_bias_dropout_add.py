"""What is special about bias_dropout_add: Philox and its mask, the same everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedops
from fusedops._core import env, philox

CPU = torch.device("cpu")
TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
by_backend = pytest.mark.parametrize("backend", ["cpp", "torch", TRITON])

# Counter, key, and the words that are drawn in seven and in ten rounds.
KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000, 00000000 00000000
5f6fb709 0d893f64 4f121f81 4f730a48, 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff, ffffffff ffffffff
5207ddc2 45165e59 4d8ee751 8c52f662, 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344, a4093822 299f31d0
4dfccaba 190a87f0 c47362ba b6b5242a, d16cfe09 94fdcceb 5001e420 24126ea1
"""


@pytest.mark.parametrize("number", range(3))
def test_philox_gives_random123s_known_answers(number: int) -> None:
    asked, answers = (
        line.split(", ") for line in KNOWN_ANSWERS.split("\n")[1:-1][2 * number :][:2]
    )
    counter, key = (tuple(torch.tensor(int(w, 16)) for w in part.split()) for part in asked)
    for rounds, words in zip((7, 10), answers, strict=True):
        drawn = philox.philox4x32(counter, key, rounds)  # type: ignore[arg-type]
        assert " ".join(f"{int(word):08x}" for word in drawn) == words


def drop(shape: tuple[int, ...], p: float, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return fusedops.bias_dropout_add(torch.ones(shape), None, torch.zeros(shape), p)


def expected_mask(shape: tuple[int, ...], p: float, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return philox.keep_mask(shape, philox.new_seed(CPU), p)


def _of_norm(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, residual, p: op(x, residual, x.shape[-1:], dropout_p=p)


# Op -> it as a function of input, residual and probability, whose last result is their sum.
DROPPING: dict[str, Callable[..., Any]] = {
    "bias_dropout_add": lambda x, residual, p: (fusedops.bias_dropout_add(x, None, residual, p),),
    "add_layer_norm": _of_norm(fusedops.add_layer_norm),
    "add_rms_norm": _of_norm(fusedops.add_rms_norm),
}
SHAPES: list[tuple[int, ...]] = [(), (1,), (7, 33), (3, 128), (2, 5, 260), (4097,), (2, 9001)]


@by_backend
@pytest.mark.parametrize(
    ("name", "shape", "p"),
    [
        *(("bias_dropout_add", shape, p) for shape in SHAPES for p in (0.1, 0.5, 0.999)),
        *((f"add_{n}_norm", s, 0.3) for n in ("layer", "rms") for s in (*SHAPES[2:4], (2, 9001))),
    ],
)
def test_forward_and_backward_drop_by_the_mask_of_the_seed(
    name: str, shape: tuple[int, ...], p: float, backend: str
) -> None:
    x, residual = torch.ones(shape, requires_grad=True), torch.zeros(shape, requires_grad=True)
    with fusedops.use_backend(backend):
        torch.manual_seed(3)
        outputs = DROPPING[name](x, residual, p)
        grads = torch.autograd.grad(outputs, (x, residual), [torch.randn(shape) for _ in outputs])
    keep, scale = expected_mask(shape, p, 3), philox.scale(p)
    assert torch.equal(outputs[-1] != 0, keep)
    torch.testing.assert_close(outputs[-1], torch.where(keep, scale, 0.0))
    torch.testing.assert_close(grads[0], torch.where(keep, grads[1] * scale, 0.0))


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_the_mask_is_the_same_on_every_instruction_set(capability: str) -> None:
    built = json.loads((env.library_folder() / "libfusedops_cpu.json").read_text())["isas"].split()
    if capability.upper() not in built:
        pytest.skip(f"this build holds {' '.join(built)} only: make test-isas builds all")
    program = (
        "import torch; from test_bias_dropout_add import *\n"
        "for shape in ((7, 33), (3, 128), (4097,)):\n"
        "    for p in (0.1, 0.5):\n"
        "        assert torch.equal(drop(shape, p, 4) != 0, expected_mask(shape, p, 4)), shape\n"
        "print(fusedops.counters())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=os.path.dirname(__file__),
        env={
            **os.environ,
            "ATEN_CPU_CAPABILITY": capability,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "('bias_dropout_add', 'cpp'): 6" in done.stdout


def test_the_bias_and_the_rows_do_not_move_the_mask() -> None:
    shape = (6, 50)
    torch.manual_seed(9)
    output = fusedops.bias_dropout_add(torch.zeros(shape), torch.ones(50), torch.zeros(shape), 0.5)
    assert torch.equal(output != 0, expected_mask(shape, 0.5, 9))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_kept_elements_have_their_rate_and_are_independent(p: float) -> None:
    count = 1 << 20
    first, second = ((drop((count,), p, seed) != 0).double() - (1 - p) for seed in (1, 2))
    variance = p * (1 - p)
    assert abs(first.mean().item()) < 5 * (variance / count) ** 0.5
    for a, b in ((first[1:], first[:-1]), (first[4:], first[:-4]), (first, second)):
        assert abs((a * b).mean().item() / variance) < 5 * count**-0.5


def test_torchs_seed_decides_and_calls_differ() -> None:
    x, zero = torch.ones(4096), torch.zeros(4096)
    torch.manual_seed(0)
    calls = [fusedops.bias_dropout_add(x, None, zero, 0.5) for _ in range(2)]
    assert not torch.equal(*calls)
    torch.manual_seed(0)
    assert torch.equal(fusedops.bias_dropout_add(x, None, zero, 0.5), calls[0])


def test_without_dropout_no_random_number_is_drawn() -> None:
    x = torch.randn(4, 8)
    before = torch.get_rng_state()
    fusedops.bias_dropout_add(x, None, x, 0.0)
    fusedops.bias_dropout_add(x, None, x, 0.5, training=False)
    assert torch.equal(torch.get_rng_state(), before)


@by_backend
def test_p_1_drops_all_even_what_is_not_finite(backend: str) -> None:
    residual = torch.randn(3, 8)
    x = torch.full((3, 8), float("inf"), requires_grad=True)
    with fusedops.use_backend(backend):
        output = fusedops.bias_dropout_add(x, torch.ones(8), residual, 1.0)
        (grad,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(output, residual)
    assert torch.equal(grad, torch.zeros_like(grad))

"""Checkpoints of GPTQ, AWQ and bitsandbytes: the weights are what they stand for, to the bit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_close
from torch import nn

import fusedops
from fusedops import UnsupportedError
from fusedops.nn import QuantizedLinear
from fusedops.ops._quantized_weights import NF4

safetensors = pytest.importorskip("safetensors.torch")

OUT, IN, GROUP = 24, 96, 32
Tensors = dict[str, torch.Tensor]
# A layer's tensors and its weight in float64.
Packed = tuple[Tensors, torch.Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, IN)
        self.block = nn.ModuleDict({"up": nn.Linear(IN, OUT), "norm": nn.LayerNorm(OUT)})
        self.head = nn.Linear(IN, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.block["norm"](self.block["up"](x))
        return output


def word(numbers: list[int], bits: int) -> int:
    """Return a signed word of 32 bits with these numbers, the lowest first."""
    value = sum(number << bits * place for place, number in enumerate(numbers))
    return value - (1 << 32) if value >= 1 << 31 else value


def integers(bits: int, zero: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes ``[OUT, IN]``, zero points and scales ``[OUT, groups]``."""
    generator = torch.Generator().manual_seed(bits)
    groups = IN // GROUP
    codes = torch.randint(1 << bits, (OUT, IN), generator=generator)
    zeros = torch.randint(1, 1 << bits, (OUT, groups), generator=generator)
    zeros = zeros if zero is None else torch.full_like(zeros, zero)
    return codes, zeros, torch.rand(OUT, groups, generator=generator).half() + 0.01


def weight_of(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    group = codes.shape[1] // scales.shape[1]
    wide = [tensor.double().repeat_interleave(group, 1) for tensor in (zeros, scales)]
    return (codes.double() - wide[0]) * wide[1]


def gptq(bits: int = 4, zero: int | None = 8, offset: int = 1) -> Packed:
    codes, zeros, scales = integers(bits, zero)
    count = 32 // bits
    qweight = torch.empty(IN // count, OUT, dtype=torch.int32)
    for row, output in itertools.product(range(IN // count), range(OUT)):
        numbers = [int(codes[output, row * count + place]) for place in range(count)]
        qweight[row, output] = word(numbers, bits)
    qzeros = torch.empty(IN // GROUP, OUT // count, dtype=torch.int32)
    for group, column in itertools.product(range(IN // GROUP), range(OUT // count)):
        numbers = [int(zeros[column * count + place, group]) - offset for place in range(count)]
        qzeros[group, column] = word(numbers, bits)
    g_idx = torch.arange(IN, dtype=torch.int32) // GROUP
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales.T, "g_idx": g_idx}
    return tensors, weight_of(codes, zeros, scales)


def awq(zero: int | None = None) -> Packed:
    codes, zeros, scales = integers(4, zero)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    words = []
    for numbers_NK in (codes, zeros):
        rows = torch.empty(numbers_NK.shape[1], OUT // 8, dtype=torch.int32)
        for row, column in itertools.product(range(rows.shape[0]), range(OUT // 8)):
            rows[row, column] = word(
                [int(numbers_NK[column * 8 + place, row]) for place in order], 4
            )
        words.append(rows)
    tensors = {"qweight": words[0], "qzeros": words[1], "scales": scales.T}
    return tensors, weight_of(codes, zeros, scales)


def bitsandbytes_nf4(nested: bool) -> Packed:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(16, (OUT, IN), generator=generator, dtype=torch.uint8)
    pairs = codes.view(-1, 2)
    largest = torch.rand(OUT * IN // GROUP, generator=generator)
    state: dict[str, Any] = {"shape": [OUT, IN], "blocksize": GROUP, "quant_type": "nf4"}
    tensors = {"weight": (pairs[:, :1] << 4 | pairs[:, 1:]), "weight.quant_map": torch.tensor(NF4)}
    if nested:
        numbers = torch.linspace(-1, 1, 256)
        tensors["weight.absmax"] = torch.randint(256, largest.shape, dtype=torch.uint8)
        tensors["weight.nested_quant_map"] = numbers
        tensors["weight.nested_absmax"] = torch.rand(-(-len(largest) // 16))
        state |= {"nested_blocksize": 16, "nested_offset": 1.5}
        blocks = tensors["weight.nested_absmax"].repeat_interleave(16)[: len(largest)]
        largest = numbers[tensors["weight.absmax"].int()] * blocks + 1.5
    else:
        tensors["weight.absmax"] = largest
    text = json.dumps(state).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    scales = largest.view(OUT, -1).double().repeat_interleave(GROUP, 1)
    return tensors, torch.tensor(NF4)[codes.int()].double() * scales


def bitsandbytes_int8() -> Packed:
    codes = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8)
    largest = torch.rand(OUT)
    return {"weight": codes, "SCB": largest}, codes.double() * (largest / 127.0).double()[:, None]


def write(
    folder: Path, settings: dict[str, Any] | None, layer: Tensors, change: Tensors | None = None
) -> Model:
    """Write a checkpoint; return a model with the values of what it does not quantise."""
    torch.manual_seed(1)
    source = Model()
    others = {
        name: tensor.clone()
        for name, tensor in source.state_dict().items()
        if name not in ("block.up.weight", "head.weight")
    }
    tensors = others | {f"block.up.{name}": tensor.contiguous() for name, tensor in layer.items()}
    tensors |= change or {}
    safetensors.save_file(tensors, folder / "model.safetensors")
    values = {} if settings is None else {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(values))
    return source


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": GROUP}
BNB: dict[str, Any] = {"quant_method": "bitsandbytes"}
CASES: dict[str, tuple[dict[str, Any], Callable[[], Packed], str]] = {
    "gptq": (GPTQ, gptq, "int4"),
    "gptq, zero points": (GPTQ, lambda: gptq(zero=None), "int8"),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda: gptq(offset=0), "int4"),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, lambda: gptq(8, 128), "int8"),
    "awq": (AWQ, awq, "int8"),
    "awq, symmetric": (AWQ, lambda: awq(8), "int4"),
    "bitsandbytes nf4": (BNB, lambda: bitsandbytes_nf4(False), "nf4"),
    "bitsandbytes nf4, nested": (BNB, lambda: bitsandbytes_nf4(True), "nf4"),
    "bitsandbytes int8": (BNB, bitsandbytes_int8, "int8"),
}


@pytest.mark.parametrize(("settings", "pack", "format"), CASES.values(), ids=CASES)
def test_weights_are_those_of_the_checkpoint(
    settings: dict[str, Any], pack: Callable[[], Packed], format: str, tmp_path: Path
) -> None:
    tensors, expected = pack()
    source = write(tmp_path, settings, tensors)
    model = Model()
    assert fusedops.load_quantized(model, tmp_path) == ["block.up"]
    layer = model.block["up"]
    assert isinstance(layer, QuantizedLinear)
    assert layer.format == format
    # Codes and scales are numbers of float32: their product is exact in float64.
    assert torch.equal(layer.dequantize(torch.float64), expected)
    for name, value in model.state_dict().items():
        if "block.up" not in name or name.endswith("bias"):
            assert torch.equal(value, source.state_dict()[name]), name
    assert model.head.weight is model.embedding.weight

    with torch.no_grad():
        source.block["up"].weight.copy_(expected)
    x = torch.randn(3, IN)
    base = source(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, base_rounded = model.block["up"](x), source.block["up"](x)
    source.double().block["up"].weight.data.copy_(expected)
    truth = source.block["up"](x.double())
    assert_close(model(x), source.block["norm"](truth), base, depth=IN)
    assert_close(rounded, truth, base_rounded, depth=IN)
    again = Model()
    again.block["up"] = QuantizedLinear(IN, OUT, format=format, group=layer.group)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    ("settings", "change", "error", "words"),
    [
        (None, {}, ValueError, "quantization_config"),
        ({"quant_method": "hqq"}, {}, UnsupportedError, "quant_method must be of"),
        (GPTQ | {"bits": 3}, {}, UnsupportedError, "bits must be 4 or 8, got 3"),
        (AWQ | {"version": "gemv"}, {}, UnsupportedError, "version gemm"),
        (
            GPTQ,
            {"block.up.g_idx": torch.zeros(IN, dtype=torch.int32)},
            UnsupportedError,
            "block.up has groups in another order",
        ),
        (GPTQ, {"other": torch.zeros(1)}, ValueError, "no place for other"),
        (GPTQ, {"block.norm.bias": torch.zeros(2)}, ValueError, r"block.norm.bias .*\[24\]"),
        (
            GPTQ,
            {"block.up.qweight": torch.zeros(IN // 8, 32, dtype=torch.int32)},
            ValueError,
            "block.up",
        ),
    ],
)
def test_other_checkpoints_are_refused(
    settings: dict[str, Any] | None,
    change: Tensors,
    error: type[Exception],
    words: str,
    tmp_path: Path,
) -> None:
    write(tmp_path, settings, gptq()[0], change)
    with pytest.raises(error, match=words):
        fusedops.load_quantized(Model(), tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write(tmp_path, GPTQ, gptq()[0])
    model = Model()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="the checkpoint has no extra.bias, extra.weight"):
        fusedops.load_quantized(model, tmp_path)

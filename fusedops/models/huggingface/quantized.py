"""``load_quantized``: checkpoints of GPTQ, AWQ and bitsandbytes, without their packages.

Codes and scales are taken over, nothing is rounded again: a layer's weight is to the bit what the
checkpoint stands for. Formats, each with 4-bit numbers in words of 32 bits, the lowest first:

* GPTQ: ``qweight`` ``[in / 8, out]``, ``qzeros`` ``[groups, out / 8]`` (minus 1, except in
  ``gptq_v2``), ``scales`` ``[groups, out]``, ``g_idx`` ``[in]``: the group of each input.
* AWQ (``gemm``): ``qweight`` ``[in, out / 8]`` and ``qzeros`` ``[groups, out / 8]``, whose words
  have the outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight, and ``scales`` ``[groups, out]``.
* bitsandbytes: ``nf4`` in ``weight`` with ``absmax`` for each block of the flattened weight, which
  may be quantised once more (``nested``); or ``int8`` with ``SCB``, the largest number of a row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops._core import checks
from fusedops._core.checks import UnsupportedError
from fusedops.models.huggingface.weights import open_folder
from fusedops.nn import QuantizedLinear
from fusedops.ops import _quantized_weights as packed

_OP = "load_quantized"
_METHODS = ("gptq", "awq", "bitsandbytes")
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
Read = Callable[[str], torch.Tensor]


class _Weight(NamedTuple):
    """A weight as integers times scales."""

    codes: torch.Tensor  # ``[out, in]``: signed integers, or codes of nf4 (uint8)
    scales: torch.Tensor  # ``[out, groups]``
    group: int  # inputs that share a scale; 0: all
    format: str = ""  # "nf4"; "": integers


def load_quantized(model: nn.Module, folder: str | os.PathLike[str]) -> list[str]:
    """Fill a model with a quantised checkpoint of GPTQ, AWQ or bitsandbytes.

    Linear layers whose weights are quantised in the checkpoint become
    ``fusedops.nn.QuantizedLinear``. All other parameters and buffers get the checkpoint's values,
    in the model's dtype.

    Args:
        model: a model of transformers without quantisation, on the CPU: made by ``from_config``
            after ``del config.quantization_config``.
        folder: with ``config.json`` and safetensors; nothing is downloaded.

    Returns:
        The names of the quantised layers.

    Raises:
        ValueError: the folder has no such checkpoint; or a tensor is missing, has another shape or
            no place in the model. The model may then be partly filled.
        UnsupportedError: the method, the number of bits, groups in the order of activations
            (``desc_act``), or zero points of 8-bit codes are not served; or safetensors is
            missing.
        TypeError: an argument has another type.

    Note:
        4-bit codes with a zero point other than 8 are stored in 8 bits: their difference has 5.
        Scales that bfloat16 cannot represent stay float32.

    Example:
        ``config = AutoConfig.from_pretrained(folder); del config.quantization_config``, then
        ``model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)`` and
        ``fusedops.load_quantized(model, folder)``.
    """
    checks.module(_OP, model)
    if not isinstance(folder, (str, os.PathLike)):
        checks.fail_type(_OP, "folder", "a folder", folder)
    path = Path(folder)
    settings = _settings(path)
    with ExitStack() as stack, torch.no_grad():
        names, read = open_folder(path, stack)
        layers = {}
        for name in _layers(settings["quant_method"], names):
            weight = _READERS[settings["quant_method"]](name, read, settings, set(names))
            layers[name] = _replace(model, name, weight)
        if not layers:
            checks.fail(_OP, "folder", "one with quantised weights", repr(str(folder)))
        _fill_others(model, names, read, layers)
    return list(layers)


def _settings(folder: Path) -> dict[str, Any]:
    """Return ``quantization_config`` of a folder."""
    try:
        values = json.loads((folder / "config.json").read_bytes()).get("quantization_config")
    except (OSError, ValueError) as error:
        raise ValueError(f"{_OP}: {folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(values, dict):
        checks.fail(_OP, "folder", "one whose config.json has quantization_config", "none")
    if values.get("quant_method") not in _METHODS:
        method = values.get("quant_method")
        raise UnsupportedError(f"{_OP}: quant_method must be of {_METHODS}, got {method!r}")
    settings: dict[str, Any] = values
    return settings


def _layers(method: str, names: list[str]) -> list[str]:
    """Return the names of the quantised layers."""
    if method != "bitsandbytes":
        return [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]
    ends = (".weight.absmax", ".SCB")
    return [name.removesuffix(end) for end in ends for name in names if name.endswith(end)]


def _words(packed_words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned numbers of words of 32 bits, the lowest first, ``[..., 32 / bits]``."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return packed_words.to(torch.int32)[..., None] >> shifts & (1 << bits) - 1


def _bits(settings: dict[str, Any]) -> tuple[int, int]:
    """Return the bits of a code, and the inputs of a group."""
    bits, group = settings.get("bits", settings.get("w_bit")), settings.get("group_size", -1)
    if bits not in (4, 8):
        raise UnsupportedError(f"{_OP}: bits must be 4 or 8, got {bits}")
    return bits, max(group, 0)


def _gptq(name: str, read: Read, settings: dict[str, Any], names: set[str]) -> _Weight:
    bits, group = _bits(settings)
    codes = _words(read(f"{name}.qweight"), bits).permute(1, 0, 2).flatten(1)  # [out, in]
    zeros = _words(read(f"{name}.qzeros"), bits).flatten(1).T  # [out, groups]
    if settings.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = zeros + 1
    scales = read(f"{name}.scales").T
    if f"{name}.g_idx" in names:
        inputs = torch.arange(codes.shape[1])
        expected = inputs // group if group else torch.zeros_like(inputs)
        if not torch.equal(read(f"{name}.g_idx").long(), expected):
            raise UnsupportedError(f"{_OP}: {name} has groups in another order (desc_act)")
    return _Weight(codes - _of_groups(name, zeros, codes, group), scales, group)


def _awq(name: str, read: Read, settings: dict[str, Any], names: set[str]) -> _Weight:
    bits, group = _bits(settings)
    version = str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise UnsupportedError(f"{_OP}: AWQ must have 4 bits and version gemm, got {settings}")
    places = torch.tensor(_AWQ_OUTPUTS).argsort()
    codes = _words(read(f"{name}.qweight"), 4)[..., places].flatten(1).T  # [out, in]
    zeros = _words(read(f"{name}.qzeros"), 4)[..., places].flatten(1).T
    return _Weight(codes - _of_groups(name, zeros, codes, group), read(f"{name}.scales").T, group)


def _of_groups(name: str, zeros: torch.Tensor, codes: torch.Tensor, group: int) -> torch.Tensor:
    """Return the zero point of each code, ``[out, in]``."""
    outputs, features = codes.shape
    expected = outputs, packed.num_groups(features, group)
    if zeros.shape != expected:
        checks.fail(_OP, f"{name}.qzeros", f"for {list(expected)} groups", list(zeros.shape))
    return zeros.repeat_interleave(group or features, 1)[:, :features]


def _bitsandbytes(name: str, read: Read, settings: dict[str, Any], names: set[str]) -> _Weight:
    if f"{name}.SCB" in names:
        return _Weight(read(f"{name}.weight").int(), read(f"{name}.SCB")[:, None] / 127.0, 0)
    state = f"{name}.weight.quant_state.bitsandbytes__nf4"
    if state not in names:
        raise UnsupportedError(f"{_OP}: {name} must be nf4, got another 4-bit type")
    values = json.loads(bytes(read(state).tolist()))
    (outputs, features), block = values["shape"], values["blocksize"]
    if features % block:
        raise UnsupportedError(
            f"{_OP}: the inputs of {name} must be a multiple of the block, {block}, got {features}"
        )
    table = read(f"{name}.weight.quant_map").float()
    if not torch.allclose(table, torch.tensor(packed.NF4), atol=1e-6):
        raise UnsupportedError(f"{_OP}: {name} has another table than nf4")
    largest = read(f"{name}.weight.absmax")
    if f"{name}.weight.nested_absmax" in names:
        factors = read(f"{name}.weight.nested_absmax").float()
        factors = factors.repeat_interleave(values["nested_blocksize"])[: largest.numel()]
        numbers = read(f"{name}.weight.nested_quant_map").float()[largest.int()]
        largest = numbers * factors + values["nested_offset"]
    bytes_ = read(f"{name}.weight").flatten()
    codes = torch.stack((bytes_ >> 4, bytes_ & 15), -1).view(outputs, features)
    return _Weight(codes, largest.float().view(outputs, -1), block, "nf4")


_READERS = {"gptq": _gptq, "awq": _awq, "bitsandbytes": _bitsandbytes}


def _replace(model: nn.Module, name: str, weight: _Weight) -> QuantizedLinear:
    """Put a quantised layer in the place of a linear layer."""
    parent_name, _, key = name.rpartition(".")
    try:
        parent: Any = model.get_submodule(parent_name)
        linear = parent.get_submodule(key)
    except AttributeError:
        raise ValueError(f"{_OP}: model has no layer {name}, which the checkpoint has") from None
    shape = tuple(weight.codes.shape)
    if type(linear) is not nn.Linear:
        checks.fail_type(_OP, name, "a torch.nn.Linear", linear)
    if linear.weight.shape != shape:
        checks.fail(_OP, name, f"of shape {list(linear.weight.shape)}", list(shape))
    if weight.group % 8:
        raise UnsupportedError(f"{_OP}: a group must be a multiple of 8, got {weight.group}")
    low, high = int(weight.codes.min()), int(weight.codes.max())
    if low < -128 or high > 127:
        raise UnsupportedError(f"{_OP}: {name} has zero points that need 9 bits")
    if weight.format:
        form, codes = weight.format, weight.codes
    elif low >= -8 and high <= 7:
        form, codes = "int4", (weight.codes + 8).to(torch.uint8)
    else:
        form, codes = "int8", weight.codes.to(torch.int8).view(torch.uint8)
    layer = QuantizedLinear(shape[1], shape[0], False, format=form, group=weight.group)
    layer.qweight = packed.pack(codes, form)
    rounded = weight.scales.bfloat16()
    exact = torch.equal(rounded.float(), weight.scales.float())
    layer.scales = packed.pack_scales(rounded if exact else weight.scales.float())
    layer.bias = linear.bias
    parent._modules[key] = layer.train(linear.training)
    return layer


def _fill_others(model: nn.Module, names: list[str], read: Read, layers: Collection[str]) -> None:
    """Load what is not quantised, and check that nothing is missing."""
    targets = model.state_dict(keep_vars=True)
    loaded = set()
    for name in names:
        layer = next((prefix for prefix in _prefixes(name) if prefix in layers), None)
        if layer is not None and name != f"{layer}.bias":
            continue
        if name not in targets:
            raise ValueError(f"{_OP}: model has no place for {name}, which the checkpoint has")
        value, target = read(name), targets[name]
        if value.shape != target.shape:
            checks.fail(_OP, name, f"of shape {list(target.shape)}", list(value.shape))
        target.copy_(value)
        loaded.add(id(target))  # of tied parameters a checkpoint has one
    own = {f"{name}.{part}" for name in layers for part in ("qweight", "scales")}
    missing = [key for key in targets if key not in own and id(targets[key]) not in loaded]
    if missing:
        raise ValueError(f"{_OP}: the checkpoint has no {', '.join(sorted(missing))}")


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules that a tensor may belong to."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]

"""``quantize``: replace the linear layers of a model by those with a packed frozen weight."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from fusedops._core import checks
from fusedops.nn.linear_act import LinearAct
from fusedops.nn.mlp import MLP
from fusedops.nn.quantized_experts import QuantizedExperts, first_of
from fusedops.nn.quantized_experts import obstacle as experts_obstacle
from fusedops.nn.quantized_linear import QuantizedLinear, QuantizedMLP, check_group
from fusedops.ops._quantized_weights import FORMATS

# Names of output heads and routers: their errors reach the probabilities directly.
SKIPPED = ("*lm_head", "*embed_out", "*.gate", "*router*", "*shared_expert_gate")
# Modules that compute with the weights of their children without calling them.
_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class QuantizedReport:
    """What happened to one weight.

    Attributes:
        name: qualified name of the layer, or of the parameter that was kept.
        shape: of the weight.
        bytes_before: of the weight.
        bytes_after: of codes and scales; ``bytes_before`` if it was kept.
        error: Frobenius norm of the weight's error divided by that of the weight; 0 if kept.
        format: of the codes; ``""`` if kept.
        reason: why it was kept; ``""`` if it was quantised.
    """

    name: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    error: float = 0.0
    format: str = ""
    reason: str = ""


@dataclass(frozen=True)
class QuantizationReport:
    """The result of ``fusedops.quantize``; ``print`` shows it as a table.

    Attributes:
        model: name of the model's class.
        weights: one entry for each weight of two dimensions or more, in the model's order.

    Example:
        >>> import torch, fusedops
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Embedding(8, 256))
        >>> report = fusedops.quantize(model, weights="int8")
        >>> len(report.quantized), [entry.name for entry in report.kept]
        (1, ['1.weight'])
    """

    model: str
    weights: tuple[QuantizedReport, ...]

    @property
    def quantized(self) -> tuple[QuantizedReport, ...]:
        """The weights that were quantised."""
        return tuple(entry for entry in self.weights if entry.format)

    @property
    def kept(self) -> tuple[QuantizedReport, ...]:
        """The weights that stay, each with its reason."""
        return tuple(entry for entry in self.weights if not entry.format)

    @property
    def bytes_before(self) -> int:
        """Bytes of all weights before."""
        return sum(entry.bytes_before for entry in self.weights)

    @property
    def bytes_after(self) -> int:
        """Bytes of all weights after."""
        return sum(entry.bytes_after for entry in self.weights)

    @property
    def worst(self) -> QuantizedReport | None:
        """The weight of the largest relative error."""
        return max(self.quantized, key=lambda entry: entry.error, default=None)

    def __repr__(self) -> str:
        return (
            f"QuantizationReport({self.model}, {len(self.quantized)} of {len(self.weights)} "
            f"weights quantised)"
        )

    def __str__(self) -> str:
        mib = 2**20
        lines = [
            f"{self.model}: {len(self.quantized)} of {len(self.weights)} weights quantised, "
            f"{self.bytes_before / mib:,.1f} MiB before, {self.bytes_after / mib:,.1f} MiB after"
        ]
        groups: dict[tuple[str, ...], list[QuantizedReport]] = {}
        for entry in self.weights:
            general = re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.name)
            key = (general, entry.format or "-", "x".join(map(str, entry.shape)), entry.reason)
            groups.setdefault(key, []).append(entry)
        rows = [("weight", "format", "shape", "MiB", "error", "note")]
        for (general, format, shape, reason), entries in groups.items():
            name = entries[0].name if len(entries) == 1 else f"{general} (x{len(entries)})"
            size = sum(entry.bytes_after for entry in entries) / mib
            worst = max(entry.error for entry in entries)
            error = f"{worst:.2%}" if format != "-" else "-"
            rows.append((name, format, shape, f"{size:,.1f}", error, reason))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        table = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
        lines += [table[0], "-" * max(map(len, table)), *table[1:]]
        if self.worst is not None:
            lines.append(f"largest relative error: {self.worst.error:.2%} of {self.worst.name}")
        return "\n".join(lines)


def quantize(
    model: nn.Module,
    weights: str = "int4",
    *,
    group: int = 128,
    skip: Iterable[str] | None = None,
    head: str | None = None,
) -> QuantizationReport:
    """Replace a model's linear layers by ``QuantizedLinear``, in place, and return a report.

    The weights become frozen buffers of 4 or 8 bits; biases stay parameters. Adapters (LoRA) on
    top are trained with exact gradients for the quantised weights. Load weights before, add
    adapters, patch and compile after.

    Args:
        model: any module. ``torch.nn.Linear`` is replaced, and the layers of ``fusedops.nn``.
        weights: ``"int8"``, ``"int4"`` or ``"nf4"``.
        group: number of inputs that share a scale, a multiple of 8; 0: all inputs of an output.
        skip: patterns of the names of layers that stay (``fnmatch``), by default output heads and
            routers; ``()``: none stays.
        head: format of the output head of a ``fusedops.models.Transformer``; ``None``: it stays.

    Returns:
        A report with an entry for each weight; weights that stay have a reason.

    Raises:
        TypeError: ``model`` is no module, or ``skip`` is a string.
        ValueError: ``weights``, ``group`` or ``head`` is wrong, the model is patched, no layer was
            quantised, or a weight is not finite; layers before it are then already replaced.

    Note:
        Weights that stay: embeddings, tied and sharded weights, and layers whose weight their
        parent reads (``torch.nn.MultiheadAttention`` and torch's transformer layers). Experts of
        three dimensions are quantised in ``fusedops.nn.MoE``, and in models of transformers whose
        experts are called by its registry.

    Example:
        >>> import torch, fusedops
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 64))
        >>> fusedops.quantize(model, weights="nf4", group=64)
        QuantizationReport(Sequential, 1 of 1 weights quantised)
    """
    op = "quantize"
    if not isinstance(model, nn.Module):
        checks.fail_type(op, "model", "a torch.nn.Module", model)
    checks.choice(op, "weights", weights, FORMATS)
    check_group(op, group)
    if head is not None:
        checks.choice(op, "head", head, FORMATS)
    if isinstance(skip, str):
        checks.fail_type(op, "skip", "a list of patterns", skip)
    if any(hasattr(type(module), "fused_rule") for module in model.modules()):
        expected = "a model that is not patched: quantise before patch, or call unpatch first"
        checks.fail(op, "model", expected, "a patched one")
    entries: dict[str, QuantizedReport] = {}
    reasons: dict[int, str] = {}
    patterns = SKIPPED if skip is None else tuple(skip)
    protected = None if skip is not None else _output_head(model)
    made: dict[int, nn.Module] = {}
    for name, parent, key, module in list(_layers(model)):
        if id(module) in made:  # it has another place
            parent._modules[key] = made[id(module)]
            continue
        reason = _obstacle(model, name, parent, module, patterns, protected)
        if reason is not None:
            reasons |= {id(parameter): reason for parameter in module.parameters()}
            continue
        if _are_experts(module):
            matrices = {name: getattr(module, name) for name in (first_of(module), "down_proj")}
            experts = QuantizedExperts(module, format=weights, group=group)
            parts = (experts.first, experts.down)
            for (part, weight), quantized in zip(matrices.items(), parts, strict=True):
                matrix = weight.transpose(1, 2) if experts.transposed else weight
                entries[f"{name}.{part}"] = _entry(f"{name}.{part}", matrix, quantized)
            parent._modules[key] = made[id(module)] = experts
        elif isinstance(module, MLP):
            mlp = QuantizedMLP.of(module, format=weights, group=group)
            entries[f"{name}.up"] = _entry(f"{name}.up", module.w1, mlp.up)
            entries[f"{name}.down"] = _entry(f"{name}.down", module.w2, mlp.down)
            parent._modules[key] = made[id(module)] = mlp
        else:
            layer = QuantizedLinear.of(module, format=weights, group=group)
            entries[name] = _entry(name, module.weight, layer)
            parent._modules[key] = made[id(module)] = layer
    if head is not None:
        entries |= _quantize_head(model, head, group)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            reason = reasons.get(id(parameter)) or _kept(model, name, parameter)
            shape = tuple(parameter.shape)
            entries[name] = QuantizedReport(
                name, shape, parameter.nbytes, parameter.nbytes, reason=reason
            )
    report = QuantizationReport(type(model).__name__, tuple(entries.values()))
    if not report.quantized:
        raise ValueError(f"{op}: no layer of {type(model).__name__} can be quantised:\n{report}")
    return report


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield name, parent, key and module of what may be quantised, each place of a module once."""
    for prefix, parent in model.named_modules(remove_duplicate=True):
        for key, module in parent._modules.items():
            if isinstance(module, nn.Linear | LinearAct | MLP) or _are_experts(module):
                yield f"{prefix}.{key}" if prefix else key, parent, key, module


def _are_experts(module: Any) -> bool:
    """Return whether a module has the weights of several experts."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Parameter) and down.dim() == 3


def _output_head(model: Any) -> nn.Module | None:
    """Return the output head of a model of transformers."""
    getter = getattr(model, "get_output_embeddings", None)
    return None if getter is None else getter()


def _obstacle(
    model: nn.Module,
    name: str,
    parent: nn.Module,
    module: Any,
    patterns: tuple[str, ...],
    protected: nn.Module | None,
) -> str | None:
    """Return why a layer stays, or ``None``."""
    if module is protected:
        return "output head"
    for pattern in patterns:
        if fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern):
            return f"skip: {pattern}"
    if isinstance(module, QuantizedLinear):
        return "already quantised"
    if isinstance(parent, _READERS):
        return f"{type(parent).__name__} reads its weight"
    reason = experts_obstacle(module) if _are_experts(module) else None
    if reason is not None:
        return reason
    if not _are_experts(module) and type(module) not in (nn.Linear, LinearAct, MLP):
        return f"a {type(module).__name__} may compute anything: quantise before it is made"
    is_gate = hasattr(parent, "down_proj") and getattr(parent, "gate_proj", None) is module
    if isinstance(module, LinearAct) and module.activation != "identity" and not is_gate:
        return "its product has an activation"
    parameters = list(module.parameters(recurse=False))
    if any(hasattr(parameter, "device_mesh") for parameter in parameters):
        return "sharded"
    mine = {id(parameter) for parameter in parameters if parameter.dim() > 1}
    for other_name, other in model.named_modules():
        if other is not module and mine & {id(value) for value in other._parameters.values()}:
            return f"tied to {other_name}"
    return None


def _entry(name: str, weight: torch.Tensor, layer: Any) -> QuantizedReport:
    """Return the entry of a weight, with its measured error."""
    wide = weight.detach().float()
    error = (layer.dequantize() - wide).norm() / wide.norm().clamp_min(1e-30)
    after = layer.qweight.nbytes + layer.scales.nbytes
    return QuantizedReport(
        name, tuple(weight.shape), weight.nbytes, after, float(error), layer.format
    )


def _quantize_head(model: Any, format: str, group: int) -> dict[str, QuantizedReport]:
    make = getattr(model, "quantize_head", None)
    if make is None:
        expected = "None: only a fusedops.models.Transformer has a head with a format of its own"
        checks.fail("quantize", "head", expected, format)
    weight, layer = make(format, group)
    entry = _entry("head", weight, layer)
    if any(weight is parameter for parameter in model.parameters()):  # a tied embedding stays
        entry = replace(entry, bytes_before=0)
    return {"head": entry}


def _kept(model: nn.Module, name: str, parameter: torch.Tensor) -> str:
    """Return why a parameter that belongs to no linear layer stays."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.Embedding):
        return "embedding"
    if parameter.dim() == 3:
        return f"experts of a {type(owner).__name__}"
    return f"a {type(owner).__name__} is no linear layer"

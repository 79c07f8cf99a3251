"""Models with fused ops as ONNX files of standard operators alone.

The fused operators are taken apart (``decompositions``) and torch translates what they become: at
opset 23 ``LayerNormalization``, ``RMSNormalization``, ``Gelu`` and ``Attention`` stand where ONNX
has them. Needs the packages onnx and onnxscript, as ``torch.onnx.export`` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusedops.integrations.decompositions import decompositions

# The first with Attention and RMSNormalization.
OPSET = 23


def export(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] = (),
    f: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    opset_version: int = OPSET,
    **options: Any,
) -> Any:
    """Export a model for inference, fused ops included, and save it.

    Args:
        model: a module in evaluation mode, or what ``torch.export.export`` made of one.
        args: example arguments; sizes that are dynamic must be at least 2.
        f: the file to write, if any.
        kwargs: example arguments by name.
        dynamic_shapes: as ``torch.export.export`` takes them: ``({0: Dim("batch")}, ...)``.
        opset_version: before 23 attention and RMS norms are several operators each.
        **options: of ``torch.onnx.export``.

    Returns:
        The ``torch.onnx.ONNXProgram``.

    Raises:
        torch.onnx.OnnxExporterError: what is not of fusedops has no translation.

    Note:
        The graph holds the loop over the experts unrolled: its size grows with layers times
        experts. Rows that may attend nothing are 0.
    """
    program = model
    if not isinstance(program, torch.export.ExportedProgram):
        with torch.no_grad():
            program = torch.export.export(
                program, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
            )
    return torch.onnx.export(
        program.run_decompositions(decompositions()),
        f=f,
        dynamo=True,
        opset_version=opset_version,
        custom_translation_table=translations() | options.pop("custom_translation_table", {}),
        **options,
    )


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return what torch's own translation lacks, for ``custom_translation_table``.

    Routers sort with ties in the order of the experts, as ONNX's ``TopK`` does.
    """
    return {torch.ops.aten.sort.stable: _stable_sort}


def _stable_sort(self: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    from onnxscript import opset18 as op

    size = op.Shape(self, start=dim, end=None if dim == -1 else dim + 1)
    return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)

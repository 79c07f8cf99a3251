"""DeepSpeed: patched models under ZeRO, also where ZeRO-3 gathers parameters by hooks.

    patch(model)                                               # before
    engine, *_ = deepspeed.initialize(model=model, config=...)

Importing this module imports DeepSpeed.
"""

from __future__ import annotations

from typing import Any

from fusedops._core import imports
from fusedops.integrations.hf import patch as hf
from fusedops.integrations.hf.report import PatchReport

_BY = "fusedops.integrations.deepspeed"
_deepspeed = imports.needed("deepspeed", "deepspeed", _BY)
_utils = imports.needed("deepspeed.utils", "deepspeed", _BY)


def patch(model: Any, *, level: str = "O2", strict: bool = False) -> PatchReport:
    """Patch a model for DeepSpeed, as ``fusedops.patch`` and with what ZeRO-3 needs.

    ZeRO-3 gathers a module's parameters by hooks on that module. A fused block reads the parameters
    of children that it does not call, so it steps aside when each child has its hooks. This marks
    such blocks as ZeRO-3 leaves, whose parameters are gathered together when the block is entered:
    of a decoder layer with a fused residual sum that is the whole layer, as under ``fully_shard``.
    Stages 0 to 2 do not look at the marks.

    Args:
        model: a model before ``deepspeed.initialize``; or an engine, of which the module is
            patched. Under stage 3 that is late for the marks: the blocks step aside, norms,
            attention and single layers are fused, and ``strict`` raises.
        level: as for ``fusedops.patch``.
        strict: as for ``fusedops.patch``.

    Returns:
        The report.

    Raises:
        TypeError: ``model`` is neither.
        UnsupportedError: as ``fusedops.patch``.
    """
    if isinstance(model, _deepspeed.DeepSpeedEngine):
        return hf.patch(model.module, level=level, strict=strict)
    report = hf.patch(model, level=level, strict=strict)
    for module in hf.absorbing(model):
        _utils.set_z3_leaf_module(module, True)
    return report


def unpatch(model: Any) -> None:
    """Take fused ops and marks out of a model again, before it is given to DeepSpeed.

    Args:
        model: as for ``patch``. An engine keeps its hooks as they are.

    Raises:
        TypeError: ``model`` is neither.
        UnsupportedError: as ``fusedops.unpatch``.
    """
    if isinstance(model, _deepspeed.DeepSpeedEngine):
        return hf.unpatch(model.module)
    marked = hf.absorbing(model)
    hf.unpatch(model)
    for module in marked:
        _utils.set_z3_leaf_module(module, False)
    return None

"""DeepSpeed: ``initialize`` with the model patched before, and the ops into or out of an engine.

engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
"""

from __future__ import annotations

from typing import Any

from fusedops._core import checks, imports
from fusedops.integrations.hf import patch as hf
from fusedops.integrations.hf.report import PatchReport

_deepspeed = imports.needed("deepspeed", "deepspeed", "fusedops.integrations.deepspeed")


def initialize(
    args: Any = None,
    model: Any = None,
    *rest: Any,
    level: str = "O2",
    strict: bool = False,
    **options: Any,
) -> Any:
    """Patch a model and give it to ``deepspeed.initialize``.

    Stages 0 to 3 of ZeRO. Under stage 3 a fused block reads its children's parameters without
    calling them: the engine gathers what is read.

    Args:
        args: of ``deepspeed.initialize``.
        model: the model.
        *rest: of ``deepspeed.initialize``.
        level: as for ``fusedops.patch``.
        strict: as for ``fusedops.patch``.
        **options: of ``deepspeed.initialize``.

    Returns:
        What ``deepspeed.initialize`` returns: engine, optimizer, data loader, scheduler.

    Raises:
        TypeError: ``model`` is no module.
        UnsupportedError: as ``fusedops.patch``.
    """
    report = hf.patch(model, level=level, strict=strict)
    _deepspeed.utils.log_dist(str(report), ranks=[0])
    return _deepspeed.initialize(args, model, *rest, **options)


def patch(engine: Any, *, level: str = "O2", strict: bool = False) -> PatchReport:
    """Patch the module of an engine that exists.

    Args:
        engine: what ``deepspeed.initialize`` returns first.
        level: as for ``fusedops.patch``.
        strict: as for ``fusedops.patch``.

    Returns:
        The report.

    Raises:
        TypeError: ``engine`` is no ``DeepSpeedEngine``.
        UnsupportedError: as ``fusedops.patch``.
    """
    return hf.patch(_module("patch", engine), level=level, strict=strict)


def unpatch(engine: Any) -> None:
    """Take the fused ops out of the module of an engine.

    Args:
        engine: what ``deepspeed.initialize`` returns first.

    Raises:
        TypeError: ``engine`` is no ``DeepSpeedEngine``.
        UnsupportedError: as ``fusedops.unpatch``.
    """
    hf.unpatch(_module("unpatch", engine))


def _module(function: str, engine: Any) -> Any:
    if not isinstance(engine, _deepspeed.DeepSpeedEngine):
        checks.fail_type(function, "engine", "a deepspeed.DeepSpeedEngine", engine)
    return engine.module

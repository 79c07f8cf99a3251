"""Hugging Face's accelerate: ``prepare`` with the models patched before they are wrapped.

model, optimizer = prepare(accelerator, model, optimizer)   # accelerator.prepare(...)
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from fusedops._core import checks, imports
from fusedops.integrations.hf.patch import patch

_accelerate = imports.needed("accelerate", "accelerate", "fusedops.integrations.accelerate")

_LOG = logging.getLogger("fusedops")


def prepare(
    accelerator: Any, *objects: Any, level: str = "O2", strict: bool = False, **options: Any
) -> Any:
    """Patch the models among ``objects``, and prepare all as ``Accelerator.prepare`` does.

    The reports are logged by the logger ``fusedops`` at level INFO, by one process of each machine.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        *objects: models, optimizers, data loaders, schedulers.
        level: as for ``fusedops.patch``.
        strict: as for ``fusedops.patch``.
        **options: of ``Accelerator.prepare``.

    Returns:
        What ``Accelerator.prepare`` returns.

    Raises:
        TypeError: ``accelerator`` is no ``Accelerator``.
        ValueError: there is no model among ``objects``.
        UnsupportedError: as ``fusedops.patch``.
    """
    if not isinstance(accelerator, _accelerate.Accelerator):
        checks.fail_type("prepare", "accelerator", "an accelerate.Accelerator", accelerator)
    models = [value for value in objects if isinstance(value, nn.Module)]
    if not models:
        names = [type(value).__name__ for value in objects]
        checks.fail("prepare", "objects", "such that a model is among them", names)
    for model in models:
        report = patch(model, level=level, strict=strict)
        if accelerator.is_local_main_process:
            _LOG.info("%s", report)
    return accelerator.prepare(*objects, **options)

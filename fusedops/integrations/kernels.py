"""Fused ops in every transformers model that is built from now on, without a call for each.

    register()
    model = AutoModelForCausalLM.from_pretrained(name)   # patched

A model is patched in ``post_init``, at the end of its construction. transformers' own mapping of
classes (``register_patch_mapping``) does not know torch's layers, activations and losses, nor
models that are made by their class.
"""

from __future__ import annotations

import functools
from typing import Any

from fusedops._core import checks, imports
from fusedops.integrations.hf.patch import patch
from fusedops.integrations.hf.rules.rule import LEVELS

_modeling = imports.needed(
    "transformers.modeling_utils", "transformers", "fusedops.integrations.kernels"
)
_MODEL: Any = _modeling.PreTrainedModel
_STOCK = "_fusedops_stock_post_init"


def register(*, level: str = "O2") -> None:
    """Patch every transformers model at the end of its construction.

    Models that exist stay as they are. ``fusedops.unpatch`` takes the ops out of one model,
    ``unregister`` ends it for those to come. Registering again changes the level.

    Args:
        level: as for ``fusedops.patch``.

    Raises:
        ValueError: ``level`` is unknown.
    """
    checks.choice("register", "level", level, LEVELS)
    unregister()
    stock = _MODEL.post_init

    @functools.wraps(stock)
    def post_init(self: Any) -> None:
        stock(self)
        patch(self, level=level)

    setattr(post_init, _STOCK, stock)
    _MODEL.post_init = post_init


def unregister() -> None:
    """Build models as transformers does again. Without ``register`` before it nothing happens."""
    stock = getattr(_MODEL.post_init, _STOCK, None)
    if stock is not None:
        _MODEL.post_init = stock

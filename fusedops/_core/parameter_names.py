"""Names of parameters, whatever wraps the modules that have them."""

from __future__ import annotations

# Wrappers put these into names; a module of such a name loses it.
_WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


def plain_name(name: str) -> str:
    """Return the name of a parameter without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

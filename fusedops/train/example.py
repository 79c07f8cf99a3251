"""The configuration that ``fusedops train --example`` writes: every key, with what it means.

It runs on the corpus of the demo, the source of the installed sympy package, which torch brings.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fusedops.launch.config_table import InputError

_FILE = Path(__file__).with_name("example.toml")


def example(name: str) -> str:
    """Return a commented configuration, to be written to a file of this name."""
    spec = importlib.util.find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("the example's corpus is the source of sympy: pip install sympy")
    folder = Path(next(iter(spec.submodule_search_locations)))
    text = _FILE.read_text(encoding="utf-8")
    return text.replace("NAME", name).replace("CORPUS", str(folder / "**" / "*.py"))

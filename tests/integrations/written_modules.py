"""Modules of user code for the patch tests, written as text: each test gets a file of its own."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_IMPORTS = """
import torch
import torch.nn.functional as F
from torch import nn
"""
_numbers = count()


def written(monkeypatch: pytest.MonkeyPatch, source: str) -> Any:
    """Return a module of a package with this code, which imports torch."""
    package = f"written_{next(_numbers)}"
    for name in (package, f"{package}.layers"):
        module = ModuleType(name)
        module.__package__ = package
        module.__file__ = str(Path("written") / "layers.py")
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules[package])["__path__"] = []
    exec(f"{_IMPORTS}\n{source}", vars(module))
    return module

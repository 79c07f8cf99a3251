"""Puts the pool of processes of ``tests/parallel`` on the path, for the optimizers' tests too."""

from __future__ import annotations

import sys
from pathlib import Path

# The processes find functions by the names of their modules: both folders must be on the path.
for folder in (Path(__file__).parent, Path(__file__).parent.parent / "parallel"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

"""The trainers that people have: a tier of its own (`make test-clients`).

The tests that want all of them (`requirements.txt` here) are collected where all of them are. Each
writes a row into `build/clients/trainers.json`; a whole run is then copied to `docs/reports`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEEDED = ("accelerate", "datasets", "deepspeed", "lightning", "megatron", "peft", "torchao", "trl")
WANT_ALL = ("examples", "lightning", "megatron", "peft", "torch", "trainer", "trl")

# The models and what compares them are those of the patch tests.
sys.path.append(str(HERE.parent / "integrations"))

if any(find_spec(name) is None for name in NEEDED):
    collect_ignore = [f"test_{name}.py" for name in WANT_ALL]
else:
    import harness

    @pytest.fixture
    def table() -> harness.Table:
        """Where a test writes down what it found."""
        return harness.Table(HERE.parents[1] / "build" / "clients")

"""Compilation without the measurement of guards.

Dynamo times the guards of each frame that it compiles, after it has emptied the processor's caches:
40 ms for each frame, a sixth of the time of a test that compiles, for a number in its log.
"""

from __future__ import annotations

import sys


def install() -> None:
    """Replace the measurement in this process, if Dynamo is imported."""
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]

"""Buffers of known lifetimes in one block of memory, and the memory of a training step in it.

``placement`` finds offsets, ``planning`` makes the plan of a step from what one allocated,
``step_arena`` runs steps by plans (``use_arena``), and ``usage`` reports.
"""

from fusedops.memory.arena.placement import Placement, place
from fusedops.memory.arena.step_arena import StepArena, use_arena
from fusedops.memory.arena.usage import ArenaReport

__all__ = ["ArenaReport", "Placement", "StepArena", "place", "use_arena"]

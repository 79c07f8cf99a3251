"""Activation memory: which tensors of a forward are saved, recomputed or offloaded.

    from fusedops import memory
    memory.apply(model, memory.Policy(memory.recompute("transformer.h.*")))

In reading order: ``policy`` (rules), ``saved_tensors`` (the forms in which the autograd graph holds
a saved tensor), ``buffers`` (module buffers that a second forward must not change),
``recomputation`` (modules, selected results, single operators), ``offloading`` (host memory, and
experts that are fetched on demand), ``policy_state`` (applies the rules while a model runs),
``wrap``, ``apply`` and ``compiled`` (put a policy on a model and take it off), ``layers`` and
``measurement`` (what a step allocates, and the search for a policy that fits a budget), and
``arena`` (offsets for buffers of known lifetimes in one block, and training steps in it).
"""

from fusedops.memory import arena as arena
from fusedops.memory.apply import apply, remove
from fusedops.memory.arena import use_arena
from fusedops.memory.measurement.fit import fit
from fusedops.memory.measurement.report import StepMemory, report
from fusedops.memory.offloading.experts import store_experts
from fusedops.memory.offloading.offloader import OffloadSettings
from fusedops.memory.policy import Policy, offload, recompute, save, tile

__all__ = [
    "OffloadSettings",
    "Policy",
    "StepMemory",
    "apply",
    "fit",
    "offload",
    "recompute",
    "remove",
    "report",
    "save",
    "store_experts",
    "tile",
    "use_arena",
]

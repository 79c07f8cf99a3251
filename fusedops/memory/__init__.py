"""The memory of training: what of a forward pass is kept, computed again or moved.

    from fusedops import memory
    memory.apply(model, memory.Policy(memory.recompute("transformer.h.*")))

In reading order: ``policy`` (rules), ``held`` (the forms in which a graph holds a tensor),
``buffers`` (what a second forward must not change), ``region``, ``selective`` and ``slices``
(recomputation of modules), ``makers`` (of single operators), ``engine``, ``pool`` and ``mover``
(host memory), ``keeper`` (who decides), ``wrap``, ``apply`` and ``compiled`` (onto a model and off
it); ``experts`` (weights that come when a token wants them); ``ledger``, ``layers``, ``report`` and
``picture`` (what a step holds), ``fit`` (a policy for a budget).
"""

from fusedops.memory.apply import apply, remove
from fusedops.memory.experts import store_experts
from fusedops.memory.fit import fit
from fusedops.memory.mover import OffloadSettings
from fusedops.memory.policy import Policy, lower, offload, recompute, save
from fusedops.memory.report import report

__all__ = [
    "OffloadSettings",
    "Policy",
    "apply",
    "fit",
    "lower",
    "offload",
    "recompute",
    "remove",
    "report",
    "save",
    "store_experts",
]

"""Whether a parallel model trains as one process does: a fuzzer for models on meshes.

    import fusedops
    fusedops.verify(make_model, [{"tp": 2}, {"dp": 2, "tp": 2}], parallelize=my_parallelize)

In reading order: ``case`` (what is drawn), ``batches`` (workloads), ``arguments`` (checks),
``case_run`` (a case on one process and on ranks, compared), ``thread_scheduler``,
``thread_collectives`` and ``threads`` (ranks as threads), ``processes`` (ranks on gloo) and
``fuzzer``. Apart from these: ``cluster_step``, on a ``stand_in_device`` and its ``stand_in_cuda``.
"""

from fusedops.testing.batches import WORKLOADS, token_batch
from fusedops.testing.case import Case
from fusedops.testing.case_run import Parallel
from fusedops.testing.cluster_step import ClusterStep, Communication, RankStep, cluster_step
from fusedops.testing.fuzzer import ParityError, Report, replay, verify
from fusedops.testing.ranks import RankError

__all__ = [
    "WORKLOADS",
    "Case",
    "ClusterStep",
    "Communication",
    "Parallel",
    "ParityError",
    "RankError",
    "RankStep",
    "Report",
    "cluster_step",
    "replay",
    "token_batch",
    "verify",
]

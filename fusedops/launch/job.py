"""The place of this process in a job: which process of how many it is, and where rank 0 listens.

``torchrun``, Kubernetes' PyTorchJob and Ray Train say it in the variables of ``torch.distributed``.
``srun`` says it in Slurm's variables, from which the others are derived here. Both are checked:
a mistake in them would otherwise be several runs in one folder, or processes that wait forever.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fusedops._core import env
from fusedops.launch.config_table import InputError

# Below the ports that Linux gives to connections (32768), and above those of services.
_FIRST_PORT, _PORTS = 20000, 12000


class RendezvousError(RuntimeError):
    """The processes of a job do not reach each other; each of them reports it."""


def join_job() -> None:
    """Set the variables of ``torch.distributed`` in a process that ``srun`` started; check them.

    Does nothing in a process that runs alone.

    Raises:
        InputError: the variables of the launcher are incomplete or contradict each other.
    """
    given = env.job_variables()
    if "RANK" not in given and "WORLD_SIZE" not in given:
        env.set_job_variables(from_slurm(given))
        given = env.job_variables()
    for one, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if one in given and other not in given:
            raise InputError(
                f"{one} is set and {other} is not: a launcher sets both; unset {one} to run on "
                "one process"
            )
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in given and size in given:
            _check_below(given, rank, size)


def check_address(given: Mapping[str, str]) -> None:
    """Raise unless the variables say where the process of rank 0 listens.

    Raises:
        InputError: ``MASTER_ADDR`` or ``MASTER_PORT`` is missing, or the latter is no port.
    """
    for name, meaning in (("MASTER_ADDR", "the machine of rank 0"), ("MASTER_PORT", "a port")):
        if not given.get(name):
            raise InputError(
                f"{name} is not set, and {given['WORLD_SIZE']} processes need it: set it to "
                f"{meaning} that all of them can reach, or start them with torchrun or srun; to "
                "run on one process: unset RANK WORLD_SIZE"
            )
    if not 0 < _integer(given, "MASTER_PORT") < 2**16:
        raise InputError(f"MASTER_PORT must be in 1 to 65535, got {given['MASTER_PORT']}")


def from_slurm(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``torch.distributed`` for a process that ``srun`` started.

    Args:
        given: the environment. ``SLURM_STEP_NUM_TASKS`` and not ``SLURM_NTASKS`` is the number of
            processes: the latter is that of the allocation in a shell that ``salloc`` opens.

    Returns:
        ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
        ``MASTER_PORT``, of which the last two keep a value that is set; nothing where ``srun``
        started one process, or none.

    Raises:
        InputError: Slurm's variables contradict each other, or nodes have unlike numbers of
            processes.
    """
    if "SLURM_PROCID" not in given or "SLURM_STEP_NUM_TASKS" not in given:
        return {}
    size = _integer(given, "SLURM_STEP_NUM_TASKS")
    if size == 1:
        return {}
    _check_below(given, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    names = ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    if missing := [name for name in names if name not in given]:
        raise InputError(f"srun sets {', '.join(missing)}, and here it is not set")
    tasks, nodes = given["SLURM_STEP_TASKS_PER_NODE"], given["SLURM_STEP_NODELIST"]
    match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", tasks)
    if match is None:
        raise InputError(
            f"srun started {tasks} processes on the nodes {nodes}: every node must have as many; "
            "give srun --ntasks-per-node"
        )
    count = int(match[1])
    if count * int(match[2] or 1) != size:
        raise InputError(
            f"Slurm's variables contradict each other: SLURM_STEP_NUM_TASKS={size}, "
            f"SLURM_STEP_TASKS_PER_NODE={tasks}; start the processes with srun"
        )
    rank, local = _integer(given, "SLURM_PROCID"), _integer(given, "SLURM_LOCALID")
    first = _integer(given, "SLURM_NODEID") * count
    # All processes of the node see these, and refuse together.
    ranks = given.get("SLURM_GTIDS", str(rank))
    expected = ",".join(str(first + number) for number in range(count))
    if rank != first + local or ranks not in (expected, str(rank)):
        raise InputError(
            f"node {given['SLURM_NODEID']} has the processes {ranks}, and should have {expected}: "
            "those of a node must follow each other; give srun --distribution=block"
        )
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": given.get("MASTER_ADDR") or first_node(nodes),
        "MASTER_PORT": given.get("MASTER_PORT") or str(_port(given)),
    }


def first_node(text: str) -> str:
    """Return the first name of a list of nodes in Slurm's notation.

    Raises:
        InputError: it is another notation.
    """
    # Commas between names are outside of brackets, of which a name may have several.
    match = re.match(r"(?:[^,\[\]\s]|\[\d[\d,-]*\])+(?=,|$)", text)
    if match is None:
        raise InputError(f"SLURM_STEP_NODELIST must be as in gpu[08-10,12], got {text!r}")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def _port(given: Mapping[str, str]) -> int:
    """Return a port that all processes of a step derive, and that other steps do not."""
    job, step = _integer(given, "SLURM_JOB_ID"), given.get("SLURM_STEP_ID", "0")
    return _FIRST_PORT + (16 * job + (int(step) if step.isdecimal() else 0)) % _PORTS


def _check_below(given: Mapping[str, str], rank: str, size: str) -> None:
    if not 0 <= _integer(given, rank) < _integer(given, size):
        raise InputError(
            f"{rank}={given[rank]} contradicts {size}={given[size]}: it must be in 0 to "
            f"{_integer(given, size) - 1}"
        )


def _integer(given: Mapping[str, str], name: str) -> int:
    text = given.get(name, "")
    if not text.isdecimal():
        raise InputError(f"{name} must be an integer of at least 0, got {text!r}")
    return int(text)

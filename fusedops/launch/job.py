"""The place of this process in a job: which process of how many it is, and where rank 0 listens.

``torchrun``, Kubernetes' PyTorchJob and Ray Train say it in the variables of ``torch.distributed``.
``srun`` says it in Slurm's variables, from which the others are derived here. Both are checked:
a mistake in them would otherwise be several runs in one folder, or processes that wait forever.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fusedops._core import env
from fusedops.launch.config_table import InputError

# Below the ports that Linux gives to connections (32768), and above those of services.
_FIRST_PORT, _PORTS = 20000, 12000
_BRACKETS = re.compile(r"\[([^\]]*)\]")


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
    check_ranks(given)


def check_ranks(given: Mapping[str, str]) -> None:
    """Raise unless ``RANK``, ``WORLD_SIZE`` and the like are complete and fit each other.

    Raises:
        InputError: they do not.
    """
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

    Example:
        >>> place = from_slurm({
        ...     "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1",
        ...     "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "7",
        ...     "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[08-09]"})
        >>> place["RANK"], place["LOCAL_RANK"], place["MASTER_ADDR"]
        ('3', '1', 'gpu08')
    """
    if "SLURM_PROCID" not in given or "SLURM_STEP_NUM_TASKS" not in given:
        return {}
    size = _integer(given, "SLURM_STEP_NUM_TASKS")
    if size == 1:
        return {}
    _check_below(given, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    names = ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    missing = [name for name in names if name not in given]
    if missing:
        raise InputError(f"srun sets {', '.join(missing)}, and here it is not set")
    counts = tasks_per_node(given["SLURM_STEP_TASKS_PER_NODE"])
    nodes = node_names(given["SLURM_STEP_NODELIST"])
    if sum(counts) != size or len(nodes) != len(counts):
        raise InputError(
            f"Slurm's variables contradict each other: SLURM_STEP_NUM_TASKS={size}, "
            f"SLURM_STEP_TASKS_PER_NODE={given['SLURM_STEP_TASKS_PER_NODE']}, "
            f"SLURM_STEP_NODELIST={given['SLURM_STEP_NODELIST']}; start the processes with srun"
        )
    if len(set(counts)) > 1:
        raise InputError(
            f"srun started {', '.join(map(str, counts))} processes on the nodes "
            f"{', '.join(nodes)}: every node must have as many; give srun --ntasks-per-node"
        )
    rank, local = _integer(given, "SLURM_PROCID"), _integer(given, "SLURM_LOCALID")
    first = _integer(given, "SLURM_NODEID") * counts[0]
    # All processes of the node see these, and refuse together.
    ranks = given.get("SLURM_GTIDS", str(rank))
    expected = ",".join(str(first + number) for number in range(counts[0]))
    if rank != first + local or ranks not in (expected, str(rank)):
        raise InputError(
            f"node {given['SLURM_NODEID']} has the processes {ranks}, and should have {expected}: "
            "those of a node must follow each other; give srun --distribution=block"
        )
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(counts[0]),
        "MASTER_ADDR": given.get("MASTER_ADDR") or nodes[0],
        "MASTER_PORT": given.get("MASTER_PORT") or str(_port(given)),
    }


def tasks_per_node(text: str) -> list[int]:
    """Return the numbers of processes in Slurm's notation.

    Raises:
        InputError: it is another notation.

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise InputError(f"SLURM_STEP_TASKS_PER_NODE must be as in 2(x3),1, got {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def node_names(text: str) -> list[str]:
    """Return the names of nodes in Slurm's notation, as ``scontrol show hostnames`` does.

    Raises:
        InputError: it is another notation.

    Example:
        >>> node_names("login,gpu[08-10,12]")
        ['login', 'gpu08', 'gpu09', 'gpu10', 'gpu12']
    """
    if text.count("[") != text.count("]") or not text.strip():
        raise InputError(f"SLURM_STEP_NODELIST must be as in gpu[08-10,12], got {text!r}")
    # Commas between names are outside of brackets.
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    return [name for part in parts for name in _expanded(part.strip(), text)]


def _expanded(pattern: str, text: str) -> Iterator[str]:
    """Yield the names of one pattern, which may have several brackets."""
    bracket = _BRACKETS.search(pattern)
    if bracket is None:
        yield pattern
        return
    for part in bracket[1].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise InputError(f"SLURM_STEP_NODELIST must be as in gpu[08-10,12], got {text!r}")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            middle = str(number).zfill(len(first))
            yield from _expanded(
                pattern[: bracket.start()] + middle + pattern[bracket.end() :], text
            )


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

"""A Slurm cluster on this machine: munged, slurmctld and two nodes of one slurmd, for tests.

    python tests/launch/slurm_cluster.py FOLDER COMMAND...     # runs a command inside the cluster

All files (keys, sockets, logs, state) are in the folder, and all daemons end by their process ids.
It needs Debian's packages ``slurm-wlm`` and ``munge``, and root, as which slurmd starts jobs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_DAEMONS = ("munged", "slurmctld", "slurmd")
_START_SECONDS = 60.0
_END_SECONDS = 20.0
NODES = ("127.0.0.1", "127.0.0.2")
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
OverTimeLimit=0
JobRequeue=1
SchedulerParameters=sched_interval=2,bf_interval=2
{nodes}
PartitionName=test Nodes=127.0.0.[1-2] Default=YES MaxTime=INFINITE State=UP
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000"


def why_not() -> str:
    """Return why no cluster can run here, or an empty text."""
    missing = [name for name in _DAEMONS if _program(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd starts jobs as root only"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run a cluster of two nodes, whose names are ``NODES``.

    Args:
        folder: where its files are written; its path must be short enough for a socket's.

    Yields:
        The environment in which ``sbatch``, ``srun`` and ``scontrol`` use this cluster.
    """
    host = socket.gethostname().split(".")[0]
    controller, *ports = _free_ports(1 + len(NODES))
    nodes = [
        _NODE.format(name=name, host=host, port=port)
        for name, port in zip(NODES, ports, strict=True)
    ]
    text = _CONFIGURATION.format(
        host=host, folder=folder, controller=controller, nodes="\n".join(nodes)
    )
    (folder / "state").mkdir(parents=True)
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = [f"--socket={folder}/munge.socket", f"--key-file={key}", f"--pid-file={folder}/munged"]
    munge += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed", "--force"]
    commands = [["munged", "--foreground", *munge], ["slurmctld", "-D"]]
    commands += [["slurmd", "-D", "-N", name] for name in NODES]
    with contextlib.ExitStack() as daemons:
        for name, *options in commands:
            daemons.enter_context(_daemon(folder, name, options, environment))
            if name == "munged":
                _wait(lambda: (folder / "munge.socket").exists(), "munged", folder)
        _wait(lambda: _idle_nodes(environment) == len(NODES), "slurmd", folder)
        try:
            yield environment
        finally:
            _cancel_jobs(environment)


def _cancel_jobs(environment: dict[str, str]) -> None:
    """End all jobs: they would survive the daemons."""
    subprocess.run(["scancel", "--user=root"], env=environment, check=False)
    end = time.monotonic() + _END_SECONDS
    while time.monotonic() < end:
        words = ["squeue", "--noheader"]
        done = subprocess.run(words, env=environment, capture_output=True, check=False)
        if not done.stdout.strip():
            return
        time.sleep(0.2)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for port in sockets:
            port.bind(("127.0.0.1", 0))
        return [port.getsockname()[1] for port in sockets]


@contextlib.contextmanager
def _daemon(
    folder: Path, name: str, options: list[str], environment: dict[str, str]
) -> Iterator[None]:
    with (folder / f"{name}.out").open("a") as out:
        program = [str(_program(name)), *options]
        process = subprocess.Popen(program, env=environment, stdout=out, stderr=out)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle_nodes(environment: dict[str, str]) -> int:
    words = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    return len(done.stdout.split())


def _wait(ready: object, name: str, folder: Path) -> None:
    assert callable(ready)
    end = time.monotonic() + _START_SECONDS
    while not ready():
        if time.monotonic() > end:
            logs = "\n".join(
                f"{path.name}: {path.read_text()[-2000:]}"
                for path in sorted(folder.glob("*.log")) + sorted(folder.glob("*.out"))
            )
            raise TimeoutError(f"{name} is not ready after {_START_SECONDS:g} seconds\n{logs}")
        time.sleep(0.2)


def _main() -> int:
    folder, *command = sys.argv[1:]
    with cluster(Path(folder)) as environment:
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(_main())

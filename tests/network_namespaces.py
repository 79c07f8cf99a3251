"""Two machines with a link between them, on this one."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

LINK = "link0"
ADDRESSES = ("10.9.8.1", "10.9.8.2")


@contextlib.contextmanager
def two_machines() -> Iterator[list[list[str]]]:
    """Give the commands that run something on each of two machines with a link between them.

    They are network namespaces inside of one of a user of our own: that needs no privilege where
    the system allows it, and the test is skipped elsewhere. The addresses are ``ADDRESSES``, and
    the link is ``LINK`` on both.
    """
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("unshare and ip are not installed")
    names: list[subprocess.Popen[bytes]] = []
    enters: list[list[str]] = []
    try:
        for outside in (["unshare", "-Urn"], None):
            start = outside or [*enters[0], "unshare", "-n"]
            names.append(subprocess.Popen([*start, "sleep", "100000"]))
            time.sleep(1.0)
            inner = psutil.Process(names[-1].pid)
            pid = str((inner.children(recursive=True) or [inner])[-1].pid)
            enters.append(["nsenter", "-t", pid, "-U", "-n", "--preserve-credentials"])
        link = f"link add {LINK} type veth peer name {LINK} netns {pid}"
        if subprocess.run([*enters[0], "ip", *link.split()], check=False).returncode:
            pytest.skip("this system allows no network namespaces")
        for number, enter in enumerate(enters):
            address = f"addr add {ADDRESSES[number]}/24 dev {LINK}"
            for words in (address, f"link set {LINK} up", "link set lo up"):
                subprocess.run([*enter, "ip", *words.split()], check=True)
        yield enters
    finally:
        for name in names:
            for child in psutil.Process(name.pid).children(recursive=True):
                child.kill()
            name.kill()
            name.wait()

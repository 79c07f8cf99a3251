"""The threads of the offloaded optimizer: too many of them, and forked processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedops.optim import OffloadedAdamW, _step_queue

pytestmark = pytest.mark.skipif(_step_queue.missing() is not None, reason="no step queue")
SECONDS = 60.0  # until a call that waits for nobody hangs


def in_forked_process(child: Callable[[], object]) -> int:
    """Return the exit code of a forked process; -1 if it hangs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


@pytest.mark.parametrize("threads", [0, 1025, 100_000])
def test_a_number_of_threads_that_cannot_be_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match=r"OffloadedAdamW: threads must be at (least|most) \d+"):
        OffloadedAdamW([torch.nn.Parameter(torch.ones(3))], threads=threads)
    with pytest.raises(ValueError, match=f"StepQueue: threads must be 1 to 1024, got {threads}"):
        _step_queue.new_queue(threads)


@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="it reserves more memory than the limit")
def test_a_system_without_more_threads_is_an_error() -> None:
    """In a process whose memory has no room for the stacks of so many threads."""
    code = (
        "import resource\n"
        "from fusedops.optim import _step_queue\n"
        "_step_queue.missing()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20),) * 2)\n"
        "try:\n"
        "    _step_queue.new_queue(1000)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "StepQueue: the system started" in done.stdout and "of 1000 threads" in done.stdout


@pytest.mark.parametrize("overlap", [True, False])
def test_a_forked_process_steps_its_own_copy(overlap: bool) -> None:
    weight, reference = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer, plain = (
        OffloadedAdamW([each], lr=0.5, overlap=overlap, threads=2) for each in (weight, reference)
    )

    def backward(of: torch.Tensor) -> None:
        of.grad = None
        (of * torch.arange(4.0)).sum().backward()

    def two_steps() -> None:
        optimizer.step()
        backward(weight)
        optimizer.step()
        assert torch.equal(weight, reference)

    for _ in range(3):
        backward(reference)
        plain.step()
    backward(weight)
    optimizer.step()
    backward(weight)  # with overlap a step begins here
    before = weight.detach().clone()
    assert in_forked_process(lambda: (two_steps(), optimizer.close())) == 0
    assert torch.equal(weight, before)
    two_steps()


def test_a_forked_process_closes_what_it_cannot_use() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = OffloadedAdamW([weight], threads=2)
    (weight * 2).sum().backward()
    assert optimizer._workers is not None
    queue = optimizer._workers._queue

    def child() -> None:
        with pytest.raises(RuntimeError, match=f"exist only in process {os.getppid()}"):
            queue.wait(0)
        queue.close()
        optimizer.close()

    assert in_forked_process(child) == 0


def test_workers_may_be_closed_by_one_of_their_own_threads() -> None:
    """As the garbage collector does, which runs on whatever thread it is due."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = OffloadedAdamW([weight], threads=2)
    workers = optimizer._workers
    assert workers is not None
    errors: list[BaseException] = []
    run = workers._run

    def closing(*given: Any) -> None:
        try:
            workers.close()
        except BaseException as error:
            errors.append(error)
        run(*given)

    workers._run = closing
    (weight * 2).sum().backward()
    begun = optimizer._buckets[0].job
    assert begun is not None and begun.finished.wait(SECONDS)
    assert not errors and "submit after close" in str(begun.error)
    for thread in workers._threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in workers._threads)

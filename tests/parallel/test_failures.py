"""A rank that dies, stops answering or raises alone: every other rank raises within the timeout."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_layer import experts, gradients, problem
from run_ranks import start_process
from torch import distributed as dist

from fusedops.parallel import expert_parallel

pytestmark = pytest.mark.distributed

RANKS, GROUP_TIMEOUT = 3, 2.0
LOST = 1


def _work(connection: Any, rank: int, store: str, step: str) -> None:
    """Run layers until a rank is lost; tell what happened and how long it took."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    whole = problem("uneven", 1, torch.float32)
    whole.w1, whole.w2 = whole.w1[:6], whole.w2[:6]
    whole.ids, whole.counts = whole.ids % 6, [len(whole.input)] * RANKS
    mine = whole.part(0, 1)
    mine.w1 = mine.w1[2 * rank : 2 * rank + 2].detach().requires_grad_()
    mine.w2 = mine.w2[2 * rank : 2 * rank + 2].detach().requires_grad_()

    def layer(*, is_wrong: bool = False) -> torch.Tensor:
        def here(rows: torch.Tensor, plan: Any) -> torch.Tensor:
            output = experts(rows, plan, mine.w1, mine.w2)
            return output[1:] if is_wrong else output

        return expert_parallel(mine.input, mine.plan(6), here, dist.group.WORLD, weighted=True)

    gradients(layer(), mine)
    output = layer() if step == "backward" else None
    connection.send("ready")
    if rank == LOST and step != "output":
        time.sleep(10 * GROUP_TIMEOUT)
    connection.recv()  # the lost rank is gone
    begin = time.monotonic()
    try:
        if output is None:
            layer(is_wrong=rank == LOST)
        else:
            gradients(output, mine)
        connection.send(("no error", 0.0))
    except (RuntimeError, ValueError) as error:
        kind = "RuntimeError" if isinstance(error, RuntimeError) else "ValueError"
        connection.send((f"{kind}: {error}", time.monotonic() - begin))
        if rank == LOST:
            time.sleep(10 * GROUP_TIMEOUT)  # its connections stay


def _errors(folder: Path, step: str, lose: signal.Signals | None) -> list[str]:
    """Return the errors of the ranks that are not lost, or of all if none is."""
    store = str(folder / "store")
    started = [start_process(_work, rank, store, step) for rank in range(RANKS)]
    try:
        for _, mine in started:
            assert mine.poll(60.0) and mine.recv() == "ready"
        asked = started
        if lose is not None:
            os.kill(started[LOST][0].pid, lose)
            asked = [each for each in started if each is not started[LOST]]
        for _, mine in asked:
            mine.send("go")
        errors = []
        for process, mine in asked:
            assert mine.poll(4 * GROUP_TIMEOUT), f"{process.name} hangs"
            error, seconds = mine.recv()
            assert seconds < 2 * GROUP_TIMEOUT, f"{process.name} took {seconds} s"
            errors.append(error)
        return errors
    finally:
        for process, _ in started:
            process.kill()
            process.join()


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_raises_on_all_others(tmp_path: Path, how: signal.Signals, step: str) -> None:
    """Killed: the process is gone. Stopped: it is there but silent, as behind a cut link."""
    for error in _errors(tmp_path, step, how):
        assert error.startswith("RuntimeError"), error


def test_a_wrong_output_that_is_not_validated_ends_all_ranks(tmp_path: Path) -> None:
    """The rank at fault has the reason; the others wait for it until the timeout."""
    errors = _errors(tmp_path, "output", None)
    assert errors.pop(LOST).startswith("ValueError: moe_combine: output must be of shape")
    assert all(error.startswith("RuntimeError") for error in errors), errors

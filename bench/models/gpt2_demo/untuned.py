"""Speed with the system's allocator settings, as a user has them who changes nothing.

What ``fusedops.tune_host`` does to a process cannot be undone, so this measurement has a process
of its own, started before the tuning.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from transformers.utils import logging as transformers_logging

from .corpus import Source, load_corpus
from .training import FUSED, STOCK, Comparison, Settings, compare


def _measure(
    channel: Connection, source: Source, settings: Settings, dtypes: Sequence[str]
) -> None:
    """Compare in this process; send each step, then the comparisons, or what went wrong."""
    transformers_logging.set_verbosity_error()
    try:
        corpus = load_corpus(source)
        results = []
        for dtype in dtypes:
            comparison, _ = compare(
                (STOCK, FUSED),
                corpus,
                settings,
                dtype,
                on_step=lambda name, loss: channel.send(("step", (name, loss))),
            )
            results.append(comparison)
        channel.send(("done", results))
    except KeyboardInterrupt:
        pass
    except Exception:
        channel.send(("failed", traceback.format_exc()))


def measure_untuned(
    source: Source,
    settings: Settings,
    dtypes: Sequence[str],
    *,
    on_step: Callable[[str, float], None],
) -> list[Comparison]:
    """Return a comparison per dtype, made in a fresh process.

    Raises:
        RuntimeError: that process failed; with its reason.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(there, source, settings, dtypes), daemon=True)
    process.start()
    there.close()
    try:
        while True:
            kind, value = _receive(here, process)
            if kind == "step":
                on_step(*value)
            elif kind == "failed":
                raise RuntimeError(f"the measurement with untuned memory failed:\n{value}")
            else:
                return value
    finally:
        process.terminate()
        process.join()


def _receive(channel: Connection, process: Any) -> tuple[str, Any]:
    try:
        return channel.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"the measurement with untuned memory ended with exit code {process.exitcode}"
        ) from None

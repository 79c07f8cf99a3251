"""Speed with the system's allocator settings, as a user has them who changes nothing.

What ``fusedops.tune_host`` does to a process cannot be undone, so this measurement has a process
of its own, started before the tuning.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from transformers.utils import logging as transformers_logging

from .corpus import Source, load_corpus
from .training import FUSED, STOCK, Comparison, Settings, compare


def _measure(source: Source, settings: Settings, dtypes: Sequence[str]) -> list[Comparison]:
    transformers_logging.set_verbosity_error()
    corpus = load_corpus(source)
    return [compare((STOCK, FUSED), corpus, settings, dtype)[0] for dtype in dtypes]


def measure_untuned(source: Source, settings: Settings, dtypes: Sequence[str]) -> list[Comparison]:
    """Return a comparison per dtype, made in a fresh process; what it raises is raised here."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_measure, source, settings, dtypes).result()

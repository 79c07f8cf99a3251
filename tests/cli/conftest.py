"""Fixtures of the tests of commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fusedops.bench import limits
from fusedops.specs import Spec, all_specs


@pytest.fixture
def known_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine's limits need no measuring, and the number of threads is restored."""
    from bench_records import LIMITS  # needs typer

    monkeypatch.setattr(limits, "measure_limits", lambda *_: LIMITS)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Spec]:
    """The specs that commands see: that of ``gelu``, until a test changes the dictionary."""
    known = {"gelu": all_specs()["gelu"]}
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: known)
    return known

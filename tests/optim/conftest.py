"""Offloaded optimizers have threads and queues: they are closed behind the test that made them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusedops.optim import OffloadedAdamW


@pytest.fixture(autouse=True)
def closing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[OffloadedAdamW] = []
    before = OffloadedAdamW._attach

    def attach(self: OffloadedAdamW) -> None:
        made.append(self)
        before(self)

    monkeypatch.setattr(OffloadedAdamW, "_attach", attach)
    yield
    for each in made:
        each.close()

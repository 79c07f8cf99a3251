"""Many steps with recomputation, offload and resumption: the bits of the plain run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_models import VOCAB, gpt2

from fusedops import memory
from fusedops.checkpoint import Checkpointer
from fusedops.optim import AdamW, OffloadedAdamW

OPTIONS = {"lr": 3e-3, "max_norm": 1.0}


def _steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int
) -> list[float]:
    losses = []
    for step in range(first, last):
        # Each row counts up from somewhere: something that can be learned.
        start = torch.randint(VOCAB, (4, 1), generator=torch.Generator().manual_seed(step))
        ids = (start + torch.arange(16)) % VOCAB
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


# After each number of steps the run ends, and continues as another process would.
@pytest.mark.parametrize(
    ("stops", "decrease"),
    [((22, 43, 60), 0.8), pytest.param((110, 217, 300), 0.5, marks=pytest.mark.slow)],
    ids=["60 steps", "300 steps"],
)
def test_recompute_offload_and_resumption_keep_every_bit(
    tmp_path: Path, stops: tuple[int, ...], decrease: float
) -> None:
    model = gpt2(layers=2, hidden=32)
    torch.manual_seed(3)  # of the dropouts
    expected = _steps(model, AdamW(model.named_parameters(), **OPTIONS), 0, stops[-1])
    weights = [parameter.detach() for parameter in model.parameters()]

    found: list[float] = []
    torch.manual_seed(3)
    for stop in stops:
        with torch.random.fork_rng(enabled=not found):
            model = gpt2(layers=2, hidden=32)  # its weights are drawn anew
        policy = memory.Policy(
            memory.recompute("transformer.h.0"), memory.offload("transformer.h.*")
        )
        settings = memory.OffloadSettings(least_bytes=1, check=True)
        memory.apply(model, policy, offload_settings=settings)
        optimizer = OffloadedAdamW(model.named_parameters(), bucket_bytes=1 << 14, **OPTIONS)
        with Checkpointer(tmp_path, model, optimizer) as state:
            restored = state.load()
            assert (restored.step if restored else 0) == len(found)
            found += _steps(model, optimizer, len(found), stop)
            state.save(stop)
        optimizer.close()
    assert found == expected
    pairs = zip(model.parameters(), weights, strict=True)
    assert all(torch.equal(mine, plain) for mine, plain in pairs)
    assert expected[-1] < decrease * expected[0], "nothing was learned"

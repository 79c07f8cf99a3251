"""A training step in an arena on a GPU: the same bits, little memory beyond the block, streams."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fusedops
from fusedops import memory
from fusedops.optim import AdamW

pytestmark = pytest.mark.gpu
_MOST_RESERVED = 1.03  # bytes reserved by bytes allocated


def _model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 6, "n_embd": 1024, "n_head": 16, "n_positions": 512}
    config = transformers.GPT2Config(vocab_size=8192, **sizes)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).to("cuda", torch.bfloat16)


def _losses(model: nn.Module, settled: int | None = None) -> list[float]:
    """Return the losses of eight steps; from step ``settled`` on the peak of memory is counted."""
    optimizer = AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(8):
        if step == settled:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        tokens = torch.Generator().manual_seed(step)
        ids = torch.randint(8192, (8, 512), generator=tokens).cuda()
        torch.manual_seed(step)  # for dropout
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("patched", [False, True])
def test_steps_have_the_same_bits_and_reserve_little_more_than_they_use(patched: bool) -> None:
    plain = _model()
    if patched:
        fusedops.patch(plain)
    same = copy.deepcopy(plain)
    expected = _losses(plain)
    plain.cpu()
    arena = memory.use_arena(same)
    try:
        losses = _losses(same, settled=5)
        report = arena.report()
        reserved, used = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    finally:
        arena.remove()
    assert losses == expected
    for mine, other in zip(same.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.detach().cpu(), other.detach())
    assert report.served_bytes > 0.9 * report.step_bytes, str(report)
    assert report.block_bytes <= 1.02 * report.bound_bytes
    assert reserved <= _MOST_RESERVED * used, f"{reserved} bytes reserved, {used} allocated"


def test_a_place_waits_for_other_streams() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    side, total = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    x = torch.ones(4096, 4096, device="cuda")
    expected = float(model(x).double().sum())
    arena = memory.use_arena(model)
    try:
        for step in range(8):
            y = model(x)
            y.sum().backward()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                total[step] = y.detach().double().sum()
            y.record_stream(side)
            del y
            optimizer.step()
            optimizer.zero_grad()
        assert arena.report().served_bytes > 0
        torch.cuda.synchronize()
    finally:
        arena.remove()
    assert total.tolist() == pytest.approx([expected] * 8, rel=1e-6)

"""Three hundred steps with recomputation and offload, beside the plain run: the same bits."""

from __future__ import annotations

import torch
from small_models import VOCAB, gpt2

from fusedops import memory

STEPS = 300


def _train(policy: memory.Policy | None) -> tuple[list[float], list[torch.Tensor]]:
    model = gpt2(layers=2, hidden=32)
    if policy is not None:
        settings = memory.OffloadSettings(least_bytes=1, check=True)
        memory.apply(model, policy, offload_settings=settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(2)
    torch.manual_seed(3)
    losses = []
    for _ in range(STEPS):
        # Each row counts up from somewhere: something that can be learned.
        start = torch.randint(VOCAB, (4, 1), generator=draw)
        ids = (start + torch.arange(16)) % VOCAB
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses, [each.detach() for each in model.parameters()]


def test_300_steps_with_recompute_and_offload_keep_every_bit() -> None:
    expected, weights = _train(None)
    policy = memory.Policy(memory.recompute("transformer.h.0"), memory.offload("transformer.h.*"))
    found, others = _train(policy)
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(others, weights, strict=True))
    assert expected[-1] < 0.5 * expected[0]

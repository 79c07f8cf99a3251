"""Seeding without torch's cost."""

from __future__ import annotations

import torch

from fusedops._core.generators import seed_generators


def test_the_numbers_are_those_after_torchs_manual_seed() -> None:
    for seed in (0, 11, 2**63 + 5, -3):
        torch.manual_seed(seed)
        expected = torch.rand(5), torch.randint(2**62, (3,))
        torch.rand(7)
        seed_generators(seed)
        drawn = torch.rand(5), torch.randint(2**62, (3,))
        assert all(map(torch.equal, drawn, expected)), seed

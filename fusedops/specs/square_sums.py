"""What tests and fuzzers need to know of ``square_sums``."""

from __future__ import annotations

import torch

from fusedops.specs.spec import MultiTensorSpec, Sample


def _calls(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    other = torch.float64 if dtype == torch.float32 else torch.float32
    return [
        Sample("one", ([drawn(5)],)),
        Sample("shapes", ([drawn(7), drawn(3, 5), drawn(), drawn(0, 4), drawn(130)],)),
        Sample("dtypes", ([drawn(9), drawn(9).to(other)],)),
        Sample("strides", ([drawn(4, 6).t(), drawn(4, 6)[:, ::2], drawn(1).expand(5)],)),
    ]


SPEC = MultiTensorSpec("square_sums", _calls)

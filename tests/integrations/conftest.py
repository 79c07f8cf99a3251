import pytest
import torch

from fusedops.integrations.hf.rules import torch_modules


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let linear layers of all dtypes be fused, which in float32 depends on the processor."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    monkeypatch.setattr(torch_modules, "_SERVED", dtypes)

"""Functions of trl, replaced and given back, in modules that stand for trl's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import fusedops
from fusedops.integrations.trl import use_fused_heads


def selective_log_softmax(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    whole = index.dim() == logits.dim()
    found = logits.log_softmax(-1).gather(-1, index if whole else index.unsqueeze(-1))
    return found if whole else found.squeeze(-1)


def entropy_from_logits(logits: torch.Tensor, chunk_size: int = 128) -> torch.Tensor:
    return torch.distributions.Categorical(logits=logits).entropy()


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return what makes a module of trl that has imported its two functions."""

    def module(name: str) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(
            selective_log_softmax=selective_log_softmax, entropy_from_logits=entropy_from_logits
        )
        monkeypatch.setitem(sys.modules, name, made)
        return made

    for name in ("trl", "trl.trainer", "trl.trainer.utils"):
        module(name)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trainers_get_the_fused_numbers_and_their_own_back(
    trl: Callable[[str], ModuleType], dtype: torch.dtype
) -> None:
    trainer = trl("trl.trainer.grpo_trainer")
    logits, index = torch.randn(2, 5, 40).to(dtype), torch.randint(40, (2, 5))
    top = logits.topk(3).indices
    restore = use_fused_heads()
    assert use_fused_heads() is restore
    later = trl("trl.trainer.other")
    later.selective_log_softmax = trainer.selective_log_softmax  # imported after the replacement
    fusedops.reset_counters()
    logprobs = trainer.selective_log_softmax(logits, index)
    entropy = trainer.entropy_from_logits(logits, chunk_size=1)
    assert fusedops.counters() == {("token_logprobs", "cpp"): 2}
    torch.testing.assert_close(logprobs, selective_log_softmax(logits, index))
    torch.testing.assert_close(entropy, entropy_from_logits(logits.float()).to(dtype))
    assert torch.equal(
        trainer.selective_log_softmax(logits, top), selective_log_softmax(logits, top)
    )
    restore()
    for module in (trainer, later, sys.modules["trl.trainer.utils"]):
        assert vars(module)["selective_log_softmax"] is selective_log_softmax
        assert vars(module)["entropy_from_logits"] is entropy_from_logits


def test_an_unknown_trl_is_refused(trl: Callable[[str], ModuleType]) -> None:
    utils = trl("trl.trainer.utils")
    utils.entropy_from_logits = lambda scores: scores  # type: ignore[attr-defined]
    with pytest.raises(fusedops.UnsupportedError, match=r"no entropy_from_logits\(logits, ...\)"):
        use_fused_heads()
    del utils.selective_log_softmax
    with pytest.raises(fusedops.UnsupportedError, match="found nothing of that name"):
        use_fused_heads()
    assert utils.entropy_from_logits is not entropy_from_logits

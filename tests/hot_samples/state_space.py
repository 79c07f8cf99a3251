"""Hot samples of the causal convolution and of state space models."""

from __future__ import annotations

from typing import Any

import torch

from hot_samples.call import HotCall, New

# Three tiles of 64 channels; of tokens three tiles and more for each of a GPU's programs.
_CHANNELS, _TOKENS = 192, 70000


def _convolution(*lengths: int) -> HotCall:
    """Return a call on packed sequences with a state, or on one sequence."""
    tokens = sum(lengths)

    def make(new: New) -> Any:
        rows = new(1, tokens, _CHANNELS).detach().transpose(1, 2).requires_grad_()
        call = (rows, new(_CHANNELS, 4, key="w"), new(_CHANNELS, key="b"))
        options: dict[str, Any] = {"activation": "silu"}
        if len(lengths) > 1:
            ends = torch.tensor([0, *lengths], device=new.device).cumsum(0)
            state = new(len(lengths), _CHANNELS, 3, key="state")
            options |= {"cu_seqlens": ends, "initial_state": state, "return_state": True}
        return call, options

    return HotCall("causal_conv1d", f"{len(lengths)} of {tokens} tokens", make)


CALLS: dict[str, list[HotCall]] = {
    "causal_conv1d": [_convolution(_TOKENS), _convolution(*[100] * 48)],
}

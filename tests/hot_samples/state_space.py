"""Hot samples of the causal convolution and of state space models."""

from __future__ import annotations

from typing import Any

import torch

from hot_samples.call import HotCall, New, in_float32

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


def _state_space(state_dim: int) -> HotCall:
    """Return a call on three sequences of three chunks and more."""

    def make(new: New) -> Any:
        x, dt = new(3, 144, 8, 64), new.wide(3, 144, 8, key="dt", shift=-1.0)
        B, C = (new(3, 144, 2, state_dim, key=name) for name in "BC")
        A = (-new.wide(8, grad=False, key="A").exp()).requires_grad_()
        options = {"D": new.wide(8, key="D"), "dt_softplus": True, "return_state": True}
        options["initial_state"] = new.wide(3, 8, 64, state_dim, key="state")
        return (x, dt, A, B, C), options

    return HotCall("selective_state_space", f"3x144x8x64, state {state_dim}", make)


_SPACES = [_state_space(176)]
CALLS: dict[str, list[HotCall]] = {
    "causal_conv1d": [_convolution(_TOKENS), _convolution(*[100] * 48)],
    "selective_state_space": [*_SPACES, *in_float32(*_SPACES)],
}

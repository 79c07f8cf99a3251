"""Hot samples of recurrences in chunks of tokens."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from hot_samples.call import HotCall, New

# Three chunks and one that is not full.
_LENGTHS = (48, 0, 50, 16)
_HEADS, _KEY_HEADS, _SIZE = 4, 2, 128


def _delta_rule(*, per_channel: bool) -> HotCall:
    def make(new: New) -> Any:
        tokens, size = sum(_LENGTHS), [_SIZE] * per_channel
        gate = new(1, tokens, _HEADS, *size, dtype=torch.float32, grad=False, key="gate")
        beta = new(1, tokens, _HEADS, dtype=torch.float32, grad=False, key="beta")
        args = (
            new(1, tokens, _KEY_HEADS, _SIZE, key="q"),
            new(1, tokens, _KEY_HEADS, _SIZE, key="k"),
            new(1, tokens, _HEADS, _SIZE, key="v"),
            (-gate.square() / 2).requires_grad_(),
            beta.sigmoid().requires_grad_(),
        )
        ends = torch.tensor([0, *accumulate(_LENGTHS)], device=new.device)
        shape = (len(_LENGTHS), _HEADS, _SIZE, _SIZE)
        state = new(*shape, dtype=torch.float32, key="state")
        options = {"cu_seqlens": ends, "initial_state": state, "qk_norm": True}
        return args, options | {"return_state": True}

    return HotCall("gated_delta_rule", "channels" if per_channel else "heads", make)


CALLS: dict[str, list[HotCall]] = {
    "gated_delta_rule": [_delta_rule(per_channel=False), _delta_rule(per_channel=True)],
}

"""trl: its trainers' log-probabilities and entropies of tokens by ``fusedops.token_logprobs``.

    from fusedops.integrations.trl import use_fused_heads
    restore = use_fused_heads()

Importing this module does not import ``trl``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from fusedops._core import imports
from fusedops._core.checks import UnsupportedError
from fusedops.ops.token_logprobs import token_logprobs

_UTILS = "trl.trainer.utils"
# Names of trl, which its trainers import from there, and their first parameters.
_PARAMETERS = {"selective_log_softmax": ["logits", "index"], "entropy_from_logits": ["logits"]}


def use_fused_heads() -> Callable[[], None]:
    """Let trl's trainers (SFT, DPO, GRPO and others) compute tokens' numbers by the fused op.

    Replaces ``selective_log_softmax`` and ``entropy_from_logits`` in ``trl.trainer.utils`` and in
    every module of trl that has imported them. The results have trl's shapes and dtypes. Top-k log
    probabilities (an index of as many dimensions as the logits) stay trl's. A second call changes
    nothing.

    Returns:
        A function without arguments that gives trl its functions back.

    Raises:
        ImportError: trl is not installed.
        UnsupportedError: this release of trl has no such functions, or with other arguments.

    Note:
        The backward recomputes the softmax: of each call the logits and four numbers per token are
        saved. A class of logit ``-inf`` adds nothing to the entropy, where trl's is NaN.
    """
    utils = imports.needed(_UTILS, "trl", "fusedops.integrations.trl")
    theirs: dict[str, Any] = {name: getattr(utils, name, None) for name in _PARAMETERS}
    for name, expected in _PARAMETERS.items():
        found = list(inspect.signature(theirs[name]).parameters) if theirs[name] else None
        if found is None or found[: len(expected)] != expected:
            raise UnsupportedError(
                f"use_fused_heads: {_UTILS} of this trl has no {name}({', '.join(expected)}, ...), "
                f"found {'nothing of that name' if found is None else f'arguments {found}'}"
            )
    if hasattr(theirs["entropy_from_logits"], "original"):
        return _restore
    ours = {
        "selective_log_softmax": _fused_log_softmax(theirs["selective_log_softmax"]),
        "entropy_from_logits": _fused_entropy(theirs["entropy_from_logits"]),
    }
    _replace(lambda name, value: ours[name] if value is theirs[name] else value)
    return _restore


def _restore() -> None:
    _replace(lambda _, value: getattr(value, "original", value))


def _replace(change: Callable[[str, Any], Any]) -> None:
    """Change the functions in the modules of trl that were imported."""
    for module_name, module in list(sys.modules.items()):
        if module is not None and module_name.partition(".")[0] == "trl":
            for name in _PARAMETERS.keys() & vars(module).keys():
                setattr(module, name, change(name, vars(module)[name]))


def _fused_log_softmax(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def selective_log_softmax(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if index.dim() == logits.dim():
            return original(logits, index)
        return token_logprobs(logits, index.long()).logprobs.to(logits.dtype)

    selective_log_softmax.original = original  # type: ignore[attr-defined]
    return selective_log_softmax


def _fused_entropy(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def entropy_from_logits(logits: torch.Tensor, chunk_size: int = 128) -> torch.Tensor:
        target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        entropy = token_logprobs(logits, target, return_entropy=True).entropy
        assert entropy is not None
        return entropy.to(logits.dtype)

    entropy_from_logits.original = original  # type: ignore[attr-defined]
    return entropy_from_logits

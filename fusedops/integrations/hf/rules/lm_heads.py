"""The rule for language models that compute their loss in their own forward.

They end with torch's cross-entropy of all logits, and nothing that could be replaced on its own.
The fused forward runs theirs without labels and computes the loss from the logits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.rules import losses
from fusedops.integrations.hf.rules.rule import PatchRule, copyable, global_hooks, subclass
from fusedops.ops.cross_entropy import cross_entropy

Arguments = dict[str, Any]


def needs_decoder_input(arguments: Arguments) -> bool:
    """Return whether the decoder's input is to be made of the labels."""
    names = ("decoder_input_ids", "decoder_inputs_embeds")
    return all(arguments.get(name) is None for name in names)


@copyable
def head_rule(
    original: type[nn.Module],
    module_name: str,
    from_labels: Callable[[Any, torch.Tensor, Arguments], Arguments | None] | None = None,
) -> PatchRule:
    """Return the rule for a model whose forward ends with a cross-entropy of its own.

    Args:
        original: the class.
        module_name: holds the patched class.
        from_labels: returns the arguments of the forward without labels, with all that theirs
            derives from the labels except the loss; if it returns ``None``, theirs computes all.
    """
    theirs: Any = original.forward
    names = list(inspect.signature(theirs).parameters)[1:]

    @functools.wraps(theirs)  # the signature tells Trainer and generate what the model takes
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        labels = arguments.pop("labels", None)
        if type(labels) is not torch.Tensor or labels.dtype != torch.int64 or global_hooks():
            return theirs(self, *args, **kwargs)
        given = arguments if from_labels is None else from_labels(self, labels, arguments)
        if given is None:
            return theirs(self, *args, **kwargs)
        as_dict = given.pop("return_dict", None)
        output = theirs(self, **given, return_dict=True)
        output = type(output)(loss=_loss(output.logits, labels), **output)
        as_dict = self.config.return_dict if as_dict is None else as_dict
        return output if as_dict else output.to_tuple()

    body = type("_Head", (nn.Module,), {"forward": forward})
    return PatchRule(
        original,
        subclass(original, body, module_name),
        ("cross_entropy",),
        losses.LEVEL,
        obstacle=lambda model: _unknown(original),
    )


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    labels = labels.to(logits.device)
    if not losses.served(logits, labels):
        return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
    return cross_entropy(logits, labels.reshape(logits.shape[:-1]))


def _unknown(original: type[nn.Module]) -> str | None:
    """Return why ``original.forward`` is not one that ends with a cross-entropy of its own."""
    theirs: Any = inspect.unwrap(original.forward)
    known = theirs.__code__.co_names
    if "CrossEntropyLoss" in known and "loss_function" not in known:
        return None
    return f"{original.__name__}.forward of this transformers computes another loss"

"""Small models of other libraries, with inputs and what becomes of their outputs.

``MODELS[name]()`` returns a model with random weights, its inputs, and a function from its output
to a loss and to the tensors that are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, dict[str, Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]
BATCH, SEQ, VOCAB = 4, 8, 64
_SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def ids() -> torch.Tensor:
    return torch.randint(1, VOCAB, (BATCH, SEQ))


def language_loss(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return output.loss, output.logits


def class_loss(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    target = torch.arange(logits.shape[0]) % logits.shape[1]
    return nn.functional.cross_entropy(logits, target), logits


def unequal_labels(tokens: torch.Tensor) -> torch.Tensor:
    """Labels of which ranks have different numbers."""
    labels = tokens.clone()
    labels[0, 3:] = -100
    return labels


def _language_model(model: str, config: str, **sizes: Any) -> Made:
    import transformers

    tokens = ids()
    inputs = {"input_ids": tokens, "labels": unequal_labels(tokens)}
    made = getattr(transformers, model)(getattr(transformers, config)(vocab_size=VOCAB, **sizes))
    return made.eval(), inputs, language_loss


def _bert() -> Made:
    model, inputs, loss_of = _language_model(
        "BertForMaskedLM", "BertConfig", **_SIZES, intermediate_size=64
    )
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 5:] = 0
    return model, inputs | {"attention_mask": mask}, loss_of


def _image_model(name: str, **sizes: Any) -> Made:
    import transformers

    config = getattr(transformers, f"{name}Config")(**sizes, num_labels=4)
    model = getattr(transformers, f"{name}ForImageClassification")(config).eval()
    return model, {"pixel_values": torch.randn(BATCH, 3, 16, 16)}, class_loss


def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(32 * SEQ, 4))
    return model.eval(), {"input": torch.randn(BATCH, SEQ, 32)}, class_loss


def torchvision_vit() -> Made:
    from coverage_libraries import import_torchvision

    import_torchvision()
    from torchvision.models import VisionTransformer

    model = VisionTransformer(16, 8, 2, 4, 32, 64, num_classes=4).eval()
    nn.init.normal_(model.heads[-1].weight)
    return model, {"x": torch.randn(BATCH, 3, 16, 16)}, class_loss


def torchvision_resnet() -> Made:
    from coverage_libraries import import_torchvision

    import_torchvision()
    from torchvision.models.resnet import BasicBlock, ResNet

    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4).eval()
    return model, {"x": torch.randn(BATCH, 3, 32, 32)}, class_loss


def timm_convnext() -> Made:
    from timm.models.convnext import ConvNeXt

    model = ConvNeXt(num_classes=4, depths=(1, 1, 1, 1), dims=(8, 16, 16, 16)).eval()
    return model, {"x": torch.randn(BATCH, 3, 64, 64)}, class_loss


_STAGES = {"hidden_sizes": [32, 64], "depths": [1, 1]}
_LLAMA = _SIZES | {"num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 64}
_GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
_T5 |= {"decoder_start_token_id": 0}
MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": partial(_language_model, "GPT2LMHeadModel", "GPT2Config", **_GPT2, use_cache=False),
    "bert": _bert,
    "llama": partial(_language_model, "LlamaForCausalLM", "LlamaConfig", **_LLAMA, use_cache=False),
    "t5": partial(
        _language_model, "T5ForConditionalGeneration", "T5Config", **_T5, use_cache=False
    ),
    "vit": partial(
        _image_model, "ViT", **_SIZES, intermediate_size=64, image_size=16, patch_size=8
    ),
    "resnet": partial(_image_model, "ResNet", embedding_size=32, layer_type="basic", **_STAGES),
    "convnext": partial(_image_model, "ConvNext", num_stages=2, patch_size=4, **_STAGES),
    "encoder": encoder,
    "torchvision_vit": torchvision_vit,
    "torchvision_resnet": torchvision_resnet,
    "timm_convnext": timm_convnext,
}
LIBRARIES = {"torchvision_vit": "torchvision", "torchvision_resnet": "torchvision"}
LIBRARIES["timm_convnext"] = "timm"

"""Small models of other libraries, with inputs and what becomes of their outputs.

``MODELS[name]()`` returns a model with random weights, its inputs, and a function from its output
to a loss and to the tensors that are compared.
"""

from __future__ import annotations

from collections.abc import Callable
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


def gpt2() -> Made:
    import transformers

    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=4, vocab_size=VOCAB, n_positions=16, use_cache=False
    )
    tokens = ids()
    inputs = {"input_ids": tokens, "labels": unequal_labels(tokens)}
    return transformers.GPT2LMHeadModel(config).eval(), inputs, language_loss


def bert() -> Made:
    import transformers

    config = transformers.BertConfig(**_SIZES, intermediate_size=64, vocab_size=VOCAB)
    tokens = ids()
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": unequal_labels(tokens)}
    return transformers.BertForMaskedLM(config).eval(), inputs, language_loss


def llama() -> Made:
    import transformers

    config = transformers.LlamaConfig(
        **{**_SIZES, "num_hidden_layers": 2},
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=VOCAB,
        use_cache=False,
    )
    tokens = ids()
    inputs = {"input_ids": tokens, "labels": unequal_labels(tokens)}
    return transformers.LlamaForCausalLM(config).eval(), inputs, language_loss


def t5() -> Made:
    import transformers

    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        vocab_size=VOCAB,
        use_cache=False,
        decoder_start_token_id=0,
    )
    tokens = ids()
    inputs = {"input_ids": tokens, "labels": unequal_labels(tokens)}
    return transformers.T5ForConditionalGeneration(config).eval(), inputs, language_loss


def vit() -> Made:
    import transformers

    config = transformers.ViTConfig(
        **_SIZES, intermediate_size=64, image_size=16, patch_size=8, num_labels=4
    )
    model = transformers.ViTForImageClassification(config).eval()
    return model, {"pixel_values": torch.randn(BATCH, 3, 16, 16)}, class_loss


def resnet() -> Made:
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic", num_labels=4
    )
    model = transformers.ResNetForImageClassification(config).eval()
    return model, {"pixel_values": torch.randn(BATCH, 3, 16, 16)}, class_loss


def convnext() -> Made:
    import transformers

    config = transformers.ConvNextConfig(
        hidden_sizes=[32, 64], depths=[1, 1], num_stages=2, patch_size=4, num_labels=4
    )
    model = transformers.ConvNextForImageClassification(config).eval()
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


MODELS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        gpt2,
        bert,
        llama,
        t5,
        vit,
        resnet,
        convnext,
        encoder,
        torchvision_vit,
        torchvision_resnet,
        timm_convnext,
    )
}
LIBRARIES = {"torchvision_vit": "torchvision", "torchvision_resnet": "torchvision"}
LIBRARIES["timm_convnext"] = "timm"

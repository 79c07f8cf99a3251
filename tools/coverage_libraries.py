"""What `fusedops.patch` fuses in models of other libraries, with the values compared.

One model of each architecture of timm and torchvision, and small ones of diffusers, open_clip,
litgpt and x-transformers, is built on the CPU. The output and the gradients of the patched model
(level O3) must be those of the stock model. The rows go to docs/reports/libraries.json, from which
`tools/coverage_page.py` makes a section of docs/coverage.md.

    make coverage-libraries                                   # installs them, writes the rows
    python tools/coverage_libraries.py timm/swin_transformer  # one row again, and its report

torchvision's wheel is built for another build of torch than the one that is pinned here: its own
operators are declared without kernels, which its classification models do not call.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from coverage_page import COLUMNS, LIBRARIES, TOLERANCE, TOLERANCE64, coverage
from rich.progress import track
from torch import nn
from torch.utils._pytree import tree_map_only

import fusedops

PACKAGES = {"open_clip": "open_clip_torch", "x_transformers": "x-transformers"}
# Words in the names of an architecture's models, from the smallest size on, and of large sizes.
SMALL = (
    *("atto", "femto", "pico", "nano", "micro", "tiny", "xxs", "xx_", "xs", "x_small", "small"),
    *("_s", "_t", "050", "_b"),
)
LARGE = ("large", "huge", "giant", "_l", "_h", "_g", "xl", "so400m", "enormous")


Made = tuple[nn.Module, dict[str, Any]]
# Library and architecture, as "timm/beit", and what returns the model and its keyword arguments.
Cases = Iterator[tuple[str, Callable[[], Made]]]


def import_torchvision() -> None:
    """Import torchvision; declare those of its own operators that have no kernels here."""
    declared = torch.library.Library("torchvision", "FRAGMENT")
    while True:
        try:
            importlib.import_module("torchvision")
            return
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            declared.define(f"{missing[1]}() -> Tensor")
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]


def image(size: int, batch: int = 2, channels: int = 3) -> torch.Tensor:
    """Return random images, ``[batch, channels, size, size]`` in float32."""
    return torch.randn(batch, channels, size, size)


def by_size(names: list[str]) -> list[str]:
    """Return the names of an architecture's models, those first that seem to be small."""

    def size(name: str) -> int:
        small = (index for index, word in enumerate(SMALL) if word in name)
        return next(small, len(SMALL) + any(word in name for word in LARGE))

    return sorted(names, key=size)


class TooLargeError(Exception):
    """An architecture has no model that fits the memory of a small machine."""


def smallest(names: list[str], make: Callable[[str], nn.Module]) -> nn.Module:
    """Return a model of an architecture, one with less than 60 million parameters if there is."""
    models: list[tuple[int, str]] = []
    for name in by_size(names)[:4]:
        model = make(name)
        models.append((sum(weight.numel() for weight in model.parameters()), name))
        if models[-1][0] < 60_000_000:
            return model
        del model
    if min(models)[0] > 150_000_000:
        raise TooLargeError(f"the smallest has {min(models)[0] / 1e6:.0f} million parameters")
    return make(min(models)[1])


def smallest_of_each(
    library: str,
    names: list[str],
    module_of: Callable[[str], str],
    create: Callable[..., nn.Module],
    inputs: Callable[[Any, str], dict[str, Any]],
) -> Cases:
    """Yield a model of each file of a library; ``inputs(model, name)`` returns its arguments."""
    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault(module_of(name).rpartition(".")[2], []).append(name)

    def make(names: list[str]) -> Made:
        model = smallest(names, lambda name: create(name, num_classes=10))
        return model, inputs(model, names[0])

    for file, names in sorted(by_file.items()):
        yield f"{library}/{file}", lambda names=names: make(names)


def timm_cases() -> Cases:
    """Yield a model of each file of timm's models."""
    import timm

    return smallest_of_each(
        "timm",
        timm.list_models(),
        lambda name: timm.model_entrypoint(name).__module__,
        timm.create_model,
        lambda model, _: {"x": image(model.pretrained_cfg["input_size"][-1])},
    )


def torchvision_cases() -> Cases:
    """Yield a model of each architecture that torchvision classifies images with."""
    from torchvision import models

    return smallest_of_each(
        "torchvision",
        models.list_models(module=models),
        lambda name: models.get_model_builder(name).__module__,
        models.get_model,
        lambda _, name: {"x": image(299 if "inception" in name else 224)},
    )


def diffusers_cases() -> Cases:
    """Yield small denoisers of diffusers, and an autoencoder."""
    import diffusers

    words, time = torch.randn(2, 7, 32), torch.tensor([1, 2])
    latents, pooled = image(8, channels=4), torch.randn(2, 64)
    layers: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
    channels = {"in_channels": 4, "out_channels": 4}
    denoised = {"hidden_states": latents, "timestep": time}
    prompted = denoised | {"encoder_hidden_states": words}

    dit = layers | channels | {"out_channels": 8, "sample_size": 8, "num_embeds_ada_norm": 1000}
    pixart = layers | {"in_channels": 4, "out_channels": 8, "sample_size": 8}
    pixart |= {"cross_attention_dim": 64, "caption_channels": 32}
    pixart |= {"use_additional_conditions": False}
    sizes = {"resolution": None, "aspect_ratio": None}
    sd3 = layers | channels | {"sample_size": 8, "patch_size": 1, "joint_attention_dim": 32}
    sd3 |= {"caption_projection_dim": 64, "pooled_projection_dim": 64}
    flux = layers | {"patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1}
    flux |= {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    flux |= {"axes_dims_rope": (4, 4, 8)}
    places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3)}
    places |= {"hidden_states": torch.randn(2, 16, 16), "pooled_projections": torch.randn(2, 32)}
    wan = layers | channels | {"patch_size": (1, 2, 2), "num_attention_heads": 2}
    wan |= {"attention_head_dim": 12, "text_dim": 32, "freq_dim": 256, "ffn_dim": 32}
    wan |= {"cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32}
    blocks = {"block_out_channels": (32, 64), "norm_num_groups": 8}
    unet = channels | blocks | {"layers_per_block": 1, "sample_size": 8, "attention_head_dim": 8}
    unet |= {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
    unet |= {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 32}
    coder = blocks | {"down_block_types": ("DownEncoderBlock2D",) * 2}
    coder |= {"up_block_types": ("UpDecoderBlock2D",) * 2}
    for name, options, inputs in (
        ("DiTTransformer2DModel", dit, denoised | {"class_labels": time}),
        ("PixArtTransformer2DModel", pixart, prompted | {"added_cond_kwargs": sizes}),
        ("SD3Transformer2DModel", sd3, prompted | {"pooled_projections": pooled}),
        ("FluxTransformer2DModel", flux, prompted | places),
        (
            *("WanTransformer3DModel", wan),
            prompted | {"hidden_states": torch.randn(2, 4, 2, 8, 8)},
        ),
        (
            *("UNet2DConditionModel", unet),
            {"sample": latents, "timestep": 3, "encoder_hidden_states": words},
        ),
        ("AutoencoderKL", coder, {"sample": image(32)}),
    ):
        kind = getattr(diffusers, name)
        yield (
            f"diffusers/{name}",
            lambda kind=kind, options=options, inputs=inputs: (kind(**options), inputs),
        )


def open_clip_cases() -> Cases:
    """Yield a small CLIP, and a CoCa."""
    from open_clip import coca_model, model

    vision = {"image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8}
    text = {"context_length": 16, "vocab_size": 99, "width": 64, "heads": 4, "layers": 2}
    inputs = {"image": image(32), "text": torch.randint(1, 99, (2, 16))}
    yield "open_clip/CLIP", lambda: (model.CLIP(64, vision, text), inputs)
    decoder = coca_model.MultimodalCfg(**text, dim_head=16)
    pooled = vision | {"attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True}
    with_class = text | {"embed_cls": True, "output_tokens": True, "vocab_size": 99}
    yield "open_clip/CoCa", lambda: (coca_model.CoCa(64, decoder, with_class, pooled), inputs)


def litgpt_cases() -> Cases:
    """Yield the GPT of litgpt in the configurations of some families."""
    from litgpt import GPT, Config

    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "padded_vocab_size": 128, "block_size": 64}
    sizes |= {"intermediate_size": 96, "head_size": 16}
    groups = {"pythia-14m": 4, "Llama-3.2-1B": 2, "Gemma-2-2b": 2, "phi-2": 4}
    groups |= {"Qwen2.5-0.5B": 2, "OLMo-2-1124-7B": 2}
    for name, number in groups.items():
        config = Config.from_name(name, **sizes, n_query_groups=number)

        def make(config: Any = config) -> Made:
            return GPT(config), {"idx": torch.randint(128, (2, 16))}

        yield f"litgpt/{name}", make


def x_transformers_cases() -> Cases:
    """Yield decoders and an encoder of x-transformers with options that change their layers."""
    from x_transformers import Decoder, Encoder, TransformerWrapper, ViTransformerWrapper

    sizes: dict[str, Any] = {"dim": 64, "depth": 2, "heads": 4, "attn_dim_head": 16}
    gated = {"rotary_pos_emb": True, "use_rmsnorm": True, "ff_glu": True, "ff_swish": True}
    for name, options in {
        "decoder": {},
        "decoder, flash": {"attn_flash": True},
        "decoder, rotary, RMSNorm, SwiGLU": gated | {"attn_flash": True},
        "decoder, ALiBi, groups": {"alibi_pos_bias": True, "attn_kv_heads": 2, "attn_flash": True},
    }.items():

        def make(options: dict[str, Any] = options) -> Made:
            layers = Decoder(**sizes, **options)
            model = TransformerWrapper(num_tokens=128, max_seq_len=32, attn_layers=layers)
            return model, {"x": torch.randint(128, (2, 16))}

        yield f"x_transformers/{name}", make

    def make_vision() -> Made:
        layers, picture = Encoder(**sizes), {"image_size": 32, "patch_size": 8}
        model = ViTransformerWrapper(**picture, num_classes=10, attn_layers=layers)
        return model, {"img": image(32)}

    yield "x_transformers/vision", make_vision


CASES = {
    "timm": timm_cases,
    "torchvision": torchvision_cases,
    "diffusers": diffusers_cases,
    "open_clip": open_clip_cases,
    "litgpt": litgpt_cases,
    "x_transformers": x_transformers_cases,
}


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the floating tensors of what a model returns."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    values = output.values() if hasattr(output, "values") else output
    if hasattr(output, "latent_dist") or not isinstance(output, (dict, tuple, list)):
        values = vars(output).values()
    return [tensor for value in values if value is not None for tensor in tensors_of(value)]


def values_of(model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the outputs of a model, and the gradients of the sum of their squares.

    Each is divided by its largest element, a gradient at least by a thousandth of the largest of
    all gradients: one that is zero but for rounding is noise.
    """
    model.zero_grad()
    torch.manual_seed(1)
    outputs = tensors_of(model(**copy.deepcopy(inputs)))
    torch.stack([output.float().square().sum() for output in outputs]).sum().backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    least = max(gradient.abs().max() for gradient in gradients) / 1000
    return [output.detach() / output.detach().abs().max() for output in outputs] + [
        gradient / torch.maximum(gradient.abs().max(), least) for gradient in gradients
    ]


def difference(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference of the elements of two lists of tensors."""
    assert [value.shape for value in actual] == [value.shape for value in expected]
    return max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))


def fill_zero_weights(model: nn.Module) -> None:
    """Draw the weights that begin at zero, as those of many heads: all outputs would be zero."""
    for weight in model.parameters():
        if weight.dim() > 1 and not weight.any():
            nn.init.normal_(weight, std=0.02)


def row_of(name: str, make: Callable[[], Made]) -> dict[str, Any]:
    """Return the row of a model: what is fused in which way, and how far its values are off."""
    torch.manual_seed(0)
    model, inputs = make()
    fill_zero_weights(model)
    model.eval()  # what is drawn in training may be drawn in another order
    patched = copy.deepcopy(model)
    entry = coverage(name, patched, "")
    stock = values_of(model, inputs)
    row = {
        "name": name,
        "cells": {column: entry.cell(column) for column in COLUMNS},
        "difference": difference(values_of(patched, inputs), stock),
    }
    if row["difference"] > TOLERANCE:
        # A maximum or a ReLU may fall on either side of two close numbers: less so in float64.
        patched, model = patched.double(), model.double()
        inputs = tree_map_only(torch.Tensor, _in_float64, inputs)
        row["difference64"] = difference(values_of(patched, inputs), values_of(model, inputs))
    return row


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def is_wrong(row: dict[str, Any]) -> bool:
    """Return whether a model failed, or computes something else when it is patched."""
    if "error" in row:
        return not row["error"].startswith(TooLargeError.__name__)
    return not (row["difference"] <= TOLERANCE or row["difference64"] <= TOLERANCE64)


def main() -> int:
    """Write the rows; the exit status is 1 for a model that computes something else."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these; their reports are printed as well")
    names = parser.parse_args().names
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import_torchvision()
    libraries = dict.fromkeys(name.partition("/")[0] for name in names) or CASES
    cases = {name: make for library in libraries for name, make in CASES[library]()}
    if names:
        cases = {name: make for name, make in cases.items() if name in names}
        for make in cases.values():
            print(fusedops.patch(make()[0], level="O3"))
    rows: list[dict[str, Any]] = []
    for name, make in track(cases.items(), "models"):
        try:
            rows.append(row_of(name, make))
        except Exception as error:
            rows.append({"name": name, "error": f"{type(error).__name__}: {error}"[:160]})
    record = json.loads(LIBRARIES.read_text()) if names else {"rows": []}
    new = {row["name"]: row for row in rows}
    record["rows"] = [new.pop(row["name"], row) for row in record["rows"]] + list(new.values())
    record["versions"] = {name: version(PACKAGES.get(name, name)) for name in CASES}
    LIBRARIES.parent.mkdir(exist_ok=True)
    LIBRARIES.write_text(json.dumps(record, indent=1) + "\n")
    wrong = [row for row in rows if is_wrong(row)]
    for row in wrong:
        print(
            row["name"], row.get("error") or f"differs by {row['difference']:.2g}", file=sys.stderr
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

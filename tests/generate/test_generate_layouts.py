"""``fusedops generate`` on several processes: what any layout trained, what transformers wrote.

And mistakes: each is a line of the first process and exit code 2 of all, and nobody waits.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generate_command import run_and_export
from typer.testing import CliRunner

from fusedops.cli.main import app
from fusedops.generation.load import load
from fusedops.launch.processes import Ranks, initialize_distributed
from fusedops.models import Transformer, load_huggingface, preset, save_huggingface
from fusedops.testing import threads
from fusedops.train import InputError

pytestmark = pytest.mark.distributed
PROMPT = "1 plus 1 "
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 255,
}
GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
# What transformers calls a model, its sizes, and how two processes share it.
FOLDERS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "gpt2": ("GPT2", GPT2 | {"eos_token_id": 255}, ["tp=2"]),
    "llama": ("Llama", SIZES, ["pp=2"]),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4}, ["dp=2", "ep=2"]),
}


def _sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", f"parallel.{value}")]


def _train(rank: int, folder: Path, parallel: dict[str, Any]) -> None:
    data = {"train": [f"{folder}/text.txt"]}
    run_and_export(folder, "tiny-mixtral", 64, 3, data, 1e-2, parallel)


def _command(rank: int, *args: str) -> tuple[int, str, str]:
    """Run the command as one of the processes that torchrun starts."""
    done = CliRunner().invoke(app, ["generate", *args])
    expected = done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.stdout, done.stderr + ("" if expected else repr(done.exception))


def _commands(rank: int, commands: list[list[str]]) -> list[tuple[int, str, str]]:
    return [_command(rank, *command) for command in commands]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("".join(f"{n} plus {n} is {2 * n}.\n" for n in range(200)))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, {"pp": 2}),
        pytest.param(8, {"pp": 2, "dp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=["one", "pp", "pp-dp-tp"],
)
def test_what_any_layout_trained_any_other_generates(
    ranks: int, parallel: dict[str, Any], folder: Path, on_processes: Any
) -> None:
    on_processes(_train, ranks, folder, parallel)
    # Weights are those of the checkpoint, wherever they were.
    with initialize_distributed("cpu") as alone:
        saved = load(folder / "run", alone).engine.model
    export = load_huggingface(folder / "export")
    for (name, one), other in zip(saved.named_parameters(), export.parameters(), strict=True):
        assert torch.equal(one, other), name
    run, prompts = str(folder / "run"), ["--prompt", PROMPT, "--prompt", "12"]
    options = [[], ["--temperature", "0.8", "--top-k", "5"], ["--beams", "2"]]
    calls = [[run, *prompts, "--tokens", "12", *option] for option in options]
    wanted = _commands(0, calls)
    assert [code for code, *_ in wanted] == [0, 0, 0], wanted
    assert f"{run}, step 3, 1 process on cpu" in wanted[0][2]
    spread = [[], ["cp=2"], ["pp=2"], ["dp=2", "ep=2"]]  # by default tp
    for each in spread:
        first, second = on_processes(_commands, 2, [[*call, *_sets(*each)] for call in calls])
        for one, other, (_, text, _) in zip(first, second, wanted, strict=True):
            assert one[:2] == (0, text) and "2 processes" in one[2], one[2]
            assert other == (0, "", "")


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_transformers_on_two_processes(
    name: str, tmp_path: Path, on_processes: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    kind, sizes, sets = FOLDERS[name]
    torch.manual_seed(0)
    values = getattr(transformers, f"{kind}Config")(**sizes)
    theirs = transformers.AutoModelForCausalLM.from_config(values).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path)
    tokens = torch.tensor([list(PROMPT.encode())])
    found = theirs.generate(tokens, max_new_tokens=16, do_sample=False, pad_token_id=0)
    made = found[0, tokens.shape[1] :].tolist()
    text = bytes(each for each in made if each != 255).decode(errors="replace")
    given = [str(tmp_path), "--tokenizer", "bytes", "--prompt", PROMPT, "--tokens", "16"]
    first, second = on_processes(_command, 2, *given, *_sets(*sets))
    assert first[:2] == (0, f"{PROMPT}{text}\n"), first[2]
    assert second == (0, "", "")


# Of each moment at which a mistake is found; the others: test_generate_command.py.
BAD: list[tuple[list[str], str]] = [
    (["--prompt", ""], "got an empty one"),
    (["--dtype", "int8"], "--dtype must be one of"),
    (["--beams", "300"], "beams must be at most the 256 words, got 300"),
    (["--step", "3"], "--step is of a run"),
    (_sets("pt=2"), "did you mean 'tp'"),
    (_sets("tp=1", "dp=1"), "must be the 2 processes"),
    (_sets("pp=2", "pipeline_schedule=zbv"), "the 2 layers, got 4"),
    (_sets("dp=2", "ep=2"), "without exp"),
]


def test_a_mistake_is_a_line_of_the_first_process_and_ends_all(
    tmp_path: Path, on_processes: Any
) -> None:
    save_huggingface(Transformer(preset("tiny-gpt2")), tmp_path)
    given = [str(tmp_path), "--tokenizer", "bytes", "--prompt", PROMPT]
    first, second = on_processes(_commands, 2, [[*given, *args] for args, _ in BAD])
    for (_, words), (code, text, told), other in zip(BAD, first, second, strict=True):
        assert code == 2 and not text, told
        (line,) = told.splitlines()
        assert line.startswith("fusedops: error: ") and words in line, line
        assert other == (2, "", ""), words


def _load(rank: int, folder: Path) -> str:
    """Load a folder that the second of two machines does not see."""
    store, here = torch.distributed.HashStore(), torch.device("cpu")
    seen = folder if rank == 0 else folder / "nowhere"
    with pytest.raises(InputError) as caught:
        load(seen, Ranks(rank, 2, here, store), tokenizer="bytes")
    return str(caught.value)


def test_a_folder_that_one_process_does_not_see_ends_all(tmp_path: Path) -> None:
    save_huggingface(Transformer(preset("tiny-gpt2")), tmp_path)
    first, second = threads.run(_load, 2, tmp_path)
    assert first == second and f"{tmp_path / 'nowhere'} is no checkpoint" in first


@pytest.mark.slow
def test_the_command_starts_its_processes_and_ends_with_their_code(tmp_path: Path) -> None:
    save_huggingface(Transformer(preset("tiny-gpt2")), tmp_path)
    start = [sys.executable, "-m", "fusedops", "generate", str(tmp_path), "--tokenizer", "bytes"]
    start += ["--processes", "2", "--device", "cpu"]
    done = subprocess.run([*start, "--prompt", PROMPT], capture_output=True, text=True)
    assert done.returncode == 0 and "2 processes on cpu" in done.stderr, done.stderr
    assert (0, done.stdout) == _command(0, str(tmp_path), *start[5:7], "--prompt", PROMPT)[:2]
    bad = subprocess.run([*start, "--prompt", "a" * 64], capture_output=True, text=True)
    told = [line for line in bad.stderr.splitlines() if "error" in line]
    assert bad.returncode == 2 and not bad.stdout and len(told) == 1, bad.stderr
    assert told[0].startswith("fusedops: error: ") and "prompt alone is too long" in told[0]

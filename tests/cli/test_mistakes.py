"""Help, completion and usage errors need no torch; a mistake is one sentence and exit code 2."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_records import invoke

from fusedops.bench import limits

CONFIG = """
out = "run"
steps = 2
batch = 2
device = "cpu"
tune_host = false
model = { preset = "tiny-gpt2" }
data = { train = ["text.txt"], seq_len = 16 }
"""
FILES = {
    "text.txt": b"one and two is three. " * 40,
    "good.toml": CONFIG.encode(),
    "equals.toml": b"steps = = 1",
    "latin.toml": b"\xff",
    "short.toml": b"steps = 1",
    "list.json": b"[1]",
}
OPS = [
    ("layer_nrom", "unknown op 'layer_nrom': did you mean layer_norm?"),
    ("gelu --all", "name ops or say --all, not both"),
    ("--dtype float23", "unknown dtype 'float23': did you mean float"),
    ("--dtype ''", "--dtype is empty"),
    ("layer_norm --sizes 16x769", "unknown sizes '16x769': did you mean 16x768?"),
    ("layer_norm --sizes 9x9", "a size of your own is --shape rows=N,columns=N"),
    ("--variants eagre", "unknown variants 'eagre': did you mean eager?"),
    ("--device gpu", "unknown device 'gpu'"),
    ("--device cpu:7", "there is no device cpu:7: the CPU is one device, cpu"),
    ("layer_norm --json missing/a.json", "missing does not exist; create it first"),
    ("layer_norm --json -", "cannot print to -: give a path"),
]
SHAPES = [
    ("layer_norm --shape rows=8,cols=4", "did you mean columns? known: rows, columns"),
    ("layer_norm --shape rows=8", "lacks columns: it takes rows=N,columns=N"),
    ("layer_norm --shape rows=0,columns=4", "rows must be an integer from 1 on"),
    ("moe_layer --shape tokens=8", "takes tokens=N,hidden=N,size=N,num_experts=N,top_k=N"),
    ("layer_norm --shape rows=8,rows=4", "--shape has rows twice"),
    ("layer_norm --shape 8x4", "--shape must be rows=N,columns=N, got '8x4'"),
    ("gelu --shape shape=8,0", "--shape must be shape=NxN,approximate=WORD, got '0'"),
    ("mlp --shape recompute=yes", "recompute must be true or false, got 'yes'"),
    ("add_rms_norm --shape p=x", "p must be a number, got 'x'"),
    ("--shape rows=8,columns=4", "--shape needs the names of ops"),
    ("layer_norm --shape rows=8,columns=4 --all-sizes", "--shape needs the names"),
]
BENCHES = [
    ("compare none.json none.json", "cannot read none.json"),
    ("compare good.toml good.toml", "is not valid JSON"),
    ("compare latin.toml latin.toml", "is not a text file"),
    ("memory --json -", "cannot print to -: give a path"),
    ("communication --collectives all_reduced", "did you mean all_reduce"),
    ("communication --least 3000B --most 4000B", "no power of two"),
    ("communication --predict a.csv", "need --fit"),
    ("memory --family gpt3", "did you mean gpt2?"),
    ("models --family gpt3", "unknown family 'gpt3': did you mean gpt2?"),
    ("models --mode train", "unknown mode 'train': did you mean training?"),
    ("models --family bert --mode decoding", "bert: no decoder among them"),
    ("models --tokens 4", "--tokens must be sequences x tokens such as 4x256, got '4'"),
    ("models --hidden 40", "--hidden must be a multiple of 16, got 40"),
    ("scaling --preset no-such-model", "unknown model 'no-such-model'"),
]
PLANS = [
    ("", "--model is missing: a name (fusedops plan models) or config.json"),
    ("--model /no/config.json", "cannot read /no/config.json: No such file"),
    ("--model pangu13b", "unknown model 'pangu13b': did you mean pangu-13b?"),
    ("--model text.txt", "is no configuration: its name must end in .json"),
    ("--model list.json", "is no configuration of a model"),
    ("--model .", "cannot read config.json: No such file"),
    ("--model gpt2 --memory 80", "did you mean 80GiB? (80B would be bytes)"),
    ("--model gpt2 --ep 8", "ep must be 1 for a model without experts, got 8"),
    ("--model gpt2 --recompute ,", "--recompute is empty; known: none, selective"),
    ("--model gpt2 --recompute ful", "did you mean full?"),
    ("--model gpt2 --tp ,", "--tp is empty"),
    ("--model gpt2 --tp two", "--tp must be numbers from 1 to 65536"),
    (f"--model gpt2 --tp {'9' * 5000}", "--tp must be numbers from 1 to 65536"),
    ("--model gpt2 --zero ''", "--zero is empty"),
    ("--model gpt2 --zero 5", "--zero must be numbers from 0 to 3"),
    ("--model gpt2 --precision mix", "did you mean mixed?"),
    ("--model gpt2 --kernels fuse", "did you mean fused?"),
    ("--model gpt2 --offload states", "unknown offload 'states'"),
    ("--model gpt2 --schedule zbw", "did you mean zbv?"),
    ("--model gpt2 --devices 7 --tp 2", "must divide the 7 devices"),
    ("--model gpt2 --tp 2 --json /no/such/a.json", "folder /no/such does not exist"),
    ("time --model gpt2", "--device is missing: h100, a100-80 or a TOML file"),
    ("image --shape 1x3x8x8", "--device is missing: h100, a100-80 or a TOML file"),
]
SETTINGS = [
    ("datas.x=1", "unknown key 'datas' in the configuration: did you mean"),
    ("model.hidden=8", "unknown key 'hidden' in [model]: did you mean 'hidden"),
    ("optimizer.betas=[0.9]", "betas must be a list of 2, each a number, got"),
    ("optimizer.lr=0", "optimizer: lr must be positive and finite, got 0.0"),
    ("schedule.kind=cosin", "got 'cosin' (did you mean 'cosine'?)"),
    ("steps.a=1", "--set steps.a=1: steps is no table"),
    ("steps", "--set must be key=value"),
    ("model.preset=tiny-gtp2", "did you mean tiny-gpt2?"),
    ("model.vocab_size=64", "vocab_size must be at least 257, the tokenizer's"),
    ("model.seq_len=8", "seq_len must be at least data.seq_len, 16, got 8"),
    (
        "optimizer.no_decay=['*bias', 'layers.*.atention.querry.weight']",
        "'layers.*.atention.querry.weight' must match a parameter; the nearest names are layers.",
    ),
    ("data.train=['nothing.txt']", "the corpus nothing.txt does not exist"),
    ("data.tokenizer=nothing.json", "nothing.json cannot be read: No such file"),
    ("log.tensorboard=true", "log.tensorboard needs the package tensorboard"),
]
TRAININGS = [
    ("equals.toml", "equals.toml is not valid TOML: "),
    ("latin.toml", "latin.toml is not a text file"),
    ("short.toml", "short.toml: out is missing"),
    ("missing.toml", "--example missing.toml"),
    ("", "which configuration"),
    ("--example good.toml", "exists already"),
]
MISTAKES = {
    **{f"bench {words}": says for words, says in (*OPS, *SHAPES, *BENCHES)},
    **{f"plan {words}": says for words, says in PLANS},
    **{f"train {words}": says for words, says in TRAININGS},
    "doctor --device tpu": "no device 'tpu' here",
}
if not torch.cuda.is_available():
    MISTAKES["bench --device cuda"] = "this torch sees no CUDA device"
LINES = [pytest.param(shlex.split(line), says, id=line[:60]) for line, says in MISTAKES.items()]
LINES += [
    pytest.param(["train", "good.toml", "--set", setting], says, id=f"train --set {setting}")
    for setting, says in SETTINGS
]


@pytest.mark.parametrize(("words", "says"), LINES)
def test_a_mistake_is_one_sentence(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("measured before the input was checked")

    monkeypatch.setattr(limits, "measure_limits", never)
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    done = invoke(*words)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("fusedops: error: ") and says in line
    assert done.stdout == ""


RUN_ALL = """
import contextlib, io, json, os, sys
sys.argv = ["/bin/fusedops", *sys.argv[1:]]
from fusedops.cli.main import app
codes = {}
for line in json.loads(sys.argv[1]):
    sys.argv = ["fusedops", *line.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            app()
        except SystemExit as end:
            codes[line] = end.code
loaded = sorted({"torch", "numpy", "transformers", "matplotlib"} & set(sys.modules))
print(json.dumps([codes, loaded]))
"""
PLAN_NAMES = ("memory", "time", "image", "models")
COMMANDS = ("doctor", "plan", "train", "profile", "report", "generate", "demo", "bench")
BENCH_NAMES = (
    "run",
    "models",
    "memory",
    "arena",
    "communication",
    "device",
    "scaling",
    "generate",
)
HELP = [
    "--help",
    *(f"{name} --help" for name in COMMANDS),
    *(f"plan {name} --help" for name in PLAN_NAMES),
    *(f"bench {name} --help" for name in (*BENCH_NAMES, "compare")),
]
USAGE = [
    "nope",
    "--nope",
    "plan",
    "plan time",
    "plan image",
    "train",
    "profile",
]
USAGE += ["report", "train a.toml --processes 0", "bench models --layers 0", "demo --nope"]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_and_usage_errors_import_no_torch() -> None:
    done = run("-c", RUN_ALL, json.dumps([*HELP, *USAGE]))
    assert done.returncode == 0, done.stderr
    codes, loaded = json.loads(done.stdout.splitlines()[-1])
    assert codes == {**dict.fromkeys(HELP, 0), **dict.fromkeys(USAGE, 2)}
    assert loaded == []


@pytest.mark.parametrize("module", ["fusedops", "fusedops.cli.main"])
def test_the_module_form_of_the_command_imports_no_torch(module: str) -> None:
    # What the environment says wrongly does not hide the help.
    done = run("-X", "importtime", "-m", module, "--help", FUSEDOPS_BACKEND="tritn")
    assert done.returncode == 0 and "doctor" in done.stdout
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "fusedops.cli.main" in modules or module == "fusedops.cli.main"
    assert "fusedops.cli.plan" in modules and "torch" not in modules


def test_completion_knows_commands_and_options_without_torch() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['/bin/fusedops']\n"
        "from fusedops.cli.main import app\n"
        "try: app()\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    shell = {"_FUSEDOPS_COMPLETE": "complete_bash"}
    done = run("-c", code, **shell, COMP_WORDS="fusedops pl", COMP_CWORD="1")
    assert done.stdout.split() == ["plan", "False"]
    done = run("-c", code, **shell, COMP_WORDS="fusedops plan --mic", COMP_CWORD="2")
    assert done.stdout.split() == ["--micro-batch", "--microbatches", "False"]


def test_every_name_works_in_the_process_of_the_command() -> None:
    done = run(
        "-c",
        "import sys\n"
        "sys.argv = ['/bin/fusedops']\n"
        "import fusedops\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "for name in 'layer_norm RoutingPlan use_backend UnsupportedError ops nn'.split():\n"
        "    assert getattr(fusedops, name) is not None\n"
        "assert not hasattr(fusedops, 'layer_nrom')\n"
        "print(torch.ops.fusedops.layer_norm, 'fusedops:' in torch.compiler.config.cache_key_tag)",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["fusedops.layer_norm", "True"]


def test_a_program_that_is_run_as_a_module_gets_the_operators(tmp_path: os.PathLike[str]) -> None:
    package = os.path.join(tmp_path, "their_package")
    os.mkdir(package)
    for name, text in (
        ("__init__.py", "import torch, fusedops\n"),
        ("__main__.py", "import torch\nprint(torch.ops.fusedops.layer_norm)\n"),
    ):
        with open(os.path.join(package, name), "w") as file:
            file.write(text)
    path = os.pathsep.join([os.fspath(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("-m", "their_package", "fusedops", PYTHONPATH=path)
    assert done.stdout.split() == ["fusedops.layer_norm"], done.stderr


# A command line in a text: to the end of its code span, its line or its string.
LINE = re.compile(r"(?<![\w.])fusedops ((?:\\\n|[^`\n\"'|;&#)])*)")


def test_options_in_texts_exist() -> None:
    import typer

    from fusedops.cli.bench.options import DefaultGroup
    from fusedops.cli.main import app

    root = Path(__file__).resolve().parents[2]
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.yml", "*.ipynb", "fusedops/*.py", "tools/*.py"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    whole, wrong, seen = typer.main.get_command(app), [], 0
    for name in listed.stdout.split():
        for line in LINE.finditer((root / name).read_text(encoding="utf-8")):
            words = line[1].replace("\\\n", " ").split()
            command = whole
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]
            if command.name in (None, "fusedops", "demo", "peers"):  # options of a script
                continue
            if isinstance(command, DefaultGroup):
                command = command.commands[command.default]
            known = {"--help", *(option for known in command.params for option in known.opts)}
            options = [word.split("=")[0].rstrip(".,:") for word in words if word[:2] == "--"]
            seen += len(options)
            wrong += [f"{name}: {line[0]}" for option in options if option not in known]
    assert seen > 100 and not wrong

"""Help, usage errors and completion need no torch; elsewhere ``import fusedops`` registers all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
PLANS = ("memory", "time", "image", "models")
COMMANDS = ("doctor", "plan", "train", "profile", "report", "generate", "demo", "bench")
BENCHES = ("run", "models", "memory", "arena", "communication", "device", "scaling", "generate")
HELP = [
    "--help",
    *(f"{name} --help" for name in COMMANDS),
    *(f"plan {name} --help" for name in PLANS),
    *(f"bench {name} --help" for name in (*BENCHES, "compare")),
]
MISTAKES = [
    "nope",
    "--nope",
    "plan",
    "plan --nope",
    "plan --devices x",
    "plan time",
    "plan image",
    "train",
    "profile",
]
MISTAKES += ["report", "train a.toml --processes 0", "bench models --layers 0", "demo --nope"]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_and_usage_errors_import_no_torch() -> None:
    done = run("-c", RUN_ALL, json.dumps([*HELP, *MISTAKES]))
    assert done.returncode == 0, done.stderr
    codes, loaded = json.loads(done.stdout.splitlines()[-1])
    assert codes == {**dict.fromkeys(HELP, 0), **dict.fromkeys(MISTAKES, 2)}
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

    from fusedops.cli.default_group import DefaultGroup
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
            if command.name in (None, "fusedops", "demo"):  # demo has options of its script
                continue
            if isinstance(command, DefaultGroup):
                command = command.commands[command.default]
            known = {"--help", *(option for known in command.params for option in known.opts)}
            options = [word.split("=")[0].rstrip(".,:") for word in words if word[:2] == "--"]
            seen += len(options)
            wrong += [f"{name}: {line[0]}" for option in options if option not in known]
    assert seen > 100 and not wrong

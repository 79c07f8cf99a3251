"""``fusedops train``: trains the model of a configuration file, on one process or several.

The work is ``fusedops.train``; here are the command line, the progress bar and the exit codes: 0
when the run is done, ``--stop-code`` (0) when it was stopped and saved, 1 when it failed on the
way, 2 for what the user can put right.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fusedops._core import env
from fusedops.cli.errors import report_errors_once
from fusedops.terminal import files


def train(
    config: Annotated[str, Argument(help="A TOML file (--example writes one).")] = "",
    processes: Annotated[int, Option(min=1, help="Processes on this machine.")] = 1,
    overrides: Annotated[list[str] | None, Option("--set", help="Set optimizer.lr=3e-4.")] = None,
    plan: Annotated[str, Option(help="JSON of fusedops plan: use its first layout.")] = "",
    restarts: Annotated[int, Option(min=0, help="Most restarts after a process failed.")] = 0,
    stop_code: Annotated[int, Option(min=0, max=125, help="Exit code after a signal.")] = 0,
    example: Annotated[bool, Option("--example", help="Write a commented train.toml.")] = False,
) -> None:
    """Train a transformer; a second start resumes from the last checkpoint.

    A configuration has the keys that docs/training.md explains.
    """
    again = "; the same command resumes from the last checkpoint"
    with report_errors_once(lost=again):
        if example:
            write_example(Path(config or "train.toml"))
            return
        if not config:
            raise files.UserError("which configuration? fusedops train --example writes one")
        if stop_code in (1, 2):
            raise files.UserError(f"--stop-code must not be {stop_code}, which reports an error")
        if not Path(config).exists():
            raise files.UserError(
                f"{config} does not exist: correct the name, or let fusedops train --example "
                f"{config} write it"
            )
        files.check_environment()
        from fusedops.cli import train_run

        given = [*(train_run.assignments(Path(plan)) if plan else ()), *(overrides or ())]
        one_of_several = env.has_nodes() and env.launched() is None
        if processes > 1 or restarts or one_of_several:
            train_run.start(config, given, processes, restarts, stop_code)
        train_run.run(config, given, stop_code)


def write_example(path: Path) -> None:
    """Write a commented configuration with every key.

    It runs on the corpus of the demo, the source of the installed sympy, which torch brings.
    """
    if path.exists():
        raise files.UserError(f"{path} exists already; give another name: --example other.toml")
    spec = importlib.util.find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        raise files.UserError("the example's corpus is the source of sympy: pip install sympy")
    corpus = Path(next(iter(spec.submodule_search_locations))) / "**" / "*.py"
    text = Path(__file__).parents[1].joinpath("train", "example.toml").read_text(encoding="utf-8")
    files.write_text(path, text.replace("NAME", str(path)).replace("CORPUS", str(corpus)))
    print(f"wrote {path}; start it with: fusedops train {path}", file=sys.stderr)

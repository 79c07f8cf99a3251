"""The tutorials: the code and the outputs on their pages are those of the scripts in ``examples``.

    python tools/tutorials.py refresh [NAME ...]    # runs scripts and commands, rewrites the pages
    python tools/tutorials.py notebooks             # writes examples/notebooks (needs nbformat)

The page ``docs/tutorials/NAME.md`` belongs to the script ``examples/NAME.py``. Lines ``# %%`` split
it into cells; what is before the first one is not on the page. The n-th Python block of the page is
the n-th cell. After a Python block, or after a ``bash`` block with commands,

    <!-- output -->

precedes the text block with what was printed; commands without it are not run. If no Python block
has an output, the page's commands run the script, and its notebook writes the cells into a file.
A line after ``<!-- machine -->`` names the processor and the versions of the last refresh.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "tutorials"
EXAMPLES = ROOT / "examples"
NOTEBOOKS = EXAMPLES / "notebooks"
NOTEBOOK_NAMES = ("speed_up", "pretrain", "parallel")
CLIENTS_PYTHON = ROOT / "build" / "clients" / "venv" / "bin" / "python"
CLIENT_NAMES = ("preference_tuning", "lora")  # they need trl or peft
CELL = re.compile(r"^# %%.*\n", re.MULTILINE)
END_OF_CELL = "\x1eend of cell\x1e"
MACHINE = re.compile(r"(?<=<!-- machine -->\n)[^\n]*")
BLOCK = re.compile(
    r"^```(?P<language>python|bash)\n(?P<code>.*?)^```\n"
    r"(?:\n<!-- output -->\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page."""

    language: str  # ``"python"`` or ``"bash"``
    code: str
    output: str | None  # what it printed, or ``None`` if the page does not show that

    def __str__(self) -> str:
        text = f"```{self.language}\n{self.code}```\n"
        return (
            text if self.output is None else f"{text}\n<!-- output -->\n```text\n{self.output}```\n"
        )


def names() -> list[str]:
    """Return the names of all tutorials."""
    return sorted(page.stem for page in PAGES.glob("*.md") if page.stem != "index")


def cells_of(name: str) -> list[str]:
    """Return the cells of a script, without the lines that divide them."""
    _, *cells = CELL.split((EXAMPLES / f"{name}.py").read_text())
    return [cell.strip("\n") + "\n" for cell in cells]


def parts_of(page: str) -> list[str | Block]:
    """Return the prose and the blocks of a page in order."""
    parts: list[str | Block] = []
    end = 0
    for match in BLOCK.finditer(page):
        parts += [page[end : match.start()], Block(**match.groupdict())]
        end = match.end()
    return [*parts, page[end:]]


def differences(name: str) -> list[str]:
    """Return a line for each Python block of a page that is not the cell of the script."""
    blocks = [
        part.code
        for part in parts_of((PAGES / f"{name}.md").read_text())
        if isinstance(part, Block) and part.language == "python"
    ]
    cells = cells_of(name)
    lines = [
        f"docs/tutorials/{name}.md: Python block {number} is not cell {number} of the script"
        for number, (block, cell) in enumerate(zip(blocks, cells, strict=False), 1)
        if block != cell
    ]
    if len(blocks) != len(cells):
        lines.append(f"docs/tutorials/{name}.md: {len(blocks)} blocks, {len(cells)} cells")
    return lines


class Session:
    """Runs the cells of a script in one process, and commands in between, in one folder."""

    def __init__(self, name: str, python: Path, folder: Path) -> None:
        self._folder = folder
        self._python = python
        script = folder / f"{name}.py"
        script.write_text((EXAMPLES / script.name).read_text())
        path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
        pythonpath = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = os.environ | {
            "PATH": path,
            "PYTHONPATH": os.pathsep.join(pythonpath),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "100",
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._script = script

    def cell(self) -> str:
        """Run the next cell and return what it printed."""
        if self._process is None:
            self._process = subprocess.Popen(
                [str(self._python), __file__, "cells", self._script.name],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"next\n")
        self._process.stdin.flush()
        lines: list[str] = []
        for encoded in self._process.stdout:  # bytes: text would make lines of carriage returns
            line = encoded.decode()
            if line.startswith(END_OF_CELL):
                return _visible("".join(lines))
            if not line.startswith("USDT:"):  # torch's profiler logs when it starts and stops
                lines.append(line)
        raise RuntimeError(f"{self._script.name} has failed:\n{''.join(lines)}")

    def command(self, code: str) -> str:
        """Run shell commands and return what they printed."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        printed = done.stdout.decode()
        if done.returncode != 0:
            raise RuntimeError(f"exit code {done.returncode} of\n{code}\n{printed}")
        return _visible(printed)

    def close(self) -> None:
        """End the process of the cells."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def _visible(text: str) -> str:
    """Return what a terminal shows in the end: progress bars overwrite their line."""
    lines = (line.rstrip().rpartition("\r")[2] for line in text.split("\n"))
    text = "\n".join(lines).strip("\n")
    return text + "\n" if text else ""


def run_cells(script: Path) -> None:
    """Run a cell of the script for each line of the standard input, as ``python script`` would."""
    text = script.read_text()
    sys.argv = [script.name]
    sys.path[0] = str(Path.cwd())
    namespace = vars(sys.modules["__main__"])  # the script's names replace those of this file
    sentinel = END_OF_CELL
    namespace["__file__"] = str(script)
    markers = list(CELL.finditer(text))
    ends = [marker.start() for marker in markers[1:]] + [len(text)]
    for marker, end in zip(markers, ends, strict=True):
        if not sys.stdin.readline():
            return
        # Empty lines before it: a traceback has the lines of the script.
        lines = "\n" * text.count("\n", 0, marker.end())
        exec(compile(lines + text[marker.end() : end], str(script), "exec"), namespace)
        print(f"\n{sentinel}", flush=True)
    sys.stdin.readline()


def refreshed(name: str, python: Path) -> str:
    """Return a page with the code of its script, and with the outputs of a new run."""
    page = (PAGES / f"{name}.md").read_text()
    parts = parts_of(page)
    cells = iter(cells_of(name))
    runs_cells = any(_shows_output(part, "python") for part in parts)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(name, python, Path(folder))
        try:
            for index, part in enumerate(parts):
                if isinstance(part, str):
                    continue
                if part.language == "python":
                    printed = session.cell() if runs_cells else ""
                    part = replace(part, code=next(cells))
                elif part.output is not None:
                    printed = session.command(part.code)
                if part.output is not None:
                    part = replace(part, output=printed.replace(folder, "."))
                parts[index] = part
        finally:
            session.close()
    return MACHINE.sub(_machine(python), "".join(map(str, parts)))


def _shows_output(part: str | Block, language: str) -> bool:
    return isinstance(part, Block) and part.language == language and part.output is not None


def _machine(python: Path) -> str:
    """Return the sentence about where the outputs were printed."""
    code = (
        "import torch; from fusedops.bench.machine import machine, versions; "
        "m, v = machine(torch.device('cpu')), versions(); "
        "print(f'{m.name} ({m.slug}), threads: {m.threads}', end='; '); "
        "print('torch', v['torch'], 'and transformers', v['transformers'])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(python), "-c", code], env=environment, text=True, capture_output=True, check=True
    )
    return f"The outputs on this page were printed on {done.stdout.strip()}."


def notebook(name: str) -> list[tuple[str, str]]:
    """Return the cells of a tutorial's notebook, each with its kind, ``markdown`` or ``code``."""
    parts = parts_of((PAGES / f"{name}.md").read_text())
    writes = not any(_shows_output(part, "python") for part in parts)
    cells: list[tuple[str, str]] = []
    prose = ""
    for part in parts:
        if isinstance(part, str):
            prose += part
        elif part.language == "bash" and part.output is None:
            prose += str(part)
        else:
            if text := _notebook_prose(prose):
                cells.append(("markdown", text))
            prose = ""
            cells.append(("code", _notebook_code(part, name, writes, cells)))
    if text := _notebook_prose(prose):
        cells.append(("markdown", text))
    return cells


def _notebook_code(block: Block, name: str, writes: bool, cells: Sequence[tuple[str, str]]) -> str:
    magic = ""
    if block.language == "bash":
        magic = "%%bash\n"
    elif writes:
        append = "-a " if any(text.startswith("%%writefile") for _, text in cells) else ""
        magic = f"%%writefile {append}{name}.py\n"
    code = block.code if writes and block.language == "python" else block.code.rstrip("\n")
    return magic + code


def _notebook_prose(text: str) -> str:
    """Return prose without comments and without the sentence about outputs; links from examples."""
    text = re.sub(r"<!-- machine -->\n[^\n]*\n|<!--.*?-->\n?", "", text, flags=re.DOTALL)
    return re.sub(r"\]\((?!\w+:|#)", "](../../docs/tutorials/", text).strip("\n")


def write_notebooks() -> None:
    """Write the notebooks; their ids are numbers, so that equal pages give equal files."""
    import nbformat
    from nbformat import v4

    for name in NOTEBOOK_NAMES:
        book = v4.new_notebook()
        book.metadata = {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
        }
        for number, (kind, text) in enumerate(notebook(name)):
            cell = v4.new_code_cell(text) if kind == "code" else v4.new_markdown_cell(text)
            cell["id"] = f"cell-{number}"
            book.cells.append(cell)
        nbformat.validate(book)
        nbformat.write(book, NOTEBOOKS / f"{name}.ipynb")
        print(f"wrote examples/notebooks/{name}.ipynb")


def _refresh(selected: Sequence[str]) -> Iterator[str]:
    """Rewrite pages and yield what could not be done."""
    for name in selected:
        python = CLIENTS_PYTHON if name in CLIENT_NAMES else Path(sys.executable)
        if not python.exists():
            yield f"{name}: needs {python}; `make test-clients` makes it"
            continue
        print(f"{name} ...", flush=True)
        try:
            (PAGES / f"{name}.md").write_text(refreshed(name, python))
        except RuntimeError as error:
            yield f"{name}: {error}"


def main() -> int:
    """Run a command of the module's docstring and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["refresh", "notebooks", "cells"])
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_intermixed_args()
    if arguments.command == "cells":
        run_cells(Path(arguments.names[0]))
        return 0
    unknown = sorted(set(arguments.names) - set(names()))
    if unknown:
        parser.error(f"no tutorial {', '.join(unknown)}; there are {', '.join(names())}")
    if arguments.command == "notebooks":
        if find_spec("nbformat") is None:
            parser.error("needs nbformat; `make notebooks` installs it")
        write_notebooks()
        return 0
    lines = list(_refresh(arguments.names or names()))
    print("\n".join(lines), file=sys.stderr, end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())

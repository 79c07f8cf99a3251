"""The code of README.md and of the pages under ``docs`` runs, and their links lead somewhere.

The Python blocks of a page run in order, in one namespace, in an empty folder, on the CPU. A block
that begins with ``# torchrun --nproc-per-node N`` runs, with those after it, on N gloo processes.
Two comments, which a reader of the rendered page does not see, change that:

    <!-- not run: needs a GPU -->       right before a block that cannot run here, and why
    <!-- run first:                     code that a block needs and that the page leaves out
    model = torch.nn.Linear(2, 2)
    -->

The pages in ``docs/ops`` are made of docstrings: ``test_docstrings.py`` runs their examples. Those
in ``docs/tutorials`` show scripts: ``tests/examples/test_tutorials.py`` runs them.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fresh_process
import pytest
from run_ranks import start_process

from fusedops.testing.processes import PRELOADED

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ALL_PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [page for page in ALL_PAGES if page.parent not in (DOCS / "ops", DOCS / "tutorials")]
PACKAGES = ("accelerate", "transformers", "triton")  # skip blocks that import one
TIMEOUT = 300.0  # seconds; a page takes a few
# A comment of one of the two kinds, or a block: its indentation and its code.
_PARTS = re.compile(
    r"<!-- not run:(?P<reason>[^\n]*?)-->\n(?=(?P<follows> *```python\n)?)"
    r"|<!-- run first:\n(?P<setup>.*?)\n *-->"
    r"|^ *```python\n(?P<code>.*?)^ *```",
    re.MULTILINE | re.DOTALL,
)
_TORCHRUN = re.compile(r"# torchrun --nproc-per-node (\d+) ")


@dataclass(frozen=True)
class Block:
    """Code of a page."""

    line: int  # the number of its first line in the page
    code: str
    not_run: str | None = None  # why it does not run
    processes: int = 1  # how many run it, and what follows


def blocks_of(text: str) -> list[Block]:
    """Return the Python blocks of a page, and the code that comments put in front of them."""
    blocks, reason, processes = [], None, 1
    for part in _PARTS.finditer(text):
        if part["reason"] is not None:
            reason = part["reason"].strip()
            where = f"line {text.count(chr(10), 0, part.start()) + 1}"
            assert reason, f"{where}: 'not run' needs a reason"
            assert part["follows"], f"{where}: 'not run' must stand right before a Python block"
            continue
        name = "setup" if part["setup"] is not None else "code"
        line = text.count("\n", 0, part.start(name)) + 1
        code = textwrap.dedent(part[name])
        started = _TORCHRUN.match(code)
        if started and reason is None:
            processes = int(started[1])
        blocks.append(Block(line, code, reason if name == "code" else None, processes))
        reason = None if name == "code" else reason
    return blocks


# Runs blocks, each of which is the number of its first line and its code. Empty lines before
# the code give a traceback the numbers of the page.
PROGRAM = """
import os, sys, torch
torch.set_num_threads(1)
torch.manual_seed(int(os.environ.get("RANK", "0")))
sys.stdout = open(os.devnull, "w")
namespace = {{"__name__": "page"}}
for line, code in {blocks!r}:
    exec(compile("\\n" * (line - 1) + code, {page!r}, "exec"), namespace)
"""
# What takes seconds to import: more than most pages take to run.
IMPORTED = ",".join(
    [
        *("torch", *PRELOADED, "fusedops.models", "torch.distributed.tensor", "torch._dynamo"),
        *("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"),
        "transformers.trainer",
    ]
)
# What torchrun would have told init_process_group("gloo").
AS_TORCHRUN = """
from torch import distributed
store = distributed.FileStore({store!r}, {ranks})
join = distributed.init_process_group
distributed.init_process_group = lambda backend: join(
    backend, store=store, rank={rank}, world_size={ranks}
)
"""


def run(page: Path, blocks: Sequence[Block], folder: Path, imported: str = "torch") -> None:
    """Run the blocks of a page in processes of their own; raise if one fails."""
    runs = [(block.line, block.code) for block in blocks if block.not_run is None]
    program = PROGRAM.format(blocks=runs, page=str(page))
    ranks = max((block.processes for block in blocks if block.not_run is None), default=1)
    if ranks == 1:
        path = os.pathsep.join(sys.path)  # pages import modules of tests, too
        fresh_process.run(program, folder=folder, check=True, imported=imported, PYTHONPATH=path)
        return
    started = []
    for rank in range(ranks):
        own = folder / str(rank)
        own.mkdir()
        joined = AS_TORCHRUN.format(store=str(folder / "store"), rank=rank, ranks=ranks)
        numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank}
        words = {name: str(number) for name, number in numbers.items()}
        started.append(start_process(_run_rank, joined + program, str(own), words))
    deadline = time.monotonic() + TIMEOUT
    try:
        for rank, (_, connection) in enumerate(started):
            assert connection.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} hangs"
            failure = connection.recv()
            assert failure is None, f"{page.name}, rank {rank} of {ranks}: {failure}"
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def _run_rank(connection: Connection, program: str, folder: str, variables: Any) -> None:
    os.chdir(folder)
    os.environ |= variables
    try:
        exec(program, {})
        connection.send(None)
    except BaseException:
        connection.send(traceback.format_exc())


@pytest.mark.ci
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page.read_text())
    for package in PACKAGES:
        if any(block.not_run is None and package in block.code for block in blocks):
            pytest.importorskip(package)
    run(page, blocks, tmp_path, IMPORTED)


_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^ *```.*?^ *```|<!--.*?-->", re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    texts = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in texts}


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in ALL_PAGES:
        for link in _LINK.findall(_FENCED.sub("", page.read_text())):
            if re.match(r"\w+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            known = target.exists() and (not anchor or anchor in _anchors(target))
            if not known:
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("page", "begin", "end"),
    [
        ("fine_tuning.md", "```toml\n", "```"),
        ("tutorials/parallel.md", "cat > start.toml <<'END'\n", "END\n"),
    ],
)
def test_the_configuration_of_the_page_is_valid(
    page: str, begin: str, end: str, tmp_path: Path
) -> None:
    from fusedops.train.config import load_config

    path = tmp_path / "train.toml"
    path.write_text((DOCS / page).read_text().partition(begin)[2].partition(end)[0])
    assert load_config(str(path)).steps > 0


def test_the_recipe_ends_texts_with_a_token_of_llama_3(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from fusedops.train.config import load_config
    from fusedops.train.corpus import tokenizer_of

    special = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")  # of the base model
    llama = tokenizers.Tokenizer(tokenizers.models.WordLevel({"text": 0}, unk_token="text"))
    llama.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in special])
    llama.save(str(tmp_path / "tokenizer.json"))
    recipe = (DOCS / "fine_tuning.md").read_text().partition("```toml\n")[2].partition("```")[0]
    path = tmp_path / "train.toml"
    path.write_text(recipe.replace("Llama-3.1-8B/tokenizer.json", str(tmp_path / "tokenizer.json")))
    tokenizer = tokenizer_of(load_config(str(path)).data)
    assert tokenizer.end == llama.token_to_id("<|end_of_text|>")

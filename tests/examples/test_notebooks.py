"""The notebooks of the tutorials run: `make test-notebooks`, in an environment of its own."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import tutorials

nbclient = pytest.importorskip("nbclient", reason="needs nbclient: `make test-notebooks`")
import nbformat  # noqa: E402

pytestmark = pytest.mark.slow
EXPECTED = {
    "speed_up": r"both generate the same tokens: True",
    "pretrain": r"begins after step 300",
    "parallel": r"step 5  loss 5\.08",
}


@pytest.mark.parametrize("name", tutorials.NOTEBOOK_NAMES)
def test_the_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)  # for the commands of cells
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    book = nbformat.read(tutorials.NOTEBOOKS / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        book, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    printed = "".join(
        output.get("text", "")
        for cell in book.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    )
    assert len(re.findall(EXPECTED[name], printed)) == (6 if name == "parallel" else 1)

"""Files are written whole or not at all, and every failure is one clear sentence."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fusedops.terminal import files
from fusedops.terminal.files import UserError


def test_text_takes_the_place_of_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    target.chmod(0o640)
    files.write_text(target, "new")
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["a.txt"]
    (tmp_path / "link").symlink_to(target)
    files.write_text(tmp_path / "link", "newer")
    assert (tmp_path / "link").is_symlink() and target.read_text() == "newer"


def test_new_file_has_what_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_text(tmp_path / "a.txt", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640


def test_write_past_the_allowed_size_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    limit = 10_000
    program = (
        "from fusedops.terminal import files\n"
        "with files.one_line_errors():\n"
        f"    files.write_text({str(tmp_path / 'a.json')!r}, 'x' * {10 * limit})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 2
    assert done.stderr.startswith("fusedops: error: cannot write ") and done.stderr.count("\n") == 1
    assert "File too large" in done.stderr
    assert (tmp_path / "a.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("missing/a.json", "folder .*missing does not exist"),
        (".", "it is a folder"),
        ("a_file/b.json", "folder .*a_file does not exist"),
        ("x" * 300, "File name too long"),
    ],
)
def test_unwritable_file_is_known_before(tmp_path: Path, path: str, says: str) -> None:
    (tmp_path / "a_file").write_text("")
    with pytest.raises(UserError, match=says):
        files.check_writable(tmp_path / path)
    files.check_writable(tmp_path / "a.json")
    assert os.listdir(tmp_path) == ["a_file"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1,}', r"not valid JSON: .* at line 1 column"),
        ("", "not valid JSON"),
        ("\udcff", "not a text file"),
    ],
)
def test_malformed_json_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=says):
        files.read_json(path)


def test_a_file_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*none.json: No such file or directory"):
        files.read_json(tmp_path / "none.json")

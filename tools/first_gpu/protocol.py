"""How a process says which item it works on and what came of it: a line of JSON for each.

A process gets ``--items FILE`` (a JSON list of names) and ``--events FILE``. A line is on the file
before the next statement runs, so that a process that is killed has told what it was doing.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

# A context that an error has destroyed: the process ends itself with this exit code.
DEAD_CONTEXT = 70
LONGEST_TEXT = 4096  # characters of a failure in a row; the whole is in a file of its own


class Events:
    """Writes the events of one process.

    Args:
        path: of the file, which is extended.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._started = 0.0

    def start(self, item: str) -> None:
        """Say that an item is begun."""
        self._started = time.monotonic()
        os.environ["FIRST_GPU_ITEM"] = item
        self._write({"start": item})

    def end(self, item: str, outcome: str, **facts: Any) -> None:
        """Say what came of an item.

        Args:
            item: its name.
            outcome: ``passed``, ``failed``, ``skipped`` or ``crashed``.
            facts: what else is known, in words of JSON; ``text`` is the failure.
        """
        seconds = round(time.monotonic() - self._started, 3)
        self._write({"end": item, "outcome": outcome, "seconds": seconds, **facts})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


def options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the two options of the protocol and parse the command line."""
    parser.add_argument("--items", type=Path, required=True, help="JSON list of names")
    parser.add_argument("--events", type=Path, required=True, help="file that gets the events")
    return parser.parse_args()


def shortened(text: str, limit: int = LONGEST_TEXT) -> str:
    """Return at most ``limit`` characters of a text: its beginning and, longer, its end."""
    if len(text) <= limit:
        return text
    head = limit // 3
    cut = len(text) - limit
    return f"{text[:head]}\n... {cut} characters left out ...\n{text[head - limit :]}"


def claim(folder: Path, name: str) -> bool:
    """Return whether this process is the first of all that asks for ``name``."""
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

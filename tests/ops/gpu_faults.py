"""Faults that are planted into the PTX of a kernel, one at a time.

A fault is a line of the PTX that is changed, dropped, or exchanged with the next instruction.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Instructions that only order others: what they order can differ without them.
ORDERING = (
    r"bar\.sync|cp\.async\.wait_group|cp\.async\.commit_group|fence\.proxy\.async|"
    r"wgmma\.(fence|commit_group|wait_group)|mbarrier\.init|mbarrier\.arrive\.expect_tx"
)
_INSTRUCTION = re.compile(r"^\s*(@!?%\w+\s+)?[a-z][\w.:]*\s*[^:;]*;\s*(//.*)?$")
_GUARD = re.compile(r"^(\s*)@(!?)(%\w+)(\s)")
_COMPARISON = re.compile(r"\bsetp\.(lt|le|gt|ge|eq|ne)\.")
_OTHER = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}
# Integer arithmetic, of which the last operand is a constant.
_CONSTANT = re.compile(
    r"^(\s*(?:add|sub|mul|mad|shl|shr|and|or|xor|bfe|min|max)\.[^;]*, )(-?\d+)(;.*)$"
)
_OFFSET = re.compile(r"^(.*\[%\w+\+)(\d+)(\].*)$")
_NOT_COMMUTATIVE = re.compile(
    r"^(\s*(?:sub|selp|shl|shr|prmt|div|setp\.l[te]|setp\.g[te])[\w.]* %\w+, )(%\w+)(, )(%\w+)(.*)$"
)
_STORE = re.compile(r"^\s*(@!?%\w+\s+)?(st\.|cp\.async\.c|stmatrix)")
_WAIT_LOOP = re.compile(r"@!complete\s+bra\.uni\s+waitLoop;")


@dataclass(frozen=True)
class Fault:
    """A line that was changed.

    Attributes:
        kind: a key of ``KINDS``.
        line: of the PTX, from 1.
        before: the line as it was compiled.
        after: the line that stands there now, or an empty one.
        text: of the PTX with the fault.
    """

    kind: str
    line: int
    before: str
    after: str
    text: str


def _dropped(line: str) -> str | None:
    return "" if re.search(ORDERING, line) or _WAIT_LOOP.search(line) else None


def _one_group_more(line: str) -> str | None:
    """Wait for one group less than is needed."""
    match = re.search(r"(wait_group(?:\.sync\.aligned)?\s+)(\d+);", line)
    if match is None:
        return None
    return line.replace(match[0], f"{match[1]}{int(match[2]) + 1};")


def _guard_inverted(line: str) -> str | None:
    if not _GUARD.match(line):
        return None
    return _GUARD.sub(
        lambda match: f"{match[1]}@{'' if match[2] else '!'}{match[3]}{match[4]}", line
    )


def _comparison_changed(line: str) -> str | None:
    if not _COMPARISON.search(line):
        return None
    return _COMPARISON.sub(lambda match: f"setp.{_OTHER[match[1]]}.", line)


def _constant_changed(line: str) -> str | None:
    match = _CONSTANT.match(line)
    return f"{match[1]}{int(match[2]) ^ 1}{match[3]}" if match else None


def _offset_changed(line: str) -> str | None:
    match = _OFFSET.match(line)
    return f"{match[1]}{int(match[2]) ^ 16}{match[3]}" if match else None


def _operands_exchanged(line: str) -> str | None:
    match = _NOT_COMMUTATIVE.match(line)
    if match is None or match[2] == match[4]:
        return None
    return f"{match[1]}{match[4]}{match[3]}{match[2]}{match[5]}"


def _store_dropped(line: str) -> str | None:
    return "" if _STORE.match(line) else None


KINDS: dict[str, Callable[[str], str | None]] = {
    "ordering dropped": _dropped,
    "waits for a group less": _one_group_more,
    "guard inverted": _guard_inverted,
    "comparison changed": _comparison_changed,
    "constant changed": _constant_changed,
    "offset changed": _offset_changed,
    "operands exchanged": _operands_exchanged,
    "store dropped": _store_dropped,
}


def all_faults(text: str) -> Iterator[Fault]:
    """Yield every fault that can be planted into a kernel."""
    lines = text.split("\n")
    begin = next(number for number, line in enumerate(lines) if ".entry" in line)
    end = next(number for number, line in enumerate(lines[begin:], begin) if line.startswith("}"))
    for number in range(begin, end):
        line = lines[number]
        for kind, change in KINDS.items():
            after = change(line)
            if after is not None and after != line:
                changed = "\n".join([*lines[:number], after, *lines[number + 1 :]])
                yield Fault(kind, number + 1, line.strip(), after.strip(), changed)


def chosen_faults(text: str, lines: set[int], count: int, seed: int) -> list[Fault]:
    """Return up to ``count`` faults in some lines, as many of each kind, by a seed."""
    by_kind: dict[str, list[Fault]] = {}
    for fault in all_faults(text):
        if fault.line in lines:
            by_kind.setdefault(fault.kind, []).append(fault)
    source = random.Random(seed)
    for faults in by_kind.values():
        source.shuffle(faults)
    chosen: list[Fault] = []
    while len(chosen) < count and any(by_kind.values()):
        chosen += [faults.pop() for faults in by_kind.values() if faults]
    return chosen[:count]

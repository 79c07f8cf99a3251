"""Make the weak symbols of an object file local: ``python tools/localize.py IN.o OUT.o ISA``.

An object that is compiled for AVX-512 holds AVX-512 copies of inline functions of the standard
library and of torch. Were they weak, the linker could take them for all callers, on any machine.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

# <iostream>, which ATen's vector headers include, puts this initialiser into every object. libtorch
# has run it long before; `localize` drops it.
IOSTREAM_INITIALISER = frozenset(
    ("_ZNSt8ios_base4InitC1Ev", "_ZNSt8ios_base4InitD1Ev", "__dso_handle", "__cxa_atexit")
)


class LocalizeError(RuntimeError):
    """The object cannot be made safe; the message is one sentence for the user."""


def localize(source: Path, output: Path, capability: str) -> None:
    """Copy object ``source`` to ``output`` with all its weak symbols made local.

    ``ld -r --force-group-allocation`` first turns COMDAT groups into plain sections; otherwise the
    linker would drop a group, now-local symbols and all, in favour of another object's copy.

    Raises:
        LocalizeError: the object has a static initialiser, or a variable that would be duplicated.
    """
    with tempfile.TemporaryDirectory() as folder:
        merged = Path(folder) / "merged.o"
        _run("ld", "-r", "--force-group-allocation", source, "-o", merged)
        initialised = _initialisers(merged) - IOSTREAM_INITIALISER
        if initialised:
            raise LocalizeError(
                f"{source}: a static initialiser ({', '.join(sorted(initialised))}) would run "
                f"{capability} code when the library is loaded, on any machine; make the object "
                "constinit or register it from a plain .cpp"
            )
        weak = weak_symbols(merged)
        ours = [name for kind, name in weak if kind in "VBDu" and name.startswith("_ZN8fusedops")]
        if ours:
            raise LocalizeError(
                f"{source}: {', '.join(ours)}: an inline variable of fusedops would exist once per "
                "instruction set; define it in a plain .cpp"
            )
        flags = [f"--remove-section={prefix}.init_array" for prefix in ("", ".rela")]
        if weak:  # objcopy fails on an empty list
            names = Path(folder) / "weak.txt"
            names.write_text("".join(f"{name}\n" for _, name in weak))
            flags.append(f"--localize-symbols={names}")
        _run("objcopy", *flags, merged, output)


def weak_symbols(path: Path) -> list[tuple[str, str]]:
    """Return kind and mangled name of each weak or unique symbol that an object file defines."""
    rows = (line.split() for line in _run("nm", "--defined-only", path).splitlines())
    return [(row[1], row[2]) for row in rows if len(row) == 3 and row[1] in "WVuwv"]


def _initialisers(path: Path) -> set[str]:
    """Return the symbols that an object's static initialisers refer to."""
    if not re.search(r"\.(init_array|ctors)\b", _run("objdump", "-h", path)):
        return set()
    rows = _run("objdump", "-r", "--section=.text.startup", "--section=.init_array", path)
    symbols = re.findall(r"^[0-9a-f]+ R_\S+\s+(\S+?)(?:[+-]0x[0-9a-f]+)?$", rows, re.MULTILINE)
    return {name for name in symbols if not name.startswith((".", "_GLOBAL__"))} or {"unnamed"}


def _run(*command: str | Path) -> str:
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    except FileNotFoundError as error:
        message = f"{command[0]} is not on PATH (Debian: apt install binutils)"
        raise LocalizeError(message) from error
    if done.returncode:
        message = f"{shlex.join(str(part) for part in command)}: {done.stderr.strip()}"
        raise LocalizeError(message)
    return done.stdout


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python tools/localize.py IN.o OUT.o ISA")
    try:
        localize(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    except LocalizeError as problem:
        sys.exit(f"fusedops: {problem}")

"""Links libraries for older systems than the one that compiles: ``manylinux_2_28``.

A linker binds each symbol to the newest version that the C library of the build machine has, and
the result then needs that C library. Here it links against stand-ins of ``libc``, ``libm`` and
``libstdc++`` instead, which have the names of this machine's, each at the newest version that
``LIMITS`` allows, and no code. A symbol that has no such version makes the link fail, unless
``compat/old_system.cpp`` defines it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

# Of manylinux_2_28: prefix of a version -> the newest one.
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
TAG = "manylinux_2_28"
_COMPAT = Path(__file__).resolve().parent / "compat" / "old_system.cpp"
# A row of readelf: number, value, size, type, binding, visibility, section, name, version.
_SYMBOL = re.compile(r"^\d+: \w+ +\w+ (\w+) +\w+ +\w+ +\d+ (\S+?)@@?(\w+?)_([0-9.]+)$")
# Type of a symbol -> section and type of its stand-in.
_KINDS = {
    "FUNC": (".text", "function"),
    "IFUNC": (".text", "function"),
    "OBJECT": (".data", "object"),
    "TLS": ('.tdata,"awT",@progbits', "tls_object"),
}


def stand_ins(folder: Path, compiler: str) -> list[str]:
    """Make the stand-ins and the object of ``old_system.cpp`` in a folder, if they are not there.

    Returns what the linker needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("libc.so.6", "libm.so.6", "libstdc++.so.6"):
        short = folder / (name.split(".so")[0] + ".so")
        if not short.exists():
            _stand_in(folder, name, compiler)
            system = _where(compiler, name)
            extra = ""
            if name == "libc.so.6":  # what is always linked statically, and __tls_get_addr
                loader = next(Path(system).parent.glob("ld-linux*.so.*"))
                extra = f"{_where(compiler, 'libc_nonshared.a')} AS_NEEDED ( {loader} )"
            short.write_text(f"GROUP ( {folder / name} {extra} )\n")
    compat = folder / "old_system.o"
    if not compat.exists() or compat.stat().st_mtime < _COMPAT.stat().st_mtime:
        _run(compiler, "-std=c++20", "-O2", "-fPIC", "-c", str(_COMPAT), "-o", str(compat))
    return [str(compat), f"-L{folder}"]


def symbols(library: Path) -> dict[str, tuple[str, str]]:
    """Return symbol -> (type of ``_KINDS``, newest version that ``LIMITS`` allows)."""
    chosen: dict[str, tuple[tuple[int, ...], str, str]] = {}
    for line in _run("readelf", "--dyn-syms", "--wide", str(library)):
        match = _SYMBOL.match(line.strip())
        if match is None or match[1] not in _KINDS or match[3] not in LIMITS:
            continue
        kind, name, prefix, number = match.groups()
        version = tuple(map(int, number.split(".")))
        if version <= LIMITS[prefix] and version > chosen.get(name, ((), "", ""))[0]:
            chosen[name] = (version, kind, f"{prefix}_{number}")
    return {name: (kind, version) for name, (_, kind, version) in chosen.items()}


def _stand_in(folder: Path, name: str, compiler: str) -> None:
    lines, versions = [], set()
    for index, (symbol, (kind, version)) in enumerate(
        sorted(symbols(_where(compiler, name)).items())
    ):
        versions.add(version)
        section, kind = _KINDS[kind]
        lines += [
            f".section {section}",
            f".globl stand_in_{index}",
            f".type stand_in_{index},@{kind}",
            f"stand_in_{index}: .byte 0",
            f".size stand_in_{index},1",
            f".symver stand_in_{index},{symbol}@@{version}",
        ]
    source, script = folder / f"{name}.s", folder / f"{name}.map"
    source.write_text("\n".join(lines) + "\n")
    script.write_text("".join(f"{version} {{}};\n" for version in sorted(versions)))
    flags = ["-shared", "-nostdlib", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}"]
    _run(compiler, *flags, str(source), "-o", str(folder / name))


def _where(compiler: str, name: str) -> Path:
    """Return the path of one of the compiler's libraries."""
    return Path(_run(compiler, f"-print-file-name={name}")[0]).resolve()


def _run(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout.splitlines()

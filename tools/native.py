"""Builds the compiled libraries with ninja: shared by setup.py, the Makefile and the tests.

    python tools/native.py build    # fusedops/lib/libfusedops_{cpu,host.abi3,cuda}.so, as it can
    python tools/native.py clean

What is compiled is found by name:

| sources | how |
|---|---|
| ``csrc/{,cpu/*,runtime/*}/*.cpp`` | once, for the baseline instruction set |
| ``csrc/{cpu,runtime}/*/*.isa.cpp`` | per instruction set: ``-DCPU_CAPABILITY=AVX2`` and so on |
| ``csrc/host/*.cpp`` | once, a module for any Python, which links the library of the above |
| ``csrc/cuda/*.cu`` | by nvcc for four GPUs (``native_flags.py``), to PTX for others; no torch |
| ``csrc/cuda/*.cpp`` | bindings of the above; linked only where the installed torch has CUDA |

An inline function that an ``*.isa.cpp`` file shares with the rest of the library (``std::vector``,
``at::vec`` and so on) becomes a weak symbol, of which the linker keeps any one copy. Were it the
AVX512 copy, the plain code would die of SIGILL on an older machine. Hence each such object passes
through ``localize``: its weak symbols become its own, and a static initialiser, which would run
before the instruction set is known, is an error.

``FUSEDOPS_ISAS`` says which instruction sets: ``native`` (only the best one that this machine has:
for a build in place), ``all`` (what a wheel gets), or names with commas.
A build that has more than is asked for is left as it is. ``FUSEDOPS_CUDA_ARCHS=sm_90`` compiles for
that GPU alone, which takes a third of the time. The tile instructions of AMX are left out
where the assembler does not know them (``knows_tiles``).

``FUSEDOPS_SANITIZE=address,undefined`` makes another library, in a folder of its own, that watches
each access and each shift and cast; ``tools/sanitized.py`` builds and runs it.

Where ccache is installed every checkout of the same sources shares its objects: paths count
relative to the checkout, and a precompiled header by what it is made from (``header_digest``)
instead of by its 300 MB, which hold the paths.

This file does not import torch (1.5 s): it reads ``torch/version.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # setup.py and others load this by path
from native_flags import ARCHITECTURES, CXX_FLAGS, ISA_FLAGS, NVCC_FLAGS, WIDE_COPIES, gencode

sys.path.pop(0)

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
SANITIZE = os.environ.get("FUSEDOPS_SANITIZE", "")
LIBRARIES = ROOT / "build/sanitized/lib" if SANITIZE else ROOT / "fusedops" / "lib"
LOCALIZE = ROOT / "tools" / "localize.py"
FLAGS = ROOT / "tools" / "native_flags.py"
COMPAT = ROOT / "tools" / "compat"  # an empty cuda_cmake_macros.h, which a CPU-only torch lacks

# -O1: half the time of a build at -O2. vptr wants the type information of torch, which has none.
SANITIZER_FLAGS = f"-O1 -g1 -fno-omit-frame-pointer -fsanitize={SANITIZE} -fno-sanitize=vptr"
EXTRA_FLAGS = f"{SANITIZER_FLAGS if SANITIZE else ''} {os.environ.get('CXXFLAGS', '')}".strip()


class BuildError(RuntimeError):
    """The libraries cannot be built here; the message is one sentence for the user."""


class CannotBuildError(BuildError):
    """Something that a build needs is not installed; the ops then run on the reference."""


@dataclasses.dataclass(frozen=True)
class Torch:
    """The installed torch, as far as a build needs it."""

    version: str
    cuda: str | None
    folder: Path

    @property
    def include_flags(self) -> list[str]:
        """Compiler flags that find torch's headers, without their warnings."""
        include = self.folder / "include"
        return [f"-isystem{include}", f"-isystem{include}/torch/csrc/api/include"]


@dataclasses.dataclass(frozen=True)
class Edge:
    """One build step: ``rule`` turns ``source`` into ``output``."""

    rule: str
    output: str
    sources: tuple[str, ...]
    flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # other outputs that must be there first


@functools.cache
def find_torch() -> Torch:
    """Return the installed torch.

    Raises:
        CannotBuildError: torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CannotBuildError(
            f"torch is not installed for {sys.executable}: install it first "
            "(pip install torch==2.13.0), then build with --no-build-isolation"
        )
    folder = Path(spec.submodule_search_locations[0])
    text = (folder / "version.py").read_text()
    version = re.search(r"__version__ = '([^']+)'", text)
    cuda = re.search(r"^cuda\b.*= '([^']+)'", text, re.MULTILINE)
    if version is None:
        raise BuildError(f"{folder}/version.py does not tell torch's version")
    return Torch(version[1], cuda[1] if cuda else None, folder)


def cuda_home() -> Path | None:
    """Return the folder of the CUDA toolkit (``CUDA_HOME``, else the one of ``nvcc``)."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    if nvcc:
        candidates.insert(2, str(Path(nvcc).resolve().parent.parent))
    for candidate in candidates:
        # An nvcc in /usr/local/bin may be a script: the toolkit is where the headers are.
        home = Path(candidate) if candidate else None
        if home and (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            return home.resolve()
    return None


def gpus(nvcc: str) -> list[str]:
    """Return the GPUs to compile for (``FUSEDOPS_CUDA_ARCHS``), of those that an nvcc knows."""
    asked = os.environ.get("FUSEDOPS_CUDA_ARCHS")
    names = asked.split(",") if asked else ARCHITECTURES
    if not set(names) <= set(ARCHITECTURES):
        raise BuildError(f"FUSEDOPS_CUDA_ARCHS={asked}: the names are {', '.join(ARCHITECTURES)}")
    done = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True)
    return [name for name in names if name in done.stdout.split()]


def compiler() -> str:
    """Return the C++ compiler (``CXX``, else ``g++``, else ``c++``).

    Raises:
        CannotBuildError: there is none.
    """
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "c++"]:
        if shutil.which(name):
            return name
    raise CannotBuildError(
        f"no C++ compiler: {asked or 'g++'} is not on PATH (Debian: apt install g++)"
    )


def wants_cuda() -> bool:
    """Return whether ``build`` also builds the CUDA library: torch has CUDA and nvcc is there."""
    has_sources = any(CSRC.glob("cuda/*.cpp"))
    return has_sources and find_torch().cuda is not None and cuda_home() is not None


def library_names() -> list[str]:
    """Return the names of the libraries that ``build`` makes here."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"  # Debian: python3-dev
    host = ["host"] if headers.exists() else []
    return ["cpu", *host, "cuda"] if wants_cuda() else ["cpu", *host]


def library_path(name: str) -> Path:
    """Return where library ``name`` (``"cpu"``, ``"host"``, ``"cuda"``) lies once it is built."""
    return LIBRARIES / f"libfusedops_{name}{'.abi3' if name == 'host' else ''}.so"


def isa_variants() -> list[str]:
    """Return the instruction sets that ``*.isa.cpp`` is compiled for (``FUSEDOPS_ISAS``).

    Raises:
        BuildError: ``FUSEDOPS_ISAS`` names one that does not exist.
    """
    if not _x86():
        return ["DEFAULT"]
    known = ["DEFAULT", "AVX2", "AVX512"]
    asked = os.environ.get("FUSEDOPS_ISAS") or "native"
    if asked == "native":
        return [_native_isa()]
    names = known if asked == "all" else asked.upper().split(",")
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise BuildError(
            f"FUSEDOPS_ISAS={asked}: {', '.join(unknown)} is none of native, all, "
            f"{', '.join(known)}"
        )
    return [isa for isa in known if isa in names]


def _native_isa() -> str:
    """Return what torch's own test of the processor (at::get_cpu_capability) would say."""
    try:
        found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    flags = set(found[1].split()) if found else set()
    if flags >= {"avx512f", "avx512dq", "avx512bw", "avx512vl", "fma"}:
        return "AVX512"
    return "AVX2" if flags >= {"avx2", "fma"} else "DEFAULT"


@functools.cache
def knows_tiles() -> bool:
    """Return whether the compiler's assembler knows the tile instructions (binutils 2.36)."""
    tiles = "tileloadd (%rax,%rbx,1), %tmm2; tdpbf16ps %tmm2, %tmm1, %tmm0"
    return _compiles(f'void multiply() {{ asm volatile("{tiles}"); }}')


@functools.cache
def knows_wide_copies() -> bool:
    """Return whether the compiler has the options of ``WIDE_COPIES`` (gcc 12)."""
    return _compiles("", *WIDE_COPIES)


def _compiles(source: str, *flags: str) -> bool:
    command = [compiler(), *flags, "-x", "c++", "-c", "-", "-o", os.devnull]
    return subprocess.run(command, input=source, capture_output=True, text=True).returncode == 0


def _tile_flags() -> list[str]:
    without = _x86() and "AVX512" in isa_variants() and not knows_tiles()
    return ["-DFUSEDOPS_WITHOUT_TILES"] if without else []


def sources(name: str = "cpu") -> list[Path]:
    """Return the files that library ``name`` is compiled from."""
    patterns = {
        "cpu": ("*.cpp", "cpu/*/*.cpp", "runtime/*/*.cpp"),
        "host": ("host/*.cpp",),
        "cuda": ("cuda/*.cu", "cuda/*.cpp", "runtime/arena/step_arena.cpp"),
    }[name]
    return sorted(path for pattern in patterns for path in CSRC.glob(pattern))


def sources_digest() -> str:
    """Return what identifies the sources as they are now; fusedops/_core/extension.py asks too."""
    digest = hashlib.sha256()
    for path in [Path(__file__), FLAGS, LOCALIZE, *sorted(CSRC.rglob("*"))]:
        if path.is_file():
            digest.update(str(path.name).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def stamp(name: str = "cpu") -> dict[str, str]:
    """Return what identifies a build of the sources as they are now: torch, flags and sources.

    ``isas`` is a list with blanks: the instruction sets in it.
    """
    torch = find_torch()
    return {
        "library": name,
        "torch": torch.version,
        "cuda": torch.cuda or "",
        "machine": platform.machine(),
        "flags": " ".join([os.environ.get("CXX", ""), EXTRA_FLAGS, *_tile_flags()]).strip(),
        "sources": sources_digest(),
        "isas": " ".join(isa_variants()) if name == "cpu" else "",
    }


def is_current(name: str = "cpu") -> bool:
    """Return whether library ``name`` exists and was built from these sources for this torch."""
    path = library_path(name)
    expected = stamp(name)
    try:
        built = json.loads(path.with_suffix(".json").read_text())
        has_all = set(built["isas"].split()) >= set(expected["isas"].split())
        return path.exists() and has_all and {**built, "isas": expected["isas"]} == expected
    except (OSError, ValueError, KeyError, TypeError):
        return False


def build(*, verbose: bool = False) -> list[Path]:
    """Build the libraries that are not current and return the paths of all.

    Raises:
        BuildError: no torch, no compiler, or the compiler failed.
    """
    names = library_names()
    if "host" not in names:
        print(
            "fusedops: the compiled host module is not built, because Python.h is missing "
            "(Debian: apt install python3-dev): calls of patched modules take longer, and the "
            "memory arena is not available",
            file=sys.stderr,
        )
    for name in names:
        with locked(name):
            if not is_current(name):
                _build_one(name, verbose=verbose)
    return [library_path(name) for name in names]


def check_cuda(*, only: Sequence[str] | None = None, verbose: bool = False) -> str:
    """Compile every file under csrc/cuda and return ptxas' resource report.

    The kernels compile for the GPUs of ``native_flags.py``, and to PTX. The bindings compile
    against the installed torch, which may have no CUDA: nothing is linked, nothing needs a GPU.
    ``only`` names the files of kernels that are compiled, without the bindings.

    Raises:
        BuildError: no nvcc, or a file does not compile.
    """
    if cuda_home() is None:
        raise CannotBuildError("check-cuda needs nvcc: set CUDA_HOME or put nvcc on PATH")
    with locked("cuda"):
        folder = build_folder()
        edges = [edge for edge in edges_of("cuda", folder) if edge.rule != "link"]
        if only is not None:
            edges = [each for each in edges if Path(each.output).name.split(".cu.")[0] in only]
        execute(folder, "cuda", edges, verbose=verbose)
        logs = (Path(edge.output + ".log") for edge in edges if edge.rule == "nvcc")
        return "\n".join(log.read_text() for log in sorted(logs))


def clean() -> None:
    """Remove everything that ``build`` and ``check_cuda`` made."""
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    shutil.rmtree(LIBRARIES, ignore_errors=True)


def build_folder() -> Path:
    """Return the folder of the object files: one per torch version and Python tag."""
    parent = ROOT / "build/sanitized" if SANITIZE else ROOT / "build"
    return parent / f"{find_torch().version}-{sys.implementation.cache_tag}"


def _build_one(name: str, *, verbose: bool) -> None:
    expected = stamp(name)
    folder = build_folder()
    if name == "cpu" and _tile_flags():
        print(
            f"fusedops: the kernels are built without AMX tiles, because the assembler of "
            f"{compiler()} does not know them (binutils 2.36 and newer do)",
            file=sys.stderr,
        )
    edges = edges_of(name, folder)
    execute(folder, name, edges, verbose=verbose)
    install(Path(edges[-1].output), library_path(name), expected)


def install(library: Path, target: Path, expected: dict[str, str]) -> None:
    """Copy a library to its place, with its stamp: a process that has the old one keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".json").unlink(missing_ok=True)
    for suffix, write in (
        (".so", lambda to: shutil.copy(library, to)),
        (".json", lambda to: Path(to).write_text(json.dumps(expected, indent=1) + "\n")),
    ):
        fresh = target.with_suffix(f"{suffix}.{os.getpid()}")
        write(fresh)
        os.replace(fresh, target.with_suffix(suffix))


def edges_of(name: str, folder: Path) -> list[Edge]:
    """Return the steps that build a library, the link last; objects are in ``folder``."""
    edges: list[Edge] = []
    objects: list[str] = []
    precompiled: dict[tuple[str, ...], str] = {}

    def compiled(rule: str, source: Path, suffix: str, flags: Sequence[str] = ()) -> str:
        output, needs = folder / source.relative_to(CSRC).parent / f"{source.name}{suffix}", ()
        output.parent.mkdir(parents=True, exist_ok=True)
        header = _header_of(source)
        if rule == "cxx" and header is not None and name == "cpu":
            # Usable only by sources of the very same flags.
            key = (header.stem, *flags)
            if key not in precompiled:
                made = folder / "precompiled" / f"{header.stem}{suffix}" / header.name
                made.parent.mkdir(parents=True, exist_ok=True)
                precompiled[key] = str(made)
                # Read by ccache in place of the .gch (CCACHE_PCH_EXTSUM).
                Path(f"{made}.gch.sum").write_text(header_digest(header, flags))
                edges.append(Edge("precompile", f"{made}.gch", (str(header),), tuple(flags)))
            needs = (f"{precompiled[key]}.gch",)
            flags = (*flags, "-include", precompiled[key])
        edges.append(Edge(rule, str(output), (str(source),), tuple(flags), needs))
        return str(output)

    for source in sources(name):
        if source.suffix == ".cu":
            objects.append(compiled("nvcc", source, ".o", gencode(gpus(f"{cuda_home()}/bin/nvcc"))))
        elif source.name.endswith(".isa.cpp"):
            for isa in isa_variants():
                objects.append(_isa_object(edges, compiled, source, isa))
        else:
            built = [f"-DFUSEDOPS_HAS_{isa}" for isa in isa_variants()]
            flags = [*built, *_tile_flags(), *_includes(name)]
            objects.append(compiled("cxx", source, ".o", flags))
    output = str(folder / library_path(name).name)
    edges.append(Edge("link", output, tuple(objects), tuple(link_flags(name))))
    return edges


def _header_of(source: Path) -> Path | None:
    """Return the header that is compiled ahead for a source, if its kind has one."""
    name = "vectors.h" if source.name.endswith(".isa.cpp") else "bindings.h"
    header = CSRC / "precompiled" / name
    return header if source.suffix == ".cpp" and header.exists() else None


def header_digest(header: Path, flags: Sequence[str]) -> str:
    """Return what identifies a precompiled header: its text, flags, compiler and torch."""
    digest = hashlib.sha256(header.read_bytes())
    digest.update((find_torch().folder / "version.py").read_bytes())
    every = [*CXX_FLAGS, *flags, EXTRA_FLAGS]
    digest.update("\0".join([_compiler_version(), *every]).encode())
    return digest.hexdigest()


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True).stdout


def _ccache() -> str:
    """Return what stands before the compiler, if there is a cache.

    What the user's environment says of ccache is kept.
    """
    found = shutil.which("ccache")
    if found is None:
        return ""
    sloppiness = "pch_defines,time_macros,include_file_mtime,include_file_ctime"
    wanted = {
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_NOHASHDIR": "true",
        "CCACHE_PCH_EXTSUM": "true",
        "CCACHE_SLOPPINESS": sloppiness,
    }
    settings = [f"{name}={value}" for name, value in wanted.items() if name not in os.environ]
    return f"{shlex.join(['env', *settings, found])} "


def _isa_object(edges: list[Edge], compiled, source: Path, isa: str) -> str:  # type: ignore[no-untyped-def]
    # On x86 DEFAULT is a slow fallback whatever is done; half the compile time counts for more.
    fallback = ["-O2"] if isa == "DEFAULT" and _x86() else []
    more = _tile_flags() if isa == "AVX512" else []
    if isa == "AVX2" and knows_wide_copies():
        more += WIDE_COPIES
    raw = compiled("cxx", source, f".{isa}.o", [*ISA_FLAGS[isa], *fallback, *more])
    # Sanitizers start by initialisers of the objects; such a library stays on this machine.
    if isa == "DEFAULT" or SANITIZE:
        return str(raw)
    output = raw.removesuffix(".o") + ".local.o"
    edges.append(Edge("localize", output, (raw,), (isa,)))
    return str(output)


def _includes(name: str) -> list[str]:
    if name == "host":
        return [f"-isystem{sysconfig.get_paths()['include']}"]
    if name != "cuda":
        return []
    home = cuda_home()
    compat = [] if find_torch().cuda else [f"-I{COMPAT}"]
    return [*compat, f"-isystem{home}/include"]


def link_flags(name: str) -> list[str]:
    if name == "host":  # symbols of Python come from the process
        return [f"-L{LIBRARIES}", "-l:libfusedops_cpu.so", "-Wl,-rpath,$ORIGIN"]
    folder = find_torch().folder / "lib"
    flags = [f"-L{folder}", "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", "-ltorch"]
    # Without -fopenmp: the only OpenMP runtime in the process must be the one that torch brings.
    own_openmp = sorted(
        [*folder.glob("libgomp*.so*"), *folder.parent.glob("../torch.libs/libgomp*")]
    )
    flags.append(str(own_openmp[0]) if own_openmp else "-lgomp")
    if name == "cuda":
        flags += ["-lc10_cuda", "-ltorch_cuda", f"-L{cuda_home()}/lib64", "-lcudart"]
    return [*flags, "-Wl,--no-undefined", "-Wl,-z,relro,-z,now"]


def _rules() -> dict[str, str]:
    torch = find_torch()
    cxx = shlex.join([*CXX_FLAGS, f"-I{CSRC}", *torch.include_flags])
    localize = shlex.join([sys.executable, str(LOCALIZE)])
    rules = {
        "cxx": f"{_ccache()}{compiler()} -MMD -MF $out.d {cxx} $flags {EXTRA_FLAGS} -c $in -o $out",
        "precompile": (
            f"{compiler()} -MMD -MF $out.d {cxx} $flags {EXTRA_FLAGS} -x c++-header -c $in -o $out"
        ),
        "localize": f"{localize} $in $out $flags",
        "link": f"{compiler()} {EXTRA_FLAGS} -shared $in -o $out $flags",
    }
    if cuda_home():
        program = f"{cuda_home()}/bin/nvcc"
        nvcc = shlex.join([program, *NVCC_FLAGS, f"-I{CSRC}"])
        # ptxas reports on stderr; it is kept beside the object for tools/cuda_report.py.
        rules["nvcc"] = (
            f"{nvcc} $flags -ccbin {compiler()} -MMD -MF $out.d -c $in -o $out > $out.log 2>&1 "
            "|| { cat $out.log; rm -f $out; exit 1; }"
        )
    return rules


def execute(folder: Path, name: str, edges: list[Edge], *, verbose: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rules = _rules()
    jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    ninja = _find_ninja()
    if ninja is None:
        _execute_without_ninja(rules, edges, jobs)
        return
    lines = ["ninja_required_version = 1.5", f"builddir = {_escaped(str(folder / name))}.log"]
    for rule, command in rules.items():
        lines += [f"rule {rule}", f"  command = {command}", f"  description = {rule} $out"]
        if rule in ("cxx", "nvcc", "precompile"):
            lines += ["  depfile = $out.d", "  deps = gcc"]
    for edge in edges:
        inputs = " ".join(map(_escaped, edge.sources))
        inputs += "".join(f" | {_escaped(need)}" for need in edge.needs)
        lines.append(f"build {_escaped(edge.output)}: {edge.rule} {inputs}")
        lines.append(f"  flags = {shlex.join(edge.flags).replace('$', '$$')}")
    file = folder / f"{name}.ninja"
    text = "\n".join(lines) + "\n"
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    command = [ninja, "-f", str(file), "-j", str(jobs), *(["-v"] if verbose else [])]
    if subprocess.run(command, cwd=folder, stdout=sys.stderr).returncode:
        raise BuildError(f"compiling {name} failed; the compiler's message is above")


def _execute_without_ninja(rules: dict[str, str], edges: list[Edge], jobs: int) -> None:
    """Run every step, in the order of the kinds: for machines that have no ninja and no network."""

    def run(edge: Edge) -> None:
        command = rules[edge.rule].replace("$out", shlex.quote(edge.output))
        command = command.replace("$in", shlex.join(edge.sources))
        command = command.replace("$flags", shlex.join(edge.flags))
        print(f"{edge.rule} {edge.output}", file=sys.stderr, flush=True)
        if subprocess.run(command, shell=True).returncode:
            raise BuildError(f"{edge.rule} failed for {edge.output}; the message is above")

    with ThreadPoolExecutor(jobs) as pool:
        for kinds in (("precompile",), ("cxx", "nvcc"), ("localize",), ("link",)):
            list(pool.map(run, [edge for edge in edges if edge.rule in kinds]))


def _find_ninja() -> str | None:
    beside = Path(sys.executable).parent / "ninja"
    return str(beside) if beside.exists() else shutil.which("ninja")


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Let one build of a library run at a time: two pytest workers may start one at once."""
    folder = build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _escaped(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and "64" in (sysconfig.get_platform())


def _main(arguments: Sequence[str]) -> int:
    verbose = "-v" in arguments
    match [argument for argument in arguments if argument != "-v"]:
        case ["build"]:
            for path in build(verbose=verbose):
                print(path.relative_to(ROOT))
        case ["clean"]:
            clean()
        case _:
            print("usage: python tools/native.py build|clean [-v]", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(_main(sys.argv[1:]))
    except CannotBuildError as problem:
        print(f"fusedops: {problem}", file=sys.stderr)
        sys.exit(3)  # the Makefile goes on without the libraries; a failing compiler (1) stops it
    except BuildError as problem:
        sys.exit(f"fusedops: {problem}")

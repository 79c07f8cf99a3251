"""Host settings that slow training down, and those that a running process can change itself.

``inspect_host`` reports and changes nothing. ``tune_host`` changes the settings of this process,
and only when called: importing fusedops changes no setting.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from fusedops._core import checks, env
from fusedops.runtime.architecture import cpuinfo

# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MMAP_THRESHOLD = 1 << 30
# What older versions of glibc accept at most: half of a 64 MiB heap.
_OLD_MMAP_THRESHOLD = 32 << 20
_TOP_PAD = 64 << 20
_NEVER_TRIM = -1
_IS_MMAPPED = 2  # a flag in the size that glibc keeps in front of a block

_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class SettingChange:
    """One setting that ``tune_host`` looked at."""

    setting: str  # what it is called
    applied: bool  # whether it has the good value now
    note: str  # the value and its meaning, or why it could not be applied


@dataclass(frozen=True)
class HostTuning:
    """What ``tune_host`` did; printing it shows one line per setting."""

    changes: tuple[SettingChange, ...]

    @property
    def allocator_tuned(self) -> bool:
        """Whether large results now reuse memory that has been touched before."""
        return any(change.setting == "allocator" and change.applied for change in self.changes)

    def __str__(self) -> str:
        return "\n".join(
            f"{'done' if change.applied else 'not done'}: {change.setting}: {change.note}"
            for change in self.changes
        )


@dataclass(frozen=True)
class HostFinding:
    """One host setting as ``inspect_host`` found it."""

    setting: str  # what it is called
    good: bool  # whether it costs no speed
    state: str  # what was found
    cost: str = ""  # what it costs, empty when good
    cure: str = ""  # the command or call that cures it, empty when good or when there is none


def tune_host(*, threads: int | None = None) -> HostTuning:
    """Apply the host settings that a running process can apply to itself.

    * Allocator (glibc): blocks below 1 GiB come from the heap and freed memory stays with the
      process. By default each large result is a fresh mapping whose pages the kernel zeroes on
      first touch: ``x + 1`` on 64 MiB takes 31 ms instead of 9 (two Zen 5 cores), a bfloat16
      GPT training step 1.55 to 1.78 times as long.
    * Huge pages (Linux): torch asks for them for results of 2 MiB and more. It reads that setting
      at its first allocation: call this before the first CPU tensor is made. On pages of 4 KiB
      ``add_layer_norm`` of 8 MiB takes 0.80 ms instead of 0.70 (two Zen 4 cores).
    * Threads: one per physical core that this process may use. Where ``OMP_NUM_THREADS`` is set,
      torch's number is unchanged: torchrun, or another launcher of several processes on one
      machine, has divided the cores.

    Args:
        threads: number of threads for torch instead of that.

    Returns:
        A report of what was done and what could not be.

    Raises:
        ValueError: if ``threads`` is not positive.

    Note:
        The process keeps its peak memory until it ends. The allocator settings hold for memory
        of the main thread; other threads' large blocks are still mapped one by one.

    Example:
        >>> [change.setting for change in fusedops.tune_host().changes][-2:]
        ['allocator', 'threads']
    """
    if threads is not None:
        checks.integer("tune_host", "threads", threads, least=1)
    # Huge pages first: their trial block is then mapped and given back.
    changes = (_tune_huge_pages(), _tune_allocator(), _tune_threads(threads))
    return HostTuning(tuple(change for change in changes if change is not None))


def inspect_host() -> list[HostFinding]:
    """Return what this machine's settings cost, changing nothing (takes about 50 ms)."""
    findings: list[HostFinding | None] = [
        _look_at_allocator(),
        _look_at_huge_pages(),
        _look_at_threads(),
        _look_at_quota(),
        _look_at_instruction_set(),
        _look_at_load(),
        _look_at_governor(),
        _look_at_numa(),
    ]
    return [finding for finding in findings if finding is not None]


def physical_cores() -> int:
    """Return the number of physical cores that this process may use, at least 1.

    Hardware threads of one core count once; the affinity mask and a container's CPU quota count.
    """
    cores = len({_siblings(cpu) for cpu in allowed_cpus()})
    quota = _cpu_quota()
    return max(1, min(cores, int(quota)) if quota is not None else cores)


def other_allocator() -> str | None:
    """Return the allocator that stands in for the C library's, or ``None``."""
    maps = _read("/proc/self/maps")
    return next((name for name in _OTHER_ALLOCATORS if f"lib{name}" in maps), None)


def maps_large_blocks() -> bool | None:
    """Return whether the C library makes a fresh mapping for each large block.

    It asks for one of 64 MiB and reads its flags; ``None`` when this is not glibc.
    """
    libc = _glibc()
    if libc is None or other_allocator() is not None:
        return None
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    block = libc.malloc(64 << 20)
    size_and_flags = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value
    libc.free(block)
    return bool(size_and_flags & _IS_MMAPPED)


def _tune_huge_pages() -> SettingChange | None:
    mode = _huge_page_mode()
    if mode is None:
        return None
    if mode == "never":
        return SettingChange("huge pages", False, "switched off in the kernel")
    was_set_here = env.set_huge_pages()
    if mode == "always" or _gets_huge_pages():
        return SettingChange("huge pages", True, "tensors of 2 MiB and more sit on them")
    if was_set_here:
        env.unset_huge_pages()
    note = f"torch had allocated before; start with {env.HUGE_PAGES}=1"
    return SettingChange("huge pages", False, note)


def _tune_allocator() -> SettingChange:
    other = other_allocator()
    if other is not None:
        return SettingChange("allocator", True, f"{other} is loaded, which keeps memory by itself")
    libc = _glibc()
    if libc is None:
        return SettingChange("allocator", False, "the C library is not glibc, it has no mallopt")
    threshold = _MMAP_THRESHOLD
    if not libc.mallopt(_M_MMAP_THRESHOLD, threshold):
        threshold = _OLD_MMAP_THRESHOLD
        libc.mallopt(_M_MMAP_THRESHOLD, threshold)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
    libc.mallopt(_M_TOP_PAD, _TOP_PAD)
    note = f"glibc keeps blocks below {threshold >> 20} MiB on the heap and never trims it"
    return SettingChange("allocator", True, note)


def _tune_threads(threads: int | None) -> SettingChange:
    before = torch.get_num_threads()
    count = threads if threads is not None else physical_cores()
    if threads is None and env.threads_are_set():
        count = before
    if before != count:
        torch.set_num_threads(count)
    was = "" if before == count else f" (was {before})"
    return SettingChange(
        "threads", True, f"{count}{was} for {physical_cores()} usable physical cores"
    )


def _look_at_allocator() -> HostFinding:
    other = other_allocator()
    if other is not None:
        return HostFinding("allocator", True, f"{other} is loaded")
    mapped = maps_large_blocks()
    if mapped is None:
        return HostFinding("allocator", True, "not glibc: not inspected")
    if not mapped:
        return HostFinding("allocator", True, "glibc keeps large blocks on the heap")
    return HostFinding(
        "allocator",
        False,
        "glibc maps each large block afresh",
        "every large result page-faults: 1.5 to 1.8 times as long a training step on the CPU",
        "fusedops.tune_host(), or start with MALLOC_MMAP_THRESHOLD_=1073741824 "
        "MALLOC_TRIM_THRESHOLD_=-1 MALLOC_TOP_PAD_=67108864",
    )


def _look_at_huge_pages() -> HostFinding | None:
    mode = _huge_page_mode()
    if mode is None:
        return None
    if mode == "never":
        cost = "more page faults and TLB misses on large tensors"
        cure = f"echo madvise | sudo tee {_THP}"
        return HostFinding("huge pages", False, "switched off in the kernel", cost, cure)
    if mode == "always" or _gets_huge_pages():
        return HostFinding("huge pages", True, f"{mode}, and tensors get them")
    state = f"{mode}, and tensors do not ask for them"
    cost = "large tensors sit on 4 KiB pages; with fresh mappings about twice the page-fault time"
    cure = f"fusedops.tune_host() before the first tensor, or start with {env.HUGE_PAGES}=1"
    return HostFinding("huge pages", False, state, cost, cure)


def _look_at_threads() -> HostFinding:
    threads, cores = torch.get_num_threads(), physical_cores()
    state = f"{threads} torch threads, {cores} usable physical cores"
    if threads == cores:
        return HostFinding("threads", True, state)
    cost = "cores stand idle" if threads < cores else "threads wait for each other at barriers"
    cure = f"fusedops.tune_host(threads={cores}), or start with OMP_NUM_THREADS={cores}"
    return HostFinding("threads", False, state, cost, cure)


def _look_at_quota() -> HostFinding | None:
    quota = _cpu_quota()
    allowed = len(allowed_cpus())
    if quota is None or quota >= allowed:
        return None
    state = f"the container may use {quota:g} of {allowed} CPUs' time"
    cost = "the kernel stops all threads once the quota of a period is used up"
    cure = f"pin instead: docker run --cpuset-cpus=0-{max(0, int(quota) - 1)}"
    return HostFinding("CPU quota", False, state, cost, cure)


def _look_at_instruction_set() -> HostFinding:
    used = torch.backends.cpu.get_cpu_capability()
    flags = cpuinfo().get("flags", "").split()
    if not flags or "AVX512" in used or platform.machine() not in ("x86_64", "AMD64"):
        return HostFinding("instruction set", True, f"torch uses {used}")
    state = f"torch uses {used}; the CPU has no AVX-512"
    cost = "the AVX-512 kernels (about 1.5 to 2 times as fast) cannot run"
    cure = ""
    if {"avx512f", "avx512bw", "avx512vl"} <= set(flags):
        state = f"torch uses {used} although the CPU has AVX-512"
        cost = "element-wise CPU kernels run at about half the rate"
        cure = "unset ATEN_CPU_CAPABILITY"
    elif "avx2" in flags and "AVX2" not in used:
        state = f"torch uses {used} although the CPU has AVX2"
        cost = "CPU kernels run 6 to 12 times slower"
        cure = "unset ATEN_CPU_CAPABILITY"
    return HostFinding("instruction set", False, state, cost, cure)


def _look_at_load() -> HostFinding | None:
    try:
        load = os.getloadavg()[0]
    except OSError:
        return None
    cores = len(allowed_cpus())
    state = f"load {load:.1f} on {cores} CPUs"
    if load < 0.5 * cores:
        return HostFinding("other processes", True, state)
    cost = "one busy neighbour makes each OpenMP barrier wait 8 to 16 ms"
    cure = "stop other work while measuring (look with `top`)"
    return HostFinding("other processes", False, state, cost, cure)


def _look_at_governor() -> HostFinding | None:
    governor = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
    if not governor:
        return None
    if governor in ("performance", "schedutil"):
        return HostFinding("frequency governor", True, governor)
    cost = "short bursts run before the clock has risen"
    cure = "sudo cpupower frequency-set -g performance"
    return HostFinding("frequency governor", False, governor, cost, cure)


def _look_at_numa() -> HostFinding | None:
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"))
    if len(nodes) < 2:
        return None
    allowed = allowed_cpus()
    spanned = sum(bool(allowed & _cpu_list(path.read_text())) for path in nodes)
    if spanned < 2:
        return HostFinding("memory nodes", True, f"this process is bound to one of {len(nodes)}")
    state = f"this process spans {spanned} memory nodes"
    cost = "a core may read the memory of another node, at about half the bandwidth"
    cure = "numactl --cpunodebind=0 --membind=0 COMMAND"
    return HostFinding("memory nodes", False, state, cost, cure)


def _glibc() -> ctypes.CDLL | None:
    if platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") else None


def _huge_page_mode() -> str | None:
    words = _read(_THP)
    return words[words.index("[") + 1 : words.index("]")] if words else None


def _gets_huge_pages() -> bool:
    """Return whether a fresh 64 MiB tensor comes on huge pages."""
    before = _huge_page_kib()
    block = torch.zeros(16 << 20).fill_(1.0)
    after = _huge_page_kib()
    del block
    return after - before > 32 << 10


def _huge_page_kib() -> int:
    lines = _read("/proc/self/smaps_rollup").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


def allowed_cpus() -> set[int]:
    """Return the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _siblings(cpu: int) -> frozenset[int]:
    topology = f"/sys/devices/system/cpu/cpu{cpu}/topology"
    return frozenset(_cpu_list(_read(f"{topology}/thread_siblings_list")) or (cpu,))


def _cpu_list(text: str) -> set[int]:
    """Return the CPUs of a kernel list such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _cpu_quota() -> float | None:
    """Return how many CPUs' time the container may use, ``None`` without a limit."""
    limit = _read("/sys/fs/cgroup/cpu.max").split()
    if len(limit) != 2:
        folder = "/sys/fs/cgroup/cpu"
        limit = [_read(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    quota, period = limit
    return None if quota in ("", "max", "-1") or not period else int(quota) / int(period)


def _read(path: str | Path) -> str:
    """Return what a file of the kernel says, nothing where it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""

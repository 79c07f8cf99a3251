"""What the compilers are told, for tools/native.py."""

from collections.abc import Collection

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw")
# ATen's vector headers look at HAVE_*_CPU_DEFINITION and CPU_CAPABILITY_*, as in torch's own build.
ISA_FLAGS = {
    "DEFAULT": ("-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT"),
    "AVX2": (
        *AVX2,
        "-DCPU_CAPABILITY=AVX2",
        "-DCPU_CAPABILITY_AVX2",
        "-DHAVE_AVX2_CPU_DEFINITION",
    ),
    "AVX512": (
        *AVX512,
        "-DCPU_CAPABILITY=AVX512",
        "-DCPU_CAPABILITY_AVX512",
        "-DHAVE_AVX512_CPU_DEFINITION",
    ),
}
# gcc from 12 on: a copy of 32 bytes is one register of AVX2. By default it is two of 16, and what
# is loaded so goes through the stack, where a processor waits for the two stores: one row of a
# product in float32 takes five times as long (Zen 3).
WIDE_COPIES = ("-mmove-max=256", "-mstore-max=256")
# Machine code for these (that of sm_80 runs on 86 and 89 too, of 100 on 103, of 120 on 121), as far
# as nvcc knows them: 12.8 is the first to know the last two. Any other GPU compiles the PTX of
# compute_90 at its first launch.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
# The C++11 ABI is fixed: every torch that we support (2.11 and newer) is built with it.
CXX_FLAGS = (
    "-std=c++20",
    "-O3",
    "-g0",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-fno-gnu-unique",
    "-Wall",
    "-Wno-maybe-uninitialized",  # gcc 12 on at::vec and on its own AVX-512 headers
    "-Wno-uninitialized",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",  # 32-byte vectors passed by the default instruction set, inside one file only
    "-D_GLIBCXX_USE_CXX11_ABI=1",
    "-DNDEBUG",  # as torch's libraries: at::RecordFunction has one member more without it
)
NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "-Xptxas=-v",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Xcudafe=--diag_suppress=177",
)


def gencode(known: Collection[str]) -> list[str]:
    """Return what tells nvcc which GPUs to compile for, of those that it knows (``"sm_90"``...)."""
    flags = []
    for architecture in ARCHITECTURES:
        if architecture in known:
            virtual = architecture.replace("sm", "compute")
            code = f"[{architecture},{virtual}]" if architecture == "sm_90" else architecture
            flags.append(f"-gencode=arch={virtual},code={code}")
    return flags

"""Print the scaling table of the PanGu models with experts, and the step of CodeGeeX-13B.

    python tools/scaling_table.py

MindSpore's team published how many parameters one, two and four nodes of 8 Ascend 910 train when
the host keeps the optimizer's states. CodeGeeX's team published how many tokens its 1,536 devices
trained in a day. docs/planning.md has the output.
"""

from __future__ import annotations

from dataclasses import replace

from fusedops.planner import Layout, estimate, load_device, preset, step_shape, step_time
from fusedops.planner.step_time import utilization

# Model, devices and billions of parameters, as published.
SCALING = (
    ("pangu-moe-61b", 8, 61.2),
    ("pangu-moe-121b", 16, 121.0),
    ("pangu-moe-242b", 32, 242.0),
)
# Each device has the same share of every parameter: the table divides experts by tensor
# parallelism, which replicates them here.
SHARED = {"zero": 3, "precision": "float32"}
ON_HOST = {"offload": ("optimizer",), "optimizer_overlap": False}
CODEGEEX_DEVICES, CODEGEEX_BATCH, CODEGEEX_TOKENS_PER_DAY = 1536, 3072, 54.3e9
CODEGEEX = {"dp": 192, "tp": 8, "zero": 2, "micro_batch": 16}


def scaling_rows() -> list[str]:
    """Return the table of the models with experts."""
    rows = [
        "| model | devices | parameters of the layers | published | GB per device, all states "
        "| GB per device, states on the host | moved | GB on all hosts |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, devices, published in SCALING:
        # The published counts are those of the layers alone.
        model = replace(preset(name), vocab_size=1, position_tables=0, query_layer=False)
        on = Layout.of(dp=devices, **SHARED)
        off = on.replace(**ON_HOST)
        here, away = estimate(model, on), estimate(model, off)
        every, weights = here.weights + here.states, away.weights
        rows.append(
            f"| `{name}` | {devices} | {model.layers().total / 1e9:.1f} B | {published:g} B "
            f"| {every / 1e9:.1f} | {weights / 1e9:.1f} | {1 - weights / every:.0%} "
            f"| {away.host * devices / 1e9:,.0f} |"
        )
    return rows


def codegeex_rows() -> list[str]:
    """Return predicted and published speed of CodeGeeX-13B."""
    model, device = preset("codegeex-13b"), load_device("ascend910")
    tokens = CODEGEEX_BATCH * model.seq_len
    published = tokens / CODEGEEX_TOKENS_PER_DAY * 86400
    rows = [
        "| recomputation | s per step | tokens per day | TFLOP/s per device |",
        "|---|---:|---:|---:|",
    ]
    for words in ("none", "full"):
        shape = step_shape(model, Layout.of(**CODEGEEX, recompute=words))
        seconds = step_time(shape, device).seconds
        reached = utilization(shape, device, seconds) * device.peak["bfloat16"] / 1e12
        rows.append(
            f"| predicted, `{words}` | {seconds:.2f} | {tokens / seconds * 86400 / 1e9:.1f} B "
            f"| {reached:.1f} |"
        )
    shape = step_shape(model, Layout.of(**CODEGEEX))
    reached = utilization(shape, device, published) * device.peak["bfloat16"] / 1e12
    day = f"{CODEGEEX_TOKENS_PER_DAY / 1e9:.1f} B"
    rows.append(f"| published | {published:.2f} | {day} | {reached:.1f} |")
    return rows


if __name__ == "__main__":
    print("\n".join([*scaling_rows(), "", *codegeex_rows()]))

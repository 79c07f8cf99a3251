"""Plan a training job on 64 GPUs and read the plan; docs/tutorials/plan.md explains each step."""

# %%
from fusedops.planner import fastest, load_device, preset

model = preset("llama3-70b")
device = load_device("h100")
DEVICES, GLOBAL_BATCH, SEQ_LEN = 64, 512, 8192  # sequences of a step, tokens of a sequence
print(f"{model.parameters().total / 1e9:.1f} billion weights on {DEVICES} x {device.name}")


def show(plan, rows=5):
    """Print the fastest layouts of a plan."""
    print("dp tp pp cp zero  micro-batches  schedule     recompute   seconds  peak GiB  left GiB")
    for row in plan.rows[:rows]:
        sizes, training = row.layout.parallel, row.layout.training
        schedule = sizes.pipeline_schedule if sizes.pp > 1 else "-"
        print(
            f"{sizes.dp:2} {sizes.tp:2} {sizes.pp:2} {sizes.cp:2} {sizes.zero:4}  "
            f"{training.micro_batch:5} x {sizes.microbatches:<5}  {schedule:12} "
            f"{sizes.recompute:10} {row.seconds:8.2f}  {row.estimate.peak / 2**30:8.1f}  "
            f"{row.left(plan.memory) / 2**30:8.1f}"
        )


# %%
plan = fastest(model, DEVICES, device, GLOBAL_BATCH, offload=[()])  # nothing in host memory
show(plan)
print(f"{plan.choices} choices, {plan.examined} examined, {plan.too_large} do not fit")

# %%
best = plan.rows[0]
for part, seconds in best.time.parts.items():
    if seconds > 0.002 * best.seconds:
        print(f"{part:14} {seconds:6.2f} s  {seconds / best.seconds:6.1%}")

# %%
print("the peak is in the moment:", best.estimate.moment)
for part, size in best.estimate.parts.items():
    print(f"{part:14} {size / 2**30:6.1f} GiB")

# %%
tokens_per_second = GLOBAL_BATCH * SEQ_LEN / best.seconds
days = 1e12 / tokens_per_second / 86400
print(f"{tokens_per_second:,.0f} tokens/s: a trillion tokens take {days:.0f} days")

# %%
half = fastest(model, DEVICES // 2, device, GLOBAL_BATCH, offload=[()], keep=1)
show(half)
print(f"64 devices are {half.rows[0].seconds / best.seconds:.2f} times as fast as 32")

# %%
simple = fastest(model, DEVICES, device, GLOBAL_BATCH, offload=[()], pp=[1], cp=[1], keep=1)
show(simple)
print(f"without a pipeline a step takes {simple.rows[0].seconds / best.seconds:.3f} times as long")

"""Find the slow rank of a job; docs/tutorials/slow_rank.md has the commands."""

# %%
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusedops.models import Transformer, initialize, preset
from fusedops.profiler import ModuleTimer

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()
slow_rank = int(sys.argv[1]) if len(sys.argv) > 1 else None
folder = "healthy" if slow_rank is None else "slow"

# %%
model = Transformer(preset("tiny-llama"), device="meta").to_empty(device="cpu")
initialize(model, seed=0)


def throttle(module, inputs):
    """Slow the forward of one rank, as a hot or busy machine does."""
    if rank == slow_rank:
        time.sleep(0.02)


for layer in model.layers.values():
    layer.register_forward_pre_hook(throttle)

# %%
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
timer = ModuleTimer(folder, every=5)  # gathers the times of all ranks every five steps
timer.start(wrapped)
generator = torch.Generator().manual_seed(rank)

for step in range(1, 41):
    batch = torch.randint(256, (4, 65), generator=generator)
    timer.begin_step()
    output = wrapped(batch[:, :-1], labels=batch[:, 1:])
    (output.total / output.num_tokens).backward()
    timer.begin_optimizer()
    optimizer.step()
    optimizer.zero_grad()
    timer.end_step(step)
timer.stop()
dist.destroy_process_group()

"""Train in any layout of processes; docs/tutorials/parallel.md has the commands."""

# %%
import sys

import torch
import torch.distributed as dist

from fusedops.models import ParallelConfig, Transformer, parallelize, preset

# "dp=2 tp=2" on the command line becomes {"dp": 2, "tp": 2}: one process where nothing is given.
layout = {name: int(size) for name, size in (text.split("=") for text in sys.argv[1:])}
config = ParallelConfig(**layout)
if config.dp * config.tp * config.pp > 1:
    dist.init_process_group("gloo")  # "nccl" on GPUs

# %%
model = Transformer(preset("tiny-llama"), device="meta")  # shapes only, no memory yet
engine = parallelize(model, config, seed=0)  # this process gets its shard, with weights
optimizer = engine.optimizer(lr=1e-3)  # after parallelize, which makes new parameters

# %%
batch = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(0))
tokens, labels = batch[:, :-1], batch[:, 1:]
first = not dist.is_initialized() or dist.get_rank() == 0

for step in range(1, 6):
    rows, targets = engine.rows(tokens), engine.rows(labels)  # of this data parallel rank
    parts = zip(rows.chunk(config.microbatches), targets.chunk(config.microbatches), strict=True)
    microbatches = [engine.shard_batch(*part) for part in parts]
    count = engine.count(targets)  # targets on all processes
    outputs = engine.step(microbatches, count)  # forward and backward
    loss = engine.mean_loss(outputs, count)
    optimizer.step()
    optimizer.zero_grad()
    if first:
        print(f"step {step}  loss {loss.item():.4f}")

# %%
weights = [getattr(p, "to_local", lambda p=p: p)().numel() for p in engine.model.parameters()]
if first:
    print(f"this process stores {sum(weights):,} of {model.config.parameters().total:,} weights")
if dist.is_initialized():
    dist.destroy_process_group()

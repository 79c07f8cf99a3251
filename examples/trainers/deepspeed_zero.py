"""fusedops with DeepSpeed: `initialize` patches the model and makes the engine.

torchrun --nproc-per-node 2 deepspeed_zero.py [stock]
"""

import sys

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fusedops.integrations.deepspeed import initialize

# On a CPU DeepSpeed would first compile an extension for shared memory.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,  # DeepSpeed knows Adam and its own
}
make = deepspeed.initialize if "stock" in sys.argv else initialize
engine, *_ = make(model=model, optimizer=optimizer, config=config)

rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
rows = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(1))[rank::ranks]
for _ in range(10):
    loss = engine(input_ids=rows, labels=rows).loss
    engine.backward(loss)
    engine.step()
    if rank == 0:
        print(f"loss {loss.item():.6f}")
torch.distributed.destroy_process_group()

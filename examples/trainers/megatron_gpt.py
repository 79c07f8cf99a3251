"""fusedops in Megatron-Core: `layer_spec()` in the place of the local layer spec.

python megatron_gpt.py [stock]
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from fusedops.integrations.megatron import layer_spec

if not torch.cuda.is_available():  # Megatron asks for the current GPU
    torch.cuda.current_device = lambda: "cpu"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
torch.manual_seed(0)
sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 176}
dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
gated = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
config = TransformerConfig(
    use_cpu_initialization=True, add_bias_linear=False, **sizes, **dropout, **gated
)
make_spec = get_gpt_layer_local_spec if "stock" in sys.argv else layer_spec
model = GPTModel(config, make_spec(), vocab_size=256, max_sequence_length=32)

ids = torch.randint(256, (8, 32))
positions = torch.arange(32).expand(8, -1)
future = torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    loss = model(ids, positions, future, labels=ids.roll(-1, 1)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}")

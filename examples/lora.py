"""Fine-tune with LoRA (peft); docs/tutorials/lora.md explains each step."""

# %%
import copy

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops

# %%
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=2,
    num_attention_heads=4,
)
base = LlamaForCausalLM(config)
text = "".join(f"{number} times 3 is {3 * number}. " for number in range(1, 60))
ids = torch.tensor(list(text.encode())[:1024]).view(8, 128)

# %%
adapters = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules=["q_proj", "v_proj"],
    task_type="CAUSAL_LM",
)
stock = get_peft_model(copy.deepcopy(base), adapters)
model = copy.deepcopy(stock)  # the same adapters, which are drawn at random
model.print_trainable_parameters()

# %%
print(fusedops.patch(model))  # after get_peft_model


# %%
def fine_tune(model):
    """Train the adapters, and return the losses."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


expected, losses = fine_tune(stock), fine_tune(model)
for step in (0, 10, 19):
    print(f"step {step:2}  loss: stock {expected[step]:.5f}, patched {losses[step]:.5f}")

# %%
model.save_pretrained("adapter")  # the adapter alone
loaded = PeftModel.from_pretrained(copy.deepcopy(base), "adapter").eval()
with torch.no_grad():
    loss = loaded(input_ids=ids, labels=ids).loss
    print(f"loss of the saved adapter, in a stock model: {loss:.5f}")

# %%
merged = model.merge_and_unload()  # adds the adapters to the weights
report = fusedops.patch(merged)  # now the layers that had adapters are fused as well
with torch.no_grad():
    loss = merged(input_ids=ids, labels=ids).loss
print(f"loss of the merged model: {loss:.5f}; {report.num_replaced} modules replaced")

"""fusedops in Lightning: a callback patches the module before the strategy wraps it.

python lightning_module.py [stock]
"""

import sys

import lightning
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fusedops.integrations.lightning import FusedOps


class Module(lightning.LightningModule):
    """A language model."""

    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))

    def training_step(self, ids):
        """Return the loss of a batch."""
        loss = self.model(input_ids=ids, labels=ids).loss
        print(f"loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
module = Module()
loader = torch.utils.data.DataLoader(torch.randint(256, (8, 32)).repeat(10, 1), batch_size=8)
callbacks = [] if "stock" in sys.argv else [FusedOps()]
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, **quiet)
trainer.fit(module, loader)

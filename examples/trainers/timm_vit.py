"""fusedops with timm: patch the model, and train as before.

python timm_vit.py [stock]
"""

import sys

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2

import fusedops

torch.manual_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10, pretrained=False
)
if "stock" not in sys.argv:
    # Level O3 also fuses attention that plain code calls, as timm's does.
    print(fusedops.patch(model, level="O3"))

images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
loss_function = LabelSmoothingCrossEntropy(0.1)
optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1)
for _ in range(10):
    loss = loss_function(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}")

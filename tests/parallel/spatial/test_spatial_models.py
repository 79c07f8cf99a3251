"""Models of torchvision and timm on 2 x 2 ranks equal one process, gradients included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from spatial_cases import compare, mesh_of
from torch import nn

from fusedops.testing import threads

pytestmark = pytest.mark.slow
# Stochastic depth draws random numbers, which a rank that has a part draws in another order.
MODELS = {
    "torchvision resnet50": True,
    "torchvision convnext_tiny": False,
    "torchvision efficientnet_b0": False,
    "torchvision vgg11_bn": False,
    "torchvision segmentation.deeplabv3_resnet50": False,
    "timm convnext_atto": True,
    "timm vit_tiny_patch16_224": True,
}


def _model(name: str) -> nn.Module:
    library, _, kind = name.partition(" ")
    torch.manual_seed(0)
    if library == "timm":
        import timm

        return timm.create_model(kind, num_classes=10)
    import torchvision

    package, _, kind = kind.rpartition(".")
    if package:
        options: dict[str, Any] = {"weights_backbone": None, "num_classes": 5}
        return Segmentation(getattr(torchvision.models.segmentation, kind)(**options))
    model = getattr(torchvision.models, kind)(num_classes=10)
    if kind.startswith("vgg"):  # its first linear layer has 800 MB in float64
        model.classifier = nn.Sequential(nn.Linear(25088, 16), nn.ReLU(), nn.Linear(16, 10))
    return model


class Segmentation(nn.Module):
    """The output of a segmentation model without its dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)["out"]


def _as_one_process(rank: int, name: str, model: nn.Module) -> None:
    size = 224 if name.endswith("224") else 96
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(5)).double()
    compare(copy.deepcopy(model), x, mesh_of((1, 2, 2)), {2: "y", 3: "x"}, name)


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_one_process(name: str) -> None:
    library = name.partition(" ")[0]
    if library == "torchvision":
        from coverage_libraries import import_torchvision

        try:
            import_torchvision()
        except ImportError:
            pytest.skip("torchvision is not installed: make coverage-libraries")
    else:
        pytest.importorskip(library, reason="timm is not installed: make coverage-libraries")
    # Made once: ranks that are threads would draw weights from one generator.
    threads.run(_as_one_process, 4, name, _model(name).double().train(MODELS[name]))

"""The compute capability of NVIDIA GPUs, by which kernels and their block sizes are chosen."""

from __future__ import annotations

import functools

import torch


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, ``None`` for any other device.

    ROCm's torch presents AMD GPUs as "cuda" devices, and the number of their architecture in the
    place of a compute capability: (9, 4) is an MI300 and not a Hopper.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)

"""``LinearAct``: a linear layer and the activation after it, as one op."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from fusedops._core import checks
from fusedops._core.activation import ACTIVATIONS
from fusedops.nn._arguments import check_flags, check_place, check_sizes, shown
from fusedops.ops.linear_act import linear_act


class LinearParameters(nn.Module):
    """The parameters of ``torch.nn.Linear``: ``weight``, and ``bias`` or ``None``."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, device=device, dtype=dtype))

        self.weight = parameter(out_features, in_features)
        self.register_parameter("bias", parameter(out_features) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as ``torch.nn.Linear`` does."""
        reset_linear(self.weight, self.bias)


class LinearAct(LinearParameters):
    """Apply a linear layer and an activation.

    ``y = activation(x @ weight.T + bias)``

    Positional constructor arguments, parameters, ``state_dict`` keys and initialisation are those
    of ``torch.nn.Linear``. It is not a subclass, because code that replaces every ``nn.Linear`` by
    another linear layer (adapters, quantisation) would silently lose the activation.

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the output's last dimension.
        bias: whether there is a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
        activation: a name of ``fusedops.linear_act``.

    Raises:
        ValueError: ``activation`` is unknown.

    Note:
        Numerics and backends are those of ``fusedops.linear_act``.

    Example:
        >>> import torch, fusedops
        >>> fusedops.nn.LinearAct(4, 8, activation="gelu")(torch.ones(2, 4)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "fast_gelu",
    ) -> None:
        name = "LinearAct"
        check_sizes(name, in_features=in_features, out_features=out_features)
        checks.choice(name, "activation", activation, ACTIVATIONS)
        check_flags(name, bias=bias)
        check_place(name, device, dtype)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.activation = activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` for ``[..., in_features]``."""
        return linear_act(input, self.weight, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        """Return torch's line and the activation."""
        return shown(self, "in_features", "out_features", "bias", "activation")


def joined(layers: Sequence[LinearAct]) -> LinearAct:
    """Return one layer of the outputs of several that have the same input, in their order."""
    first = layers[0]
    out_features = sum(layer.out_features for layer in layers)
    made = LinearAct(
        first.in_features, out_features, False, "meta", first.weight.dtype, activation="identity"
    )
    weights: list[torch.Tensor] = [layer.weight.detach() for layer in layers]
    made.weight = nn.Parameter(torch.cat(weights), first.weight.requires_grad)
    if first.bias is not None:
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        made.bias = nn.Parameter(torch.cat(biases), first.bias.requires_grad)
    return made.train(layers[0].training)


def reset_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Draw weight and bias uniformly within ``1 / sqrt(in_features)``, as ``torch.nn.Linear``.

    It makes the same calls in the same order, so that the same seed gives the same values.
    """
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        in_features = weight.shape[1]
        bound = 1 / math.sqrt(in_features) if in_features > 0 else 0
        nn.init.uniform_(bias, -bound, bound)

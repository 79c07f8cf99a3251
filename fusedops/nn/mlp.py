"""``MLP``: two linear layers with an activation between them, as one op."""

from __future__ import annotations

import torch
from torch import nn

from fusedops._core import checks
from fusedops._core.activation import ACTIVATIONS
from fusedops.nn._arguments import check_flags, check_place, check_sizes, shown
from fusedops.nn.linear_act import reset_linear
from fusedops.ops.linear_act import linear_act
from fusedops.ops.mlp import mlp
from fusedops.ops.mlp_tiled import check_tile_tokens


class MLP(nn.Module):
    """Apply a transformer's feed-forward layer.

    ``y = activation(x @ w1.T + b1) @ w2.T + b2``

    The parameters are called as the arguments of ``fusedops.mlp``: torch has no such module. Each
    pair is initialised as ``torch.nn.Linear`` does.

    Args:
        in_features: size of the input's last dimension.
        hidden_features: size between the two products.
        out_features: size of the output's last dimension; ``in_features`` if not given.
        bias: whether the two products have a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
        activation: a name of ``fusedops.mlp``.
        recompute: save only the input for the backward, and recompute the rest.
        keep_hidden: also save the input of the second product, ``[..., hidden_features]``, in
            addition to the pre-activation: the backward then does not recompute the activation,
            which took a tenth of the time of forward and backward of 1024 x 256 (gelu, hidden 1024,
            one thread of Zen 4).
        tile_tokens: as in ``fusedops.mlp``. An attribute of this name may be set later, and is then
            stronger than the two before.

    Raises:
        ValueError: ``activation`` is unknown, ``tile_tokens`` is less than 1, or ``keep_hidden`` is
            set with one of the others.

    Note:
        Numerics and backends are those of ``fusedops.mlp``.

    Example:
        >>> import torch, fusedops
        >>> fusedops.nn.MLP(4, 16, activation="gelu_tanh")(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    tile_tokens: int | None = None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "fast_gelu",
        recompute: bool = False,
        keep_hidden: bool = False,
        tile_tokens: int | None = None,
    ) -> None:
        super().__init__()
        name = "MLP"
        check_sizes(name, in_features=in_features, hidden_features=hidden_features)
        if out_features is not None:
            check_sizes(name, out_features=out_features)
        checks.choice(name, "activation", activation, ACTIVATIONS)
        check_flags(name, bias=bias, recompute=recompute, keep_hidden=keep_hidden)
        check_tile_tokens(name, tile_tokens)
        if (recompute or tile_tokens is not None) and keep_hidden:
            checks.fail(name, "keep_hidden", "False with recompute and tile_tokens", keep_hidden)
        check_place(name, device, dtype)
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.out_features = in_features if out_features is None else out_features
        self.activation = activation
        self.recompute = recompute
        self.keep_hidden = keep_hidden
        self.tile_tokens = tile_tokens

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, device=device, dtype=dtype))

        self.w1 = parameter(hidden_features, in_features)
        self.b1 = parameter(hidden_features) if bias else None
        self.w2 = parameter(self.out_features, hidden_features)
        self.b2 = parameter(self.out_features) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both layers' parameters as ``torch.nn.Linear`` does, the first layer first."""
        reset_linear(self.w1, self.b1)
        reset_linear(self.w2, self.b2)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` for ``[..., in_features]``."""
        tile_tokens = self.tile_tokens
        if self.keep_hidden and not self.recompute and tile_tokens is None:
            hidden = linear_act(input, self.w1, self.b1, activation=self.activation)
            return linear_act(hidden, self.w2, self.b2, activation="identity")
        weights = (self.w1, self.b1, self.w2, self.b2)
        activation, recompute = self.activation, self.recompute
        return mlp(
            input, *weights, activation=activation, recompute=recompute, tile_tokens=tile_tokens
        )

    def extra_repr(self) -> str:
        """Return sizes, bias, activation and what is saved."""
        sizes = shown(self, "in_features", "hidden_features", "out_features")
        options = shown(self, "activation", "recompute", "keep_hidden", "tile_tokens")
        return f"{sizes}, bias={self.b1 is not None}, {options}"

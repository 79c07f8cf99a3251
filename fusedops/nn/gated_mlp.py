"""``GatedMLP``: Llama's feed-forward layer, gate and up projection as one op."""

from __future__ import annotations

import torch
from torch import nn

from fusedops._core import checks
from fusedops._core.activation import ACTIVATIONS
from fusedops.nn._arguments import check_flags, check_place, check_sizes, shown
from fusedops.nn.linear_act import LinearAct, joined
from fusedops.nn.quantized_linear import QuantizedLinear
from fusedops.ops.linear_act import activate
from fusedops.ops.linear_glu import linear_glu
from fusedops.ops.mlp_tiled import check_tile_tokens, mlp_tiled
from fusedops.ops.swiglu import swiglu


class GatedMLP(nn.Module):
    """Apply a gated feed-forward layer.

    ``y = (activation(x @ gate_proj.weight.T) * (x @ up_proj.weight.T)) @ down_proj.weight.T``

    The ``state_dict`` keys are those of Hugging Face's Llama, Mistral, Qwen and Gemma layers:
    ``gate_proj.weight``, ``up_proj.weight``, ``down_proj.weight`` (and ``.bias``). Each projection
    is initialised as ``torch.nn.Linear``, in that order.

    Args:
        hidden_size: size of the input's and the output's last dimension.
        intermediate_size: size of the hidden layer.
        activation: a name of ``fusedops.linear_glu``.
        bias: whether the three projections have a bias; the gate is then no longer fused.
        tile_tokens: number of tokens that go through the layer at a time, as in ``fusedops.mlp``.
            An attribute of this name may be set later. Layers for generation, with projections that
            are quantised or joined, take all tokens at once.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: ``activation`` is unknown, or ``tile_tokens`` is less than 1 or comes with
            ``bias``.

    Note:
        Numerics and backends are those of ``fusedops.linear_glu`` and ``fusedops.linear_act``, with
        ``tile_tokens`` those of ``fusedops.mlp``.

    Example:
        >>> import torch, fusedops
        >>> fusedops.nn.GatedMLP(4, 16)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    tile_tokens: int | None = None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tile_tokens: int | None = None,
    ) -> None:
        super().__init__()
        name = "GatedMLP"
        check_sizes(name, hidden_size=hidden_size, intermediate_size=intermediate_size)
        checks.choice(name, "activation", activation, ACTIVATIONS)
        check_flags(name, bias=bias)
        check_place(name, device, dtype)
        check_tile_tokens(name, tile_tokens, gate_has_bias=bias)
        self.tile_tokens = tile_tokens
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation

        def projection(inputs: int, outputs: int, name: str = "identity") -> LinearAct:
            return LinearAct(inputs, outputs, bias, device, dtype, activation=name)

        # The gate's activation is only applied by its own module where there is a bias.
        self.gate_proj = projection(hidden_size, intermediate_size, activation)
        self.up_proj = projection(hidden_size, intermediate_size)
        self.down_proj = projection(intermediate_size, hidden_size)
        self.gate_up: nn.Module | None = None

    def join_projections(self) -> None:
        """Make one layer, ``gate_up``, of the gate and up projections, for few rows at a time.

        Their names leave the ``state_dict``.
        """
        self.gate_up = joined([self.gate_proj, self.up_proj])
        del self.gate_proj, self.up_proj

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., hidden_size]`` for ``[..., hidden_size]``."""
        if self.gate_up is not None:
            gate, up = self.gate_up(input).chunk(2, -1)
            return self.down_proj(self._gated(gate, up))
        if isinstance(self.gate_proj, QuantizedLinear):
            return self.down_proj(self._gated(self.gate_proj(input), self.up_proj(input)))
        if self.gate_proj.bias is None:
            gate, up = self.gate_proj.weight, self.up_proj.weight
            if self.tile_tokens is not None and isinstance(self.down_proj, LinearAct):
                return mlp_tiled(
                    input,
                    gate,
                    None,
                    self.down_proj.weight,
                    self.down_proj.bias,
                    up_weight=up,
                    activation=self.activation,
                    tile_tokens=self.tile_tokens,
                )
            return self.down_proj(linear_glu(input, gate, up, activation=self.activation))
        check_tile_tokens("GatedMLP", self.tile_tokens, gate_has_bias=True)
        return self.down_proj(self.gate_proj(input) * self.up_proj(input))

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.activation == "silu":
            return swiglu(gate, up)
        return activate(gate, self.activation) * up

    def extra_repr(self) -> str:
        """Return sizes and activation; ``repr`` shows the projections separately."""
        return shown(self, "hidden_size", "intermediate_size", "activation", "tile_tokens")

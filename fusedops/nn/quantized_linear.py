"""``QuantizedLinear``: a linear layer with a frozen weight of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusedops._core import checks
from fusedops._core.activation import ACTIVATIONS
from fusedops._core.dtypes import autocast_dtype
from fusedops.nn._arguments import check_flags, check_place, check_sizes, shown
from fusedops.nn.linear_act import LinearAct
from fusedops.nn.mlp import MLP
from fusedops.ops import _quantized_weights as packed
from fusedops.ops.linear_act import activate
from fusedops.ops.quantized_linear import OPERATOR


class FrozenCodes(nn.Module):
    """Keeps the dtype of the buffer ``scales``: with other scales a weight would be another one."""

    scales: torch.Tensor

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **options: Any
    ) -> None:
        """Take over the dtype of the scales, which a copy would round."""
        scales = state_dict.get(f"{prefix}scales")
        if isinstance(scales, torch.Tensor) and scales.is_floating_point():
            self.scales = self.scales.to(scales.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args, **options)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FrozenCodes:
        """Move the buffers; the scales keep their dtype, because a cast would change the weight."""
        before = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != before.dtype:
            self.scales = before.to(self.scales.device)
        return self


class QuantizedLinear(FrozenCodes, nn.Linear):
    """Apply a linear layer whose weight is quantised and frozen.

    ``y = x @ dequantize().T + bias``

    It is a subclass of ``torch.nn.Linear``, so that adapters (PEFT's LoRA) accept it. Its
    ``weight`` is ``None``: code that reads the weight of a linear layer fails instead of computing
    with another one. The buffers ``qweight`` and ``scales`` are in ``state_dict``; ``qweight`` is
    uint8 ``[ceil(out_features / 16), lines, 64]``, ``scales`` is bfloat16
    ``[ceil(out_features / 16), groups, 16]`` and keeps its dtype in ``.to(dtype)``. Scales
    that were loaded from a checkpoint may be float32.

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the output's last dimension.
        bias: whether there is a bias, which is trainable.
        device: device of the buffers and the bias.
        dtype: dtype of the bias.
        format: ``"int8"``, ``"int4"`` or ``"nf4"``.
        group: number of inputs that share a scale, a multiple of 8; 0: all inputs of an output.

    Raises:
        ValueError: ``format`` is unknown, or ``group`` is no multiple of 8.

    Note:
        A new layer has a weight of zeros: ``load_state_dict`` fills it, and
        ``QuantizedLinear.of`` makes a layer of a linear layer. Numerics and backends are those of
        ``fusedops.quantized_linear``.

    Example:
        >>> import torch, fusedops
        >>> fusedops.nn.QuantizedLinear.of(torch.nn.Linear(64, 32), format="nf4", group=64)
        QuantizedLinear(in_features=64, out_features=32, bias=True, format='nf4', group=64)
    """

    qweight: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        format: str = "int4",
        group: int = 128,
    ) -> None:
        nn.Module.__init__(self)
        name = "QuantizedLinear"
        check_sizes(name, in_features=in_features, out_features=out_features)
        check_flags(name, bias=bias)
        check_place(name, device, dtype)
        checks.choice(name, "format", format, packed.FORMATS)
        check_group(name, group)
        self.in_features = in_features
        self.out_features = out_features
        self.format = format
        self.group = group
        blocks = -(-out_features // packed.BLOCK)
        codes = torch.zeros(out_features, in_features, dtype=torch.uint8, device=device)
        groups = packed.num_groups(in_features, group)
        scales = torch.zeros(blocks, groups, packed.BLOCK, dtype=torch.bfloat16, device=device)
        self.register_parameter("weight", None)
        self.register_buffer("qweight", packed.pack(codes, format))
        self.register_buffer("scales", scales)
        added = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if added is None else nn.Parameter(added))

    @classmethod
    def of(cls, linear: Any, *, format: str = "int4", group: int = 128) -> QuantizedLinear:
        """Return a linear layer with its weight rounded to the nearest codes; it keeps the bias.

        Args:
            linear: a module with ``weight`` ``[out_features, in_features]`` and ``bias``.
            format: as of the constructor.
            group: as of the constructor.

        Raises:
            ValueError: an argument is wrong, or a weight is not finite.
            TypeError: ``linear`` has no weight.
        """
        name = "QuantizedLinear.of"
        weight = getattr(linear, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            checks.fail_type(name, "linear", "a linear layer with a weight", linear)
        checks.choice(name, "format", format, packed.FORMATS)
        check_group(name, group)
        values = weight.detach()
        if values.device.type != "meta" and not bool(values.isfinite().all()):
            checks.fail(name, "linear", "a layer with a finite weight", "NaN or infinities")
        out_features, in_features = values.shape
        place: dict[str, Any] = {"device": values.device, "format": format, "group": group}
        self = cls(in_features, out_features, False, **place)
        codes, scales = packed.quantize(values, format, group, torch.bfloat16)
        self.qweight, self.scales = packed.pack(codes, format), packed.pack_scales(scales)
        self.bias = linear.bias
        return self.train(linear.training)

    def reset_parameters(self) -> None:
        """Leave the frozen weight as it is."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight, ``[out_features, in_features]``, rounded once to ``dtype``."""
        return packed.dequantize(
            self.qweight,
            self.scales,
            in_features=self.in_features,
            out_features=self.out_features,
            format=self.format,
            group=self.group,
            dtype=dtype,
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` for ``[..., in_features]``."""
        checks.tensor("quantized_linear", "input", input)
        dtype = autocast_dtype(input.device)
        casts = input.is_floating_point() and input.dtype != torch.float64
        if dtype is None or not casts or self.scales.dtype != torch.float32:
            return self._multiply(input, self.bias)
        with torch.autocast(input.device.type, enabled=False):  # it would round the scales
            bias = None if self.bias is None else self.bias.to(dtype)
            return self._multiply(input.to(dtype), bias)

    def _multiply(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scales = self.scales.double() if input.dtype == torch.float64 else self.scales
        # The operator itself: its contract checks the input, and the rest is the module's own.
        features = (self.in_features, self.out_features)
        output: torch.Tensor = OPERATOR(
            input, self.qweight, scales, bias, *features, self.format, self.group
        )
        return output

    def extra_repr(self) -> str:
        """Return torch's line, the format and the group."""
        return shown(self, "in_features", "out_features", "bias", "format", "group")


class QuantizedMLP(nn.Module):
    """``MLP`` with two quantised layers: ``down(activation(up(x)))``.

    Args:
        up: the first layer.
        down: the second layer.
        activation: a name of ``fusedops.mlp``.
    """

    def __init__(self, up: QuantizedLinear, down: QuantizedLinear, activation: str) -> None:
        super().__init__()
        checks.choice("QuantizedMLP", "activation", activation, ACTIVATIONS)
        self.up = up
        self.down = down
        self.activation = activation

    @classmethod
    def of(cls, mlp: MLP, *, format: str = "int4", group: int = 128) -> QuantizedMLP:
        """Return an ``MLP`` with its weights rounded; arguments as of ``QuantizedLinear.of``."""

        def layer(weight: nn.Parameter, bias: nn.Parameter | None) -> QuantizedLinear:
            linear = LinearAct(weight.shape[1], weight.shape[0], False, "meta")
            linear.weight, linear.bias = weight, bias
            return QuantizedLinear.of(linear, format=format, group=group)

        layers = layer(mlp.w1, mlp.b1), layer(mlp.w2, mlp.b2)
        return cls(*layers, mlp.activation).train(mlp.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` for ``[..., in_features]``."""
        output: torch.Tensor = self.down(activate(self.up(input), self.activation))
        return output

    def extra_repr(self) -> str:
        """Return the activation; ``repr`` shows the layers separately."""
        return shown(self, "activation")


def check_group(op: str, group: Any) -> None:
    """Raise unless ``group`` is a number of inputs that may share a scale."""
    checks.integer(op, "group", group, least=0)
    if group % 8:
        checks.fail(op, "group", "0 or a positive multiple of 8", group)

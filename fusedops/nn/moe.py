"""``MoE``: a mixture of experts with the structure of the sparse layers of Hugging Face's families.

A router chooses ``top_k`` experts for each token (``fusedops.moe_route``), the experts compute
(``fusedops.moe_mlp``), and shared experts, which every token uses, are optional.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fusedops._core import checks
from fusedops._core.activation import ACTIVATIONS
from fusedops.nn._arguments import check_flags, check_place, check_sizes
from fusedops.nn._exact import apply_but_keep_dtype
from fusedops.nn.gated_mlp import GatedMLP
from fusedops.nn.mlp import MLP
from fusedops.ops._moe_gate import GATES
from fusedops.ops._routing_plan import RoutingPlan, check_plan
from fusedops.ops.moe_mlp import moe_mlp
from fusedops.ops.moe_route import check_options, moe_route


class MoE(nn.Module):
    """Apply ``top_k`` of ``num_experts`` feed-forward layers to each token.

    ``y = sum over chosen e of p[e] * (act(x @ gate[e]) * (x @ up[e])) @ down[e]``, plus the output
    of the shared experts: an ``nn.GatedMLP``, or an ``nn.MLP`` if experts have no gate.

    The ``state_dict`` is that of Hugging Face's layers: ``gate.weight`` ``[num_experts,
    hidden_size]``, ``experts.gate_up_proj`` ``[num_experts, 2 * intermediate_size, hidden_size]``,
    ``experts.down_proj`` ``[num_experts, hidden_size, intermediate_size]``, and
    ``shared_experts.*``. Keys with their other names (``router.*``, ``shared_expert.*``) are loaded
    as well.

    | Hugging Face | arguments in addition to the sizes |
    |---|---|
    | Mixtral | |
    | Qwen2-MoE | ``normalize=norm_topk_prob, shared_intermediate_size=..., shared_gate=True`` |
    | Qwen3-MoE, OLMoE | ``normalize=norm_topk_prob`` |
    | DeepSeek-V3 | ``score="sigmoid", num_groups=n_group, topk_groups=topk_group,`` |
    | | ``group_score="top2_sum", scaling=routed_scaling_factor, correction_bias=True,`` |
    | | ``router_dtype=torch.float32, shared_intermediate_size=...`` |
    | GPT-OSS | ``activation="swiglu_oai", interleaved=True, bias=True, router_bias=True,`` |
    | | ``transposed=True, normalize=False, softmax_after=True`` |

    Args:
        hidden_size: size of the input's and the output's last dimension.
        intermediate_size: hidden size of each expert.
        num_experts: number of experts to choose from.
        top_k: number of experts for each token.
        activation: a name of ``fusedops.moe_mlp``.
        gated: whether an expert has gate and up projections; otherwise it has only
            ``experts.up_proj``.
        interleaved: whether columns of gate and up alternate; otherwise those of the gate are
            first.
        bias: whether the experts' projections have biases (``experts.gate_up_proj_bias`` ...).
        router_bias: whether the router's projection has a bias.
        transposed: whether weights are stored as ``[num_experts, in, out]``.
        score: ``"softmax"`` or ``"sigmoid"``; this and the following up to ``jitter`` as in
            ``fusedops.moe_route``. ``jitter`` acts in training only.
        correction_bias: whether the buffer ``gate.e_score_correction_bias`` is added for the choice
            (not in the weights), for loss-free balancing.
        router: whether the module has a router; without it every call needs a plan, such as that of
            ``fusedops.hash_route``.
        router_dtype: dtype of the router's product; ``None``: the input's.
        shared_intermediate_size: hidden size of the shared expert, ``None`` for none; for several
            shared experts the sum of their sizes. Activation, gate and bias are those of the
            experts.
        shared_gate: whether a sigmoid of the token multiplies its output
            (``shared_expert_gate.weight``).
        recompute: save only the input and the plan for the backward, which then recomputes the
            first product, as in ``fusedops.moe_mlp``.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: an argument is out of range, or two do not fit together.

    Note:
        Numerics, determinism and backends are those of ``fusedops.moe_route`` and
        ``fusedops.moe_mlp``. A plan from ``route`` can be passed to ``forward``, so that the choice
        is made once; ``gate(input)`` returns the logits, for the balancing losses. ``experts`` is
        the function of rows and plan that ``fusedops.parallel.expert_parallel`` takes.

    Example:
        >>> import torch, fusedops
        >>> moe = fusedops.nn.MoE(8, 16, num_experts=4, top_k=2)
        >>> moe(torch.ones(2, 3, 8)).shape
        torch.Size([2, 3, 8])
        >>> moe.route(torch.ones(2, 3, 8)).tokens_per_expert.sum()
        tensor(12)
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        interleaved: bool = False,
        bias: bool = False,
        router_bias: bool = False,
        transposed: bool = False,
        score: str = "softmax",
        normalize: bool = True,
        softmax_after: bool = False,
        num_groups: int | None = None,
        topk_groups: int | None = None,
        group_score: str = "max",
        scaling: float = 1.0,
        correction_bias: bool = False,
        capacity_factor: float | None = None,
        drop_policy: str = "position",
        expert_choice: bool = False,
        jitter: float = 0.0,
        router: bool = True,
        router_dtype: torch.dtype | None = None,
        shared_intermediate_size: int | None = None,
        shared_gate: bool = False,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "MoE"
        check_sizes(name, hidden_size=hidden_size, intermediate_size=intermediate_size)
        if shared_intermediate_size is not None:
            check_sizes(name, shared_intermediate_size=shared_intermediate_size)
        checks.integer(name, "num_experts", num_experts, least=1)
        checks.integer(name, "top_k", top_k)
        flags = {"gated": gated, "interleaved": interleaved, "bias": bias, "router": router}
        flags |= {"router_bias": router_bias, "correction_bias": correction_bias}
        flags |= {"transposed": transposed, "shared_gate": shared_gate, "recompute": recompute}
        check_flags(name, **flags)
        check_place(name, device, dtype)
        check_place(name, None, router_dtype, "router_dtype")
        checks.choice(name, "activation", activation, GATES if gated else ACTIVATIONS)
        if not 1 <= top_k <= num_experts:
            checks.fail("MoE", "top_k", f"from 1 to num_experts, {num_experts}", top_k)
        if shared_gate and shared_intermediate_size is None:
            checks.fail("MoE", "shared_gate", "False without shared_intermediate_size", shared_gate)
        self.hidden_size = hidden_size
        options: dict[str, Any] = {"score": score, "normalize": normalize, "scaling": scaling}
        options |= {"num_groups": num_groups, "topk_groups": topk_groups}
        options |= {"group_score": group_score, "softmax_after": softmax_after}
        options |= {"capacity_factor": capacity_factor, "drop_policy": drop_policy}
        options["expert_choice"] = expert_choice
        balance = torch.empty(num_experts) if correction_bias else None
        check_options(name, num_experts, top_k, bias=balance, jitter=jitter, **options)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate: _Router | None = None
        if router:
            of_logits = (jitter, router_dtype, router_bias, correction_bias)
            self.gate = _Router(hidden_size, num_experts, top_k, options, *of_logits, **place)
        form = {"activation": activation, "gated": gated, "interleaved": interleaved}
        sizes = (num_experts, hidden_size, intermediate_size)
        self.experts = _Experts(*sizes, form, bias, transposed, recompute, **place)
        self.shared_experts: GatedMLP | MLP | None = None
        self.shared_expert_gate: nn.Linear | None = None
        if shared_intermediate_size is not None:
            kind: Any = GatedMLP if gated else MLP
            self.shared_experts = kind(
                hidden_size, shared_intermediate_size, activation=activation, bias=bias, **place
            )
        if shared_gate:
            self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False, **place)
        self.register_load_state_dict_pre_hook(_rename)

    def route(self, input: torch.Tensor) -> RoutingPlan:
        """Choose the experts of each token.

        Args:
            input: ``[..., hidden_size]``.

        Returns:
            The plan of the flattened tokens, as ``fusedops.moe_route`` makes it.

        Raises:
            ValueError: there is no router, or the last dimension does not fit.
            TypeError: ``input`` is no tensor.
        """
        self._check("MoE.route", input)
        if self.gate is None:
            raise ValueError("MoE: plan must be given to a layer that has no router, got None")
        return self.gate(input)[1]

    def forward(self, input: torch.Tensor, *, plan: RoutingPlan | None = None) -> torch.Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            input: ``[..., hidden_size]``.
            plan: routing plan to use; ``None`` calls the router.

        Returns:
            ``[..., hidden_size]``.

        Raises:
            ValueError: the last dimension of ``input`` or ``plan`` does not fit.
            TypeError: ``input`` is no tensor, or ``plan`` no plan.
        """
        self._check("MoE", input)
        if plan is None:
            plan = self.route(input)
        check_plan("MoE", plan)
        output = self.experts(input.reshape(-1, self.hidden_size), plan).view_as(input)
        shared = self.shared(input)
        return output if shared is None else output + shared

    def _check(self, op: str, input: Any) -> None:
        checks.tensor(op, "input", input)
        if input.dim() == 0 or input.shape[-1] != self.hidden_size:
            # Rows of another width could be cut into rows of this one without a word.
            expected = f"of {self.hidden_size} features, [..., {self.hidden_size}]"
            checks.fail(op, "input", expected, list(input.shape))

    def shared(self, input: torch.Tensor) -> torch.Tensor | None:
        """Return the output of the shared expert, ``None`` if there is none."""
        if self.shared_experts is None:
            return None
        shared = self.shared_experts(input)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(input)) * shared
        return shared


class _Router(nn.Module):
    """The logits of each token and the plan made of them."""

    e_score_correction_bias: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        options: dict[str, Any],
        jitter: float,
        logits_dtype: torch.dtype | None,
        bias: bool,
        correction_bias: bool,
        **place: Any,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.options = options
        self.jitter = jitter
        self.logits_dtype = logits_dtype
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, **place))
        self.bias = nn.Parameter(torch.empty(num_experts, **place)) if bias else None
        # float32 whatever the parameters are: it moves by small steps.
        balance = torch.zeros(num_experts, device=place["device"]) if correction_bias else None
        self.register_buffer("e_score_correction_bias", balance)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as ``torch.nn.Linear``."""
        _uniform(self.weight.shape[1], self.weight, self.bias)

    def forward(
        self, input: torch.Tensor, *, dropless: bool = False
    ) -> tuple[torch.Tensor, RoutingPlan]:
        """Return the logits ``[tokens, num_experts]`` and the plan.

        Args:
            input: ``[..., hidden_size]``.
            dropless: whether experts take all tokens, whatever the capacity factor.
        """
        rows = input.reshape(-1, self.weight.shape[1])
        logits = self._logits(rows)
        options = self.options | {"capacity_factor": None} if dropless else self.options
        jitter = self.jitter if self.training else 0.0
        bias = self.e_score_correction_bias
        return logits, moe_route(logits, self.top_k, bias=bias, jitter=jitter, **options)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        if self.logits_dtype is None:
            return F.linear(rows, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.to(self.logits_dtype)
        with torch.autocast(rows.device.type, enabled=False):
            return F.linear(rows.to(self.logits_dtype), self.weight.to(self.logits_dtype), bias)

    def _apply(self, fn: Any, recurse: bool = True) -> _Router:
        """Move parameters and buffers; the correction stays float32."""
        name = "e_score_correction_bias"
        apply_but_keep_dtype(self, name, lambda: super(_Router, self)._apply(fn, recurse))
        return self

    def extra_repr(self) -> str:
        """Return sizes and what is not the default."""
        num_experts, hidden_size = self.weight.shape
        return f"hidden_size={hidden_size}, num_experts={num_experts}, top_k={self.top_k}"


class _Experts(nn.Module):
    """The weights of all experts.

    Attributes:
        form: ``activation``, ``gated`` and ``interleaved``, as in ``fusedops.moe_mlp``.
        stored: ``(plan, tensors, compute)`` runs ``compute`` where weights and biases lie
            elsewhere: it brings those that the plan names (``fusedops.memory.store_experts``).
    """

    stored: Callable[..., torch.Tensor] | None = None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        form: dict[str, Any],
        bias: bool,
        transposed: bool,
        recompute: bool,
        **place: Any,
    ) -> None:
        super().__init__()
        self.form = form
        self.transposed = transposed
        self.recompute = recompute
        self.first = "gate_up_proj" if form["gated"] else "up_proj"
        sizes = {
            self.first: (hidden_size, (2 if form["gated"] else 1) * intermediate_size),
            "down_proj": (intermediate_size, hidden_size),
        }

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *sizes, **place))

        for name, (inputs, outputs) in sizes.items():
            shape = (inputs, outputs) if transposed else (outputs, inputs)
            self.register_parameter(name, parameter(*shape))
            self.register_parameter(f"{name}_bias", parameter(outputs) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise each expert's projections as ``torch.nn.Linear``."""
        for name in (self.first, "down_proj"):
            weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
            _uniform(weight.shape[1 if self.transposed else 2], weight, bias)

    def forward(self, input: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        """Return ``[tokens, hidden_size]`` for ``[tokens, hidden_size]``."""
        names = (self.first, "down_proj")
        tensors = [getattr(self, f"{name}{end}") for end in ("", "_bias") for name in names]

        def compute(plan: RoutingPlan, tensors: Sequence[Any]) -> torch.Tensor:
            w1, w2, b1, b2 = tensors
            if not self.transposed:
                w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
            return moe_mlp(input, plan, w1, w2, b1, b2, recompute=self.recompute, **self.form)

        if self.stored is not None:
            return self.stored(plan, tensors, compute)
        return compute(plan, tensors)

    def extra_repr(self) -> str:
        """Return sizes and activation."""
        if getattr(self, self.first) is None:  # fusedops.quantize took it
            return f"activation={self.form['activation']!r}"
        num_experts, *shape = getattr(self, self.first).shape
        inputs, outputs = shape if self.transposed else reversed(shape)
        return (
            f"num_experts={num_experts}, hidden_size={inputs}, "
            f"intermediate_size={outputs // (2 if self.form['gated'] else 1)}, "
            f"activation={self.form['activation']!r}"
        )


def _uniform(inputs: int, *parameters: torch.Tensor | None) -> None:
    bound = 1 / math.sqrt(inputs) if inputs else 0.0
    for parameter in parameters:
        if parameter is not None:
            nn.init.uniform_(parameter, -bound, bound)


# What other families call it -> our child.
_ALIASES = {"router": "gate", "shared_expert": "shared_experts"}


def _rename(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Give the entries of a checkpoint our names."""
    for theirs, ours in _ALIASES.items():
        begin = f"{prefix}{theirs}."
        for key in [name for name in state_dict if name.startswith(begin)]:
            state_dict[f"{prefix}{ours}.{key.removeprefix(begin)}"] = state_dict.pop(key)

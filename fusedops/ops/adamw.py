"""The AdamW step of many tensors at once, in place.

For each parameter p with gradient grad and moments m and v, at step t:

    g = grad * grad_factor                          (-grad with ``maximize``)
    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g^2
    p = copy                              (elements where the copy is not p in the copy's dtype)
    p = p - lr (weight_decay p + m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps))
    copy = p in the copy's dtype

Users call ``fusedops.optim``, which checks the arguments. This op differs from the others: it
returns nothing, writes to its arguments, and takes lists, because a launch per tensor would cost
more than the step of a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fusedops._core import backends, dtypes, philox
from fusedops._core.device_tensors import device_tensor
from fusedops._core.library import define_op

_LOW = 0xFFFFFFFF


class Draw(NamedTuple):
    """The position of a parameter's elements in the random numbers of stochastic rounding."""

    key: int  # the key of Philox; the offset is the number of the step
    base: int  # index of the first element in the unsharded parameter, in row-major order
    run: int  # how many elements are adjacent there
    pitch: int  # distance from the start of one run to the start of the next


@dataclass
class TensorLists:
    """The tensors of a step. A list is empty, or as long as ``params``.

    All tensors of a parameter have its shape and its strides, without gaps.
    """

    # Float32, bfloat16, float16, or float64 if all are
    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)  # read only
    exp_avgs: list[torch.Tensor] = field(default_factory=list)  # first moments
    exp_avg_sqs: list[torch.Tensor] = field(default_factory=list)  # second moments
    # Their largest values, for amsgrad
    max_exp_avg_sqs: list[torch.Tensor] = field(default_factory=list)
    # Tensors that hold ``params``, rounded to their own dtype, before and after the step: an
    # element that was changed there since replaces that of ``params``
    copies: list[torch.Tensor] = field(default_factory=list)
    # Number of steps so far, one element each; the op increments it
    steps: list[torch.Tensor] = field(default_factory=list)
    # If given, states and params in bfloat16 are rounded stochastically
    draws: list[Draw] = field(default_factory=list)
    weight_decays: list[float] = field(default_factory=list)  # one number per parameter

    @property
    def tensors(self) -> tuple[list[torch.Tensor], ...]:
        """All tensors, in the order of the operator's schema."""
        moments = (self.exp_avgs, self.exp_avg_sqs, self.max_exp_avg_sqs)
        return (self.params, self.grads, *moments, self.copies, self.steps)

    @property
    def flat_draws(self) -> list[int]:
        """Four numbers per parameter, or none."""
        return [number for draw in self.draws for number in draw]


def adamw(
    batch: TensorLists,
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    maximize: bool = False,
    bias_correction: bool = True,
    grad_factor: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Make one step of every parameter of a batch, in place.

    Args:
        batch: the tensors, all on one device.
        lr: learning rate; a tensor of one element on that device is not read by the host on a GPU.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        maximize: maximize the loss instead of minimizing it.
        bias_correction: divide the moments by ``1 - beta^t``.
        grad_factor: one element; gradients are multiplied by it when they are read.
        found_inf: one element; if it is not 0, nothing is written, not even ``steps``.

    Note:
        Arithmetic is float32 (float64 for float64); each result is rounded once. Every element is
        computed independently: the bits do not depend on threads, batches and shards.

    Reference:
        Loshchilov, Hutter: Decoupled Weight Decay Regularization, arXiv:1711.05101.

    Example:
        >>> import torch
        >>> from fusedops.ops.adamw import TensorLists, adamw
        >>> p, zero = torch.ones(2), lambda: [torch.zeros(2)]
        >>> batch = TensorLists([p], [torch.tensor([1.0, -2.0])], zero(), zero(),
        ...                     steps=[torch.zeros(())], weight_decays=[0.0])
        >>> adamw(batch, lr=0.5, betas=(0.9, 0.999), eps=0.0)
        >>> p
        tensor([0.5000, 1.5000])
    """
    if not batch.params:
        return
    rates = (lr, 0.0) if isinstance(lr, torch.Tensor) else (None, lr)
    tensors = (*batch.tensors, grad_factor, found_inf, rates[0])
    lists = (batch.flat_draws, batch.weight_decays)
    _OP(*tensors, *lists, rates[1], *betas, eps, maximize, bias_correction)


class RepeatedBatch:
    """A batch that Triton kernels step again and again, with gradients at other addresses.

    The operator holds all tensors of each call to the contract. Here the first call has done so;
    whoever makes another step knows that the tensors are what they were. The kernels' tables are
    made once.

    Args:
        batch: the batch that ``adamw`` has just updated; no reference to its tensors is stored.
    """

    def __init__(self, batch: TensorLists) -> None:
        from fusedops.kernels import adamw as kernels

        self._launches = kernels.launches(batch.tensors, batch.flat_draws, batch.weight_decays)
        self.device = batch.params[0].device

    @staticmethod
    def serves(batch: TensorLists) -> bool:
        """Return whether Triton serves the batch."""
        if batch.params[0].device.type == "cpu" and backends.requested() != "triton":
            return False  # the everyday case, without a look at the tensors
        chosen = backends.resolve("adamw", batch.params, batch.grads, batch.exp_avgs, batch.copies)
        return chosen.backend == "triton"

    def move_gradients(self, addresses: torch.Tensor) -> None:
        """Take the addresses of the next step's gradients, int64 ``[len(batch.grads)]``."""
        for launch in self._launches:
            launch.move_gradients(addresses)

    def step(
        self,
        *,
        lr: float | torch.Tensor,
        betas: tuple[float, float],
        eps: float,
        maximize: bool,
        bias_correction: bool,
        grad_factor: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Make a step, as ``adamw`` does."""

        def launch() -> None:
            for batch in self._launches:
                batch.run(grad_factor, found_inf, lr, *betas, eps, maximize, bias_correction)

        backends.repeat("adamw", launch)


def _reference(*args: Any) -> None:
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, copies, steps = args[:7]
    grad_factor, found_inf, learning_rate, draws, weight_decays, lr, *numbers = args[7:]
    beta1, beta2, eps, maximize, bias_correction = numbers
    if found_inf is not None and bool(found_inf != 0):
        return
    if learning_rate is not None:
        lr = learning_rate.item()
    for i, param in enumerate(params):
        wide = dtypes.statistics_dtype(param.dtype)
        steps[i] += 1
        t = steps[i].item()
        grad = grads[i].to(wide) * (-1.0 if maximize else 1.0)
        if grad_factor is not None:
            grad = grad * grad_factor.to(wide)
        first = beta1 * exp_avgs[i].to(wide) + (1 - beta1) * grad
        second = beta2 * exp_avg_sqs[i].to(wide) + (1 - beta2) * grad * grad
        words = _words(param, draws[4 * i : 4 * i + 4], t) if draws else (None, None)
        _store(exp_avgs[i], first, words[0], 0)
        _store(exp_avg_sqs[i], second, words[0], 16)
        if max_exp_avg_sqs:
            second = torch.maximum(second, max_exp_avg_sqs[i].to(wide))
            _store(max_exp_avg_sqs[i], second, words[1], 16)
        step_size = lr / (1 - beta1**t) if bias_correction else lr
        inverse_root = (1 - beta2**t) ** -0.5 if bias_correction else 1.0
        p = param.to(wide)
        if copies:
            copy = copies[i].to(wide)
            p = torch.where(p.to(copies[i].dtype) == copy, p, copy)
        moved = first / (second.sqrt() * inverse_root + eps)
        p = p - (lr * weight_decays[i] * p + step_size * moved)
        _store(param, p, words[1], 0)
        if copies:
            copies[i].copy_(p)


def _words(
    param: torch.Tensor, draw: Sequence[int], step: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two random words of each element, int64 values below 2**32."""
    key, base, run, pitch = draw
    local = torch.arange(param.numel(), device=param.device)
    element = base + local // max(1, run) * pitch + local % max(1, run)
    counter = element // 4
    both = []
    for offset in (2 * int(step), 2 * int(step) + 1):
        offset_low, offset_high, key_low, key_high = (
            device_tensor(word & _LOW, torch.int64, param.device)
            for word in (offset, offset >> 32, key, key >> 32)
        )
        drawn = philox.philox4x32(
            (counter & _LOW, counter >> 32, offset_low, offset_high), (key_low, key_high)
        )
        words = torch.stack(torch.broadcast_tensors(*drawn))
        words = words.gather(0, (element % 4).unsqueeze(0)).squeeze(0)
        both.append(words.view(param.shape))
    return both[0], both[1]


def _store(to: torch.Tensor, value: torch.Tensor, words: torch.Tensor | None, shift: int) -> None:
    """Round ``value`` into ``to``: by 16 bits of the words where ``to`` is bfloat16."""
    if words is None or to.dtype != torch.bfloat16:
        to.copy_(value)
        return
    bits = value.contiguous().view(torch.int32).to(torch.int64) & _LOW
    rounded = ((bits + ((words >> shift) & 0xFFFF)) >> 16) << 16
    rounded = torch.where(rounded >= 2**31, rounded - 2**32, rounded).to(torch.int32)
    to.copy_(torch.where(value.isnan(), value, rounded.view(torch.float32)))


_OP = define_op(
    "adamw",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] copies, Tensor(f!)[] steps,"
    " Tensor? grad_factor, Tensor? found_inf, Tensor? learning_rate, int[] draws,"
    " float[] weight_decays, float lr, float beta1, float beta2, float eps, bool maximize,"
    " bool bias_correction) -> ()",
    contract={
        "weight_decays": "len(weight_decays) == len(params)",
        "draws": "len(draws) == 0 or len(draws) == 4 * len(params)",
        "grad_factor, found_inf, learning_rate": "float32 | float64 [] | [1]",
        "params": "each T [*shape] dense",
        "grads": "each mixed(T) [*shape] dense",
        "exp_avgs": "each mixed(T) as S [*shape] dense",
        "exp_avg_sqs": "each S [*shape] dense",
        "max_exp_avg_sqs": "each or none S [*shape] dense",
        "copies": "each or none mixed(T) [*shape] dense",
        "steps": "each float32 | float64 [] | [1]",
        # Of each draw (key, base, run, pitch); there may be none.
        "base": "each (draws[4 * number + 1] if len(draws) > 0 else 1) >= 0",
        "run": "each (draws[4 * number + 2] if len(draws) > 0 else 1) >= 1",
        "pitch": "each (draws[4 * number + 3] if len(draws) > 0 else 1) >= 0",
    },
    reference=_reference,
    triton="fusedops.kernels.adamw",
    part_of="optim",
)

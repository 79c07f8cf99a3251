"""AdamW in one pass over any mixture of dtypes, a replacement of ``torch.optim.AdamW``.

This file has the options, the states and the arguments of a step; the arithmetic is in
``ops/adamw.py``.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.checks import UnsupportedError
from fusedops._core.parameter_names import plain_name
from fusedops.kernels import _pointer_table
from fusedops.ops.adamw import Draw
from fusedops.ops.adamw import adamw as make_step
from fusedops.optim import _shards
from fusedops.optim._batches import Collected, GroupBatch
from fusedops.optim._repeated import RepeatedStep, scaling_on
from fusedops.optim._state import (
    Storage,
    check_given,
    check_group,
    check_state,
    fitting_state,
    new_policy,
    new_state,
    read_parameter,
)
from fusedops.optim.norms import clip_coefficient, global_norm

# A parameter that takes part in a step: its group, its index there, and itself.
Member = tuple[dict[str, Any], int, Any]


class AdamW(torch.optim.AdamW):
    """AdamW with decoupled weight decay, one pass over memory for all parameters.

    The arguments of ``torch.optim.AdamW`` have the same meaning; parameter groups, closures,
    schedulers, ``GradScaler`` and ``state_dict`` (in both directions) work too. With only these
    arguments the dtypes are also torch's: moments have the dtype of their parameter.

    Args:
        params: parameters, named parameters, or groups of either.
        lr: learning rate, a float or a tensor of one element.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled decay: ``lr * weight_decay * p`` is subtracted.
        amsgrad: divide by the largest second moment so far.
        maximize: maximize the loss instead of minimizing it.
        foreach: accepted; there is one implementation.
        capturable: allow a step in a CUDA graph, after at least one outside of it. ``lr`` may then
            be a tensor on the parameters' device: replays read its current value. All other numbers
            of the groups, and a float ``lr``, are constants of a graph. The optimizer must live as
            long as its graphs.
        differentiable: must be False.
        fused: accepted; there is one implementation.
        bias_correction: False omits the bias correction: early steps are larger, the first by ``(1
            - beta1) / sqrt(1 - beta2)``. Groups may override it.
        master_weights: store and update a float32 copy of every bfloat16 and float16 parameter,
            with float32 moments; the parameter is the rounded copy. Elements of it that are changed
            by others are seen by ``step``, which continues from their values.
        state_dtype: dtype of the moments; ``torch.bfloat16`` halves their memory.
        stochastic_rounding: round values stored in bfloat16 (moments, and parameters without a
            float32 copy) up or down at random, without bias. It is on with
            ``state_dtype=torch.bfloat16`` unless it is False.
        max_norm: clip gradients to this global norm inside the step; ``.grad`` does not change.
        skip_non_finite: skip the step if the norm of the gradients is inf or NaN.
        no_decay: patterns (``"*.bias"``, ``"*norm*"``) of names whose parameters do not decay.
            Needs named parameters.
        seed: seed of the stochastic rounding.

    Attributes:
        grad_norm: norm of the gradients of the last step, before clipping; ``None`` without
            ``max_norm`` and ``skip_non_finite``.

    Raises:
        ValueError: a value is out of range, or ``no_decay`` is used without names.
        TypeError: a parameter is not a dense floating tensor, or an option has a wrong type.
        UnsupportedError: ``differentiable``; from ``step``, a sparse gradient.

    Note:
        Every element is computed independently, in float32 (float64 for float64): the result
        depends neither on threads, shards nor groups. Stochastic rounding draws by name and by the
        element's index in the unsharded parameter; parameters without names share their random
        numbers.

    Example:
        >>> import torch, fusedops.optim
        >>> model = torch.nn.Linear(4, 2).bfloat16()
        >>> optimizer = fusedops.optim.AdamW(
        ...     model.named_parameters(), lr=1e-3, master_weights=True, max_norm=1.0,
        ...     no_decay=("*bias",))
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["master"].dtype
        torch.float32
    """

    # Of steps that were made, for later ones: see _forget_steps.
    _draws: dict[torch.Tensor, Draw]
    _repeated: RepeatedStep | None
    _made_in_vain: int  # how many of those in a row fitted no later step
    _looked: int  # how many steps looked at each tensor
    _captures: _pointer_table.Captures

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        bias_correction: bool = True,
        master_weights: bool = False,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool | None = None,
        max_norm: float | None = None,
        skip_non_finite: bool = False,
        no_decay: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        op = type(self).__name__
        checks.flag(op, "capturable", capturable)
        checks.flag(op, "differentiable", differentiable)
        if not isinstance(params, Iterable):
            checks.fail_type(op, "params", "an iterable of parameters or groups", params)
        of_torch: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        of_torch |= {"weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
        of_torch |= {"foreach": foreach, "fused": fused}
        check_group(op, **of_torch)
        if differentiable:
            raise UnsupportedError(
                f"{op}: differentiable must be False, got {differentiable}: "
                "torch.optim.AdamW has it"
            )
        self.policy = new_policy(
            op,
            master_weights=master_weights,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            max_norm=max_norm,
            skip_non_finite=skip_non_finite,
            no_decay=no_decay,
            seed=seed,
        )
        checks.flag(op, "bias_correction", bias_correction)
        self._bias_correction = bias_correction
        self.grad_norm: torch.Tensor | None = None
        self._capturable = capturable
        self._forget_steps()
        super().__init__(params, capturable=capturable, **of_torch)
        # GradScaler then leaves unscaling, and skipping where it found inf, to the step.
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch does.

        Raises:
            TypeError: a parameter is not a dense floating tensor.
            ValueError: ``no_decay`` is in use and the parameters have no names.
        """
        op = type(self).__name__
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("bias_correction", self._bias_correction)
        try:
            names = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "bias_correction")
            check_group(op, **{name: group[name] for name in names})
            for index, param in enumerate(group["params"]):
                checks.tensor(op, _title(group, index), param)
            if self.policy.no_decay and "param_names" not in group:
                expected = "named, as from model.named_parameters(), for no_decay has names"
                checks.fail(op, "params", expected, "parameters without names")
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of every parameter that has a gradient.

        Args:
            closure: recomputes the loss and the gradients.

        Returns:
            What the closure returned, else ``None``.

        Raises:
            UnsupportedError: a gradient is sparse. Nothing was written.
            ValueError: a parameter changed its device, shape or dtype. Nothing was written.
            RuntimeError: a CUDA graph is captured, and ``capturable`` is False, a parameter has no
                state yet, or a number lies where a captured step cannot read it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._capturable:
            self._require(not self._is_captured(), "capturable=True, got False")
            self._step()
            return loss
        with self._captures.active(self._device_of_first()):
            self._step()
        return loss

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Let the master weights follow parameters that were changed outside of the optimizer.

        ``step`` does so too. Elements that a master rounds to are unchanged: it keeps the bits that
        its parameter does not have.
        """
        for param, state in self.state.items():
            if "master" in state:
                read_parameter(param, state["master"])

    def _step(self) -> None:
        repeated, self._repeated = self._repeated, None
        if repeated is not None and repeated.take(self):
            factor, found_inf = self._scaling(repeated.norm)
            repeated.step(self, self._numbers, factor, found_inf)
            self._repeated, self._made_in_vain = repeated, 0
            return
        self._made_in_vain += repeated is not None
        members = self._with_gradient()
        if members:
            self._step_all(members)

    def _device_of_first(self) -> torch.device:
        params = (param for group in self.param_groups for param in group["params"])
        return next((param.device for param in params), torch.device("cpu"))

    def _is_captured(self) -> bool:
        return _pointer_table.capturing(self._device_of_first())

    def _require(self, holds: bool, requirement: str) -> None:
        if not holds:
            raise RuntimeError(f"{type(self).__name__}: a step in a CUDA graph needs {requirement}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this class or of ``torch.optim.AdamW`` returned.

        Moments and master weights are cast to the dtypes of this optimizer's options, not to the
        parameter's as torch does.

        Raises:
            ValueError: it is that of another model. Nothing was changed.
        """
        given: dict[torch.Tensor, dict[str, Any]] = {}

        def check(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
            given.update(self._check_given(loaded))

        def fit(_: torch.optim.Optimizer) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    if given.get(param):
                        self.state[param] = fitting_state(
                            param, given[param], self._storage(param), amsgrad=group["amsgrad"]
                        )

        # After the user's own hooks before loading, and before those after it.
        hooks = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(fit, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        kept = (
            "policy",
            "_bias_correction",
            "_capturable",
            "_step_supports_amp_scaling",
            "grad_norm",
        )
        return super().__getstate__() | {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            # Not of a checkpoint: how this process steps does not depend on how another one did.
            group["capturable"], group["differentiable"] = self._capturable, False
            group.setdefault("bias_correction", self._bias_correction)
        self._forget_steps()

    def _forget_steps(self) -> None:
        """Forget what earlier steps left for later ones, and what graphs of them read."""
        self._draws = {}
        self._repeated = None
        self._made_in_vain = self._looked = 0
        self._captures = _pointer_table.Captures()

    def _check_given(self, loaded: dict[str, Any]) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the saved state of each parameter, after a look at all of them."""
        saved, ours = loaded["param_groups"], self.param_groups
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, ours)]
        op = f"{type(self).__name__}.load_state_dict"
        if sizes[0] != sizes[1]:
            expected = f"of this model: groups of {sizes[1]} parameters"
            checks.fail(op, "state_dict", expected, f"groups of {sizes[0]}")
        states = {}
        for theirs, group in zip(saved, ours, strict=True):
            for index, (number, param) in enumerate(
                zip(theirs["params"], group["params"], strict=True)
            ):
                state = loaded["state"].get(number)
                if state:
                    check_given(op, _title(group, index), param, state)
                    states[param] = state
        return states

    def _with_gradient(self) -> list[Member]:
        """Return (group, index in it, parameter) of what has a gradient, after looking at all."""
        op = type(self).__name__
        members = []
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                title = _title(group, index)
                if param.grad.layout is not torch.strided:
                    raise UnsupportedError(
                        f"{op}: the gradient of {title} must be dense, got "
                        f"{param.grad.layout}; torch.optim.SparseAdam takes sparse ones "
                        "(or Embedding(sparse=False))"
                    )
                state = self.state.get(param)
                if state:
                    check_state(op, title, param, state, self._storage(param), self._had(param))
                members.append((group, index, param))
        return members

    def _had(self, param: torch.Tensor) -> tuple[torch.device, torch.dtype] | None:
        """Return a parameter's device and dtype when its state was made, if that does not tell."""
        return None

    def _step_all(self, members: list[Member]) -> None:
        grads = [param.grad for *_, param in members]
        factor, found_inf = self._scaling(lambda: global_norm(grads))
        batches = self._collect(members)
        self._step_collected(batches, factor, found_inf)
        _shards.count_writes(param for *_, param in members)
        self._looked += 1
        # Where steps differ, as those of experts without tokens do, only one of some tries again:
        # with 400 tensors that costs a core of an AMD EPYC 24 ms a step, instead of 14 ms.
        if self._made_in_vain < 2 or self._looked % 16 == 0:
            self._repeated = RepeatedStep.after(self, grads, batches)

    def _step_collected(
        self, batches: list[GroupBatch], factor: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        for group, _, collected in batches:
            device = collected.tensors.params[0].device
            scaling = scaling_on(device, factor, found_inf)
            make_step(collected.tensors, **self._numbers(group, device), **scaling)
            for param, dense in collected.write_back:
                param.copy_(dense)

    def _numbers(self, group: dict[str, Any], device: torch.device) -> dict[str, Any]:
        lr, betas = group["lr"], group["betas"]
        if self._capturable and isinstance(lr, torch.Tensor) and lr.device == device:
            # Numbers of other dtypes would be the only ones in the step.
            lr = lr if lr.dtype in (torch.float32, torch.float64) else lr.float()
        else:
            where = f"lr as a float or on {device}"
            self._require(not (isinstance(lr, torch.Tensor) and self._is_captured()), where)
            lr = float(lr)
        on_gpu = any(isinstance(beta, torch.Tensor) and beta.is_cuda for beta in betas)
        self._require(not (on_gpu and self._is_captured()), "betas as floats")
        return {
            "lr": lr,
            "betas": (float(betas[0]), float(betas[1])),
            "eps": group["eps"],
            "maximize": group["maximize"],
            "bias_correction": group["bias_correction"],
        }

    def _scaling(
        self, norm_of_gradients: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return what gradients are multiplied by, and what forbids the step unless it is 0."""
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        factor = None if scale is None else scale.double().reciprocal()
        if not self.policy.needs_norm:
            return factor, found_inf
        norm = norm_of_gradients()
        if factor is not None:
            norm = norm * factor.to(norm.device)
        self.grad_norm = norm
        if self.policy.skip_non_finite:
            bad = (~norm.isfinite()).double()
            found_inf = bad if found_inf is None else bad + found_inf.to(bad.device)
        if self.policy.max_norm is not None:
            coefficient = clip_coefficient(norm, self.policy.max_norm)
            factor = coefficient if factor is None else coefficient * factor.to(norm.device)
        return factor, found_inf

    def _collect(self, members: list[Member]) -> list[GroupBatch]:
        """Return the tensors of the step, by group, device and whether there are masters."""
        batches: dict[tuple[Any, ...], GroupBatch] = {}
        for place, (group, index, param) in enumerate(members):
            state, amsgrad = self.state[param], group["amsgrad"]
            if not state:
                self._require(not self._is_captured(), "a step before it, which makes the states")
                state.update(new_state(param, self._storage(param), amsgrad=amsgrad))
            draw = self._draw(group, index, param)
            key = (id(group), param.device, "master" in state, draw is None)
            _, places, collected = batches.setdefault(key, (group, [], Collected()))
            decay = self._decay(group, index)
            collected.add(param, state, decay=decay, amsgrad=amsgrad, draw=draw)
            places.append(place)
        return list(batches.values())

    def _storage(self, param: torch.Tensor) -> Storage:
        return self.policy.storage(param)

    def _draw(self, group: dict[str, Any], index: int, param: torch.Tensor) -> Draw | None:
        """Return what stochastic rounding of a parameter, or of its part that is here, draws by.

        They are drawn by the parameter's name and the element's number in it: neither processes,
        shards nor parameter groups change a bit. Parameters of one plain name, or without a name,
        share their numbers, which does no harm: each is rounded without bias all the same.
        """
        if not self._storage(param).draws:
            return None
        if param not in self._draws:
            name = _name(group, index)
            text = f"{self.policy.seed}:{plain_name(name)}"
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            key = int.from_bytes(digest, "little", signed=True)
            self._draws[param] = Draw(key, *_shards.place(param, name or "without name"))
        return self._draws[param]

    def _decay(self, group: dict[str, Any], index: int) -> float:
        patterns = self.policy.no_decay
        if patterns and any(
            fnmatch.fnmatchcase(_name(group, index), pattern) for pattern in patterns
        ):
            return 0.0
        return float(group["weight_decay"])


def _name(group: dict[str, Any], index: int) -> str:
    return group["param_names"][index] if "param_names" in group else ""


def _title(group: dict[str, Any], index: int) -> str:
    name = _name(group, index)
    return f"parameter {name!r}" if name else f"parameter {index} of its group"

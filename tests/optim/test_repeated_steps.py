"""Steps like the one before: what the host copies and looks at, and what a CUDA graph may keep.

No GPU is needed: the tensors are on the CPU, and what is launched is a function that reads the
tables. ``test_graphs.py`` has the same on a GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from comparing import assert_same_bits
from optim_testing import parameters, set_gradients, values
from reachable import reachable
from torch import nn

import fusedops
from fusedops._core import env, extension
from fusedops.optim import AdamW, OffloadedAdamW

pytest.importorskip("triton")
from fusedops.kernels import _pointer_table, adamw, square_sums

needs_library = pytest.mark.skipif(extension.cpu_library() is not None, reason="no library")


class Gpu:
    """Stands for a GPU and for the kernel of a step: what was launched, what was copied to it.

    Attributes:
        tables: of the launches of the step, in order: the tensor that the kernel reads.
        rows: the same, as their contents were at the launch.
        copies: how often memory of the host was copied to the device.
        allocated: how often pinned memory was allocated.
        captured: whether a graph is captured.
    """

    def __init__(self) -> None:
        self.tables: list[torch.Tensor] = []
        self.rows: list[torch.Tensor] = []
        self.copies = self.allocated = 0
        self.captured = False

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launched

    def _launched(self, table: torch.Tensor, *_: Any, **__: Any) -> None:
        self.tables.append(table)
        self.rows.append(table.clone())

    def reset(self) -> None:
        self.tables, self.rows, self.copies, self.allocated = [], [], 0, 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    send, staging = _pointer_table._send, _pointer_table._staging

    def counted_send(*args: Any) -> torch.Tensor:
        made.copies += 1
        return send(*args)

    def counted_staging(*args: Any) -> torch.Tensor:
        made.allocated += 1
        return staging(*args)

    monkeypatch.setattr(_pointer_table, "_send", counted_send)
    monkeypatch.setattr(_pointer_table, "_staging", counted_staging)
    monkeypatch.setattr(_pointer_table, "capturing", lambda device: made.captured)
    monkeypatch.setattr(_pointer_table, "_copies", type(_pointer_table._copies)())
    monkeypatch.setattr(extension, "triton_missing", lambda: None)
    monkeypatch.setattr(env, "triton_interpreted", lambda: True)
    monkeypatch.setattr(adamw, "_step_kernel", made)
    monkeypatch.setattr(adamw, "_count_kernel", mock.MagicMock())  # launches do nothing
    for name in ("_parts_kernel", "_sums_kernel"):
        monkeypatch.setattr(square_sums, name, mock.MagicMock())
    with fusedops.use_backend("triton"):
        yield made


def model(count: int = 5, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(16 * i, dtype=dtype)) for i in range(1, count + 1)]
    new_gradients(params)
    return params


def new_gradients(params: list[nn.Parameter]) -> None:
    """Give parameters gradients in memory that the ones before do not have."""
    before = [param.grad for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    del before


def addresses(params: list[nn.Parameter]) -> list[int]:
    return [param.grad.data_ptr() for param in params if param.grad is not None]


def stepped(gpu: Gpu, optimizer: AdamW) -> torch.Tensor:
    """Make a step and return the contents of its one table."""
    gpu.reset()
    optimizer.step()
    assert len(gpu.rows) == 1
    return gpu.rows[0]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_norm": 1.0},
    {"capturable": True, "max_norm": 1.0},
    {"amsgrad": True, "state_dtype": torch.bfloat16, "skip_non_finite": True},
    {"amsgrad": True, "master_weights": True},
]


@needs_library
@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: "-".join(each) or "none")
def test_a_step_of_the_same_tensors_copies_nothing(gpu: Gpu, options: dict[str, Any]) -> None:
    """It counts what it writes, too."""
    params = model(dtype=torch.bfloat16 if "master_weights" in options else torch.float32)
    optimizer = AdamW(params, **options)
    optimizer.step()
    assert gpu.copies > 0
    optimizer.step()
    gpu.reset()
    written = [*params, *(each for state in optimizer.state.values() for each in state.values())]
    versions = [each._version for each in written]
    for lr in (0.1, 0.2):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    assert [each._version for each in written] == [2 + each for each in versions]
    assert gpu.copies == gpu.allocated == 0
    assert len(gpu.tables) == 2 and gpu.tables[0] is gpu.tables[1]
    assert gpu.rows[1][:, 1].tolist() == addresses(params)


@needs_library
def test_a_gradient_that_moves_gets_another_table(gpu: Gpu) -> None:
    params = model()
    optimizer = AdamW(params, max_norm=1.0)
    optimizer.step()
    before = stepped(gpu, optimizer)
    first = gpu.tables[0]
    repeated = optimizer._repeated
    params[3].grad = torch.ones_like(params[3])
    after = stepped(gpu, optimizer)
    assert optimizer._repeated is repeated is not None
    assert gpu.copies == 2  # that of the step and that of the norm
    assert gpu.tables[0] is not first
    assert_same_bits(first, before)  # a launch before may still read it
    assert after[:, 1].tolist() == addresses(params)
    changed = (after != before).nonzero().tolist()
    assert changed == [[3, 1]]


def exchange_state(optimizer: AdamW, param: nn.Parameter) -> Any:
    """Return the state before, which goes on to exist."""
    before = optimizer.state[param]
    optimizer.state[param] = {name: value.clone() for name, value in before.items()}
    return before


def exchange_param(optimizer: AdamW, param: nn.Parameter) -> Any:
    group = optimizer.param_groups[0]
    group["params"][2] = other = nn.Parameter(torch.zeros_like(param))
    other.grad = torch.ones_like(other)
    return param


def exchange_data(optimizer: AdamW, param: nn.Parameter) -> None:
    param.data = torch.zeros_like(param)


def exchange_data_of_state(optimizer: AdamW, param: nn.Parameter) -> None:
    optimizer.state[param]["exp_avg"].data = torch.ones_like(param)


def remove_gradient(optimizer: AdamW, param: nn.Parameter) -> None:
    param.grad = None


def clip(optimizer: AdamW, param: nn.Parameter) -> None:
    optimizer.policy = dataclasses.replace(optimizer.policy, max_norm=0.5)


def load(optimizer: AdamW, param: nn.Parameter) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def add_group(optimizer: AdamW, param: nn.Parameter) -> None:
    other = nn.Parameter(torch.zeros(3))
    other.grad = torch.ones(3)
    optimizer.add_param_group({"params": [other]})


CHANGES: dict[str, Callable[[AdamW, nn.Parameter], Any]] = {
    **{
        change.__name__: change
        for change in (exchange_state, exchange_param, exchange_data, exchange_data_of_state)
    },
    **{change.__name__: change for change in (remove_gradient, clip, load, add_group)},
    "moment": lambda optimizer, p: optimizer.state[p].update(exp_avg=torch.ones_like(p)),
    "step": lambda optimizer, p: optimizer.state[p].update(step=torch.tensor(7.0)),
    "decay": lambda optimizer, p: optimizer.param_groups[0].update(weight_decay=0.5),
}


@needs_library
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_else_changes_is_seen(gpu: Gpu, change: str) -> None:
    params = model()
    optimizer = AdamW(params)
    optimizer.step()
    optimizer.step()
    still_there = CHANGES[change](optimizer, params[2])
    gpu.reset()
    optimizer.step()
    del still_there
    members = [each for group in optimizer.param_groups for each in group["params"]]
    rows = torch.cat(gpu.rows)
    rows = rows[rows[:, 0].argsort()]
    want = []
    for param in sorted(members, key=torch.Tensor.data_ptr):
        if param.grad is not None:
            state = optimizer.state[param]
            tensors = (
                param,
                param.grad,
                *(state[name] for name in ("exp_avg", "exp_avg_sq", "step")),
            )
            want.append([tensor.data_ptr() for tensor in tensors])
    assert rows[:, [0, 1, 2, 3, 11]].tolist() == want
    decays = rows[:, 12].contiguous().view(torch.float64)
    assert decays[0] == optimizer.param_groups[0]["weight_decay"]
    assert (optimizer.grad_norm is None) == (optimizer.policy.max_norm is None)


@needs_library
def test_a_sparse_gradient_is_refused_as_in_the_first_step(gpu: Gpu) -> None:
    params = model()
    optimizer = AdamW(params)
    optimizer.step()
    params[1].grad = torch.ones_like(params[1]).to_sparse()
    gpu.reset()
    with pytest.raises(fusedops.UnsupportedError, match="SparseAdam"):
        optimizer.step()
    assert not gpu.tables


@needs_library
def test_a_gradient_of_other_strides_is_laid_out_anew(gpu: Gpu) -> None:
    param = nn.Parameter(torch.zeros(16, 4))
    param.grad = torch.ones(16, 4)
    optimizer = AdamW([param])
    optimizer.step()
    for _ in range(2):
        param.grad = torch.ones(4, 16).t()
        assert stepped(gpu, optimizer)[0, 1] != param.grad.data_ptr()
        assert optimizer._repeated is None, "each step copies the gradient"


@needs_library
def test_another_request_is_obeyed(gpu: Gpu) -> None:
    params = model()
    optimizer = AdamW(params)
    optimizer.step()
    optimizer.step()
    fusedops.reset_counters()
    gpu.reset()
    with fusedops.use_backend("torch"):
        optimizer.step()
    assert not gpu.tables and fusedops.counters() == {("adamw", "torch"): 1}
    optimizer.step()
    optimizer.step()
    assert len(gpu.tables) == 2 and fusedops.counters()["adamw", "triton"] == 2


@needs_library
def test_states_may_be_freed_between_steps(gpu: Gpu) -> None:
    params = model()
    optimizer = AdamW(params, max_norm=1.0)
    optimizer.step()
    optimizer.step()
    freed = [weakref.ref(each) for each in (optimizer.state[params[0]]["exp_avg"], params[0].grad)]
    for param in params:
        exchange_state(optimizer, param)
        param.grad = None
    gc.collect()
    assert [each() for each in freed] == [None, None]
    new_gradients(params)
    assert stepped(gpu, optimizer)[0, 2] == optimizer.state[params[0]]["exp_avg"].data_ptr()


@needs_library
def test_where_steps_differ_few_of_them_are_prepared_for_a_repetition(gpu: Gpu) -> None:
    params = model()
    optimizer = AdamW(params)
    prepared = 0
    for step in range(34):  # as those of experts, of which others get no token each time
        new_gradients(params)
        params[step % 5].grad = None
        optimizer.step()
        prepared += optimizer._repeated is not None
    assert 2 <= prepared <= 6
    new_gradients(params)
    for _ in range(18):
        optimizer.step()
    assert optimizer._repeated is not None, "steps that are alike again are repeated"


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@needs_library
def test_local_parts_of_dtensors_are_stepped(gpu: Gpu, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    def distributed(size: int) -> DTensor:
        return distribute_tensor(torch.ones(size, 4), mesh, [Shard(0)])

    params = [nn.Parameter(distributed(4 * size)) for size in (1, 2, 3)]
    optimizer = AdamW(params, max_norm=1.0)
    norms = []
    for _ in range(3):
        for size, param in enumerate(params):
            param.grad = distributed(4 + 4 * size)
        versions = [(each._version, each._local_tensor._version) for each in params]
        rows = stepped(gpu, optimizer)
        grads: Any = [param.grad for param in params]
        assert rows[:, 1].tolist() == [grad._local_tensor.data_ptr() for grad in grads]
        norms.append(optimizer.grad_norm)
        for param, before in zip(params, versions, strict=True):
            assert param._version > before[0] and param._local_tensor._version > before[1]
    assert optimizer._repeated is not None and norms[0] is not norms[2]
    # A sum that is pending has to be made.
    params[0].grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    optimizer.step()
    assert optimizer._repeated is None


@needs_library
def test_each_capture_owns_its_tables(gpu: Gpu) -> None:
    params = model()
    optimizer = AdamW(params, capturable=True, max_norm=1.0)
    optimizer.step()
    eager = gpu.tables[0]
    captured = []
    places = []
    gpu.captured = True
    for _ in range(2):
        # From the memory of the graph: elsewhere than in the steps before.
        new_gradients(params)
        places.append(params[0].grad)
        captured.append((stepped(gpu, optimizer), gpu.tables[0]))
        assert gpu.copies == 2 and gpu.allocated == 0, "pinned memory of before the capture"
    gpu.captured = False
    (rows, table), (other_rows, other) = captured
    assert len({each.data_ptr() for each in (eager, table, other)}) == 3
    assert not torch.equal(rows, other_rows)
    kept = {id(each) for each in optimizer._captures.tables}
    assert {id(table), id(other)} <= kept
    # Later steps write to none of them, nor do they read what only a replay has filled.
    assert_same_bits(stepped(gpu, optimizer), other_rows)
    assert gpu.copies == 2 and gpu.tables[0] is not other
    new_gradients(params)
    stepped(gpu, optimizer)
    assert_same_bits(table, rows)
    assert_same_bits(other, other_rows)


@needs_library
@pytest.mark.parametrize("steps", [1, 2])
def test_a_capture_reads_the_tables_that_are_there(gpu: Gpu, steps: int) -> None:
    params = model()
    optimizer = AdamW(params, capturable=True)
    for _ in range(steps):
        optimizer.step()
    table = gpu.tables[0]
    gpu.captured = True
    stepped(gpu, optimizer)
    gpu.captured = False
    assert gpu.copies == gpu.allocated == 0 and gpu.tables[0] is table
    assert any(each is table for each in optimizer._captures.tables)
    new_gradients(params)
    rows = table.clone()
    stepped(gpu, optimizer)
    assert_same_bits(table, rows)


def test_what_a_capture_cannot_have_is_refused(gpu: Gpu) -> None:
    params = model()
    plain, fresh = AdamW(params), AdamW(params, capturable=True)
    moved = AdamW(params, lr=torch.tensor(0.1), capturable=True)
    for each in (plain, moved):
        each.step()
    moved.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    gpu.captured = True
    gpu.reset()
    for optimizer, words in (
        (plain, "capturable=True, got False"),
        (fresh, "a step before it"),
        (moved, "lr as a float or on cpu"),
    ):
        with pytest.raises(RuntimeError, match=f"AdamW: a step in a CUDA graph needs {words}"):
            optimizer.step()
    assert not gpu.tables
    with pytest.raises(fusedops.UnsupportedError, match="capturable"):
        OffloadedAdamW(params, capturable=True)


def test_capturable_is_of_the_optimizer_and_not_of_a_checkpoint() -> None:
    params = parameters()
    optimizer, plain = AdamW(params, capturable=True), AdamW(params)
    set_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["capturable"] is True
    plain.load_state_dict(saved)
    assert plain.param_groups[0]["capturable"] is False
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.param_groups[0]["capturable"] is True and other._capturable
        other.load_state_dict(plain.state_dict())
        assert other.param_groups[0]["capturable"] is True
    stock = torch.optim.AdamW(params, capturable=True)
    stock.load_state_dict(copy.deepcopy(saved))
    optimizer.load_state_dict(stock.state_dict())
    assert_same_bits(optimizer.state_dict()["state"], saved["state"])


EVERY: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.float32, {"capturable": True, "amsgrad": True, "max_norm": 0.5}),
    (torch.bfloat16, {"master_weights": True, "max_norm": 0.5}),
    (torch.float32, {"state_dtype": torch.bfloat16, "bias_correction": False}),
]


@needs_library
@pytest.mark.interpreter
@pytest.mark.parametrize(("dtype", "options"), EVERY, ids=["plain", "amsgrad", "master", "half"])
def test_repeated_steps_have_the_bits_of_others(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of the kernels in Triton's interpreter, with gradients that move."""
    results, repeated = [], []
    for repeats in (True, False):
        params = parameters(dtype, [(7,), (3, 5, 2), (48,), (1030,), (0, 4), ()])
        lr = torch.tensor(0.01, dtype=torch.float64) if "capturable" in options else 0.01
        named = [(f"w{i}", parameter) for i, parameter in enumerate(params)]
        optimizer = AdamW(named, lr=lr, **options)
        for step in range(4):
            set_gradients(params, step)
            if not repeats:
                optimizer._repeated = None
            repeated.append(optimizer._repeated is not None)
            states = [each for state in optimizer.state.values() for each in state.values()]
            if not states:  # the first step makes them: where, only a kernel's table tells
                with fusedops.use_backend("torch"):
                    optimizer.step()
                continue
            tables = [*params, *(each.grad for each in params if each.grad is not None), *states]
            with reachable(tables), fusedops.use_backend("triton"):
                optimizer.step()
        results.append([values(params), optimizer.state_dict()["state"]])
    assert repeated == [False, False, True, True] + [False] * 4
    assert_same_bits(results[0], results[1])

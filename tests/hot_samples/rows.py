"""Hot samples of what reduces rows: norms, softmax, losses."""

from __future__ import annotations

from typing import Any

from fusedops.specs.make import randint
from hot_samples.call import HotCall, New, in_float32

# A backward over rows has two programs a multiprocessor: three rows and more for each of 132.
_ROWS = 816
_FEW = 48
_BLOCKS = (1024, 4096, 8192, 16384)  # columns that one block holds
_WALKED = 5 * 4096 + 16  # columns of a row that is walked in blocks


def _norm(op: str, cols: int, *, drops: bool = False) -> HotCall:
    def make(new: New) -> Any:
        data = [new(_ROWS, cols)]
        if op.startswith("add"):
            data.append(new(_ROWS, cols, key="residual"))
        args = [*data, (cols,), new(cols, shift=1.0, scale=0.1, key="weight")]
        options: dict[str, Any] = {"dropout_p": 0.1} if drops else {}
        if op.endswith("layer_norm"):
            return (*args, new(cols, scale=0.1, key="bias")), options
        return args, options | {"rounding": "hf"}

    return HotCall(op, f"{_ROWS}x{cols}{', dropout' * drops}", make, random=drops)


def _gated_norm(cols: int, *, gate_first: bool = True, activation: str = "silu") -> HotCall:
    def make(new: New) -> Any:
        data = [new(3 * 8448, cols) if cols == 128 else new(_ROWS, cols)]
        data += [new(*data[0].shape, key="gate"), new(cols, shift=1.0, scale=0.1, key="weight")]
        return data, {"norm_before_gate": not gate_first, "gate_activation": activation}

    return HotCall("gated_rms_norm", f"{cols}, {activation}", make)


def _softmax(cols: int, kind: str, *, causal: bool = False, learns: bool = False) -> HotCall:
    queries = _FEW if cols <= 4096 else 16

    def make(new: New) -> Any:
        x, mask = new(2, 3, queries, cols), None
        if kind != "none":
            # Of all heads and sequences where it has a gradient: rows are added into it.
            mask = new(1 if learns else 2, 1, queries, cols, grad=learns, key="mask")
        if kind == "keep":
            assert mask is not None
            mask = mask > -0.5
        return (x, mask, 0.5), {"is_causal": causal}

    parts = [f"2x3x{queries}x{cols}", kind, "causal" * causal, "learnt" * learns]
    return HotCall("scaled_masked_softmax", ", ".join(filter(None, parts)), make)


def _loss(
    num_rows: int, classes: int, *, capped: bool = False, smooth: bool = False, pieces: bool = False
) -> HotCall:
    """Return a loss of logits, or of a product that is made in pieces of so many classes."""
    options: dict[str, Any] = {"softcap": 20.0} if capped else {}
    options |= {"label_smoothing": 0.1} if smooth else {}

    def make(new: New) -> Any:
        count = 3 * classes if pieces else classes
        target = randint(num_rows, high=count, device=new.device)
        target[::7] = -100
        if not pieces:
            return (new(num_rows, count, scale=3.0), target), options
        args = (new(num_rows, 64), new(count, 64, scale=0.3, key="weight"), target)
        return args, options | {"chunk_size": classes, "recompute": True}

    op = "linear_cross_entropy" if pieces else "cross_entropy"
    parts = [f"{num_rows}x{classes}", "soft-cap" * capped, "smooth" * smooth, "pieces" * pieces]
    return HotCall(op, ", ".join(filter(None, parts)), make)


def _tokens(classes: int, *, capped: bool = False, pieces: bool = False) -> HotCall:
    """Return the same of log-probabilities."""
    loss = _loss(_FEW, classes, capped=capped, pieces=pieces)

    def make(new: New) -> Any:
        args, options = loss.make(new)
        return args, options | {"return_entropy": True, "temperature": 0.7}

    op = "linear_token_logprobs" if pieces else "token_logprobs"
    return HotCall(op, loss.name, make)


CALLS: dict[str, list[HotCall]] = {
    **{op: [_norm(op, cols) for cols in (*_BLOCKS, _WALKED)] for op in ("layer_norm", "rms_norm")},
    **{
        op: [_norm(op, cols, drops=drops) for drops in (False, True) for cols in _BLOCKS]
        for op in ("add_layer_norm", "add_rms_norm")
    },
    "gated_rms_norm": [
        *(_gated_norm(128, gate_first=False, activation=name) for name in ("silu", "sigmoid")),
        *(_gated_norm(cols) for cols in _BLOCKS[:3]),
    ],
    "scaled_masked_softmax": [
        *(
            call
            for cols in (256, 2048, 16384)
            for call in (
                _softmax(cols, "none", causal=True),
                _softmax(cols, "keep"),
                _softmax(cols, "additive"),
                _softmax(cols, "additive", learns=True),
            )
        ),
        _softmax(_WALKED, "additive", causal=True),
    ],
    # Products of linear_cross_entropy are float32, and come piece by piece. Last, the sum of the
    # losses of three blocks of rows.
    "cross_entropy": [
        *(
            _loss(_FEW, 10240, capped=capped, pieces=pieces)
            for capped in (False, True)
            for pieces in (False, True)
        ),
        *in_float32(
            *(_loss(_FEW, 5120, capped=each, smooth=True, pieces=True) for each in (False, True))
        ),
        _loss(2560, 64),
    ],
    "token_logprobs": [
        *(
            _tokens(classes, capped=capped, pieces=pieces)
            for capped in (False, True)
            for classes, pieces in ((10240, False), (10240, True))
        ),
        *in_float32(*(_tokens(5120, capped=capped, pieces=True) for capped in (False, True))),
    ],
}

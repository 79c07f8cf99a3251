"""gated_delta_rule in Triton: two kernels for chunks, and two that walk from chunk to chunk.

Chunks have 16 tokens (formulae: ``ops/_delta_math.py``). ``prepare_kernel`` makes ``(1 + A)^-1``,
row by row in float32, and the other matrices of all chunks at once. Columns of the state are
independent: a program of ``forward_kernel`` keeps ``[key_dim, BLOCK_V]`` of it in registers from
the first chunk to the last.

The backward walks forward again for the states before the chunks, then backward for their
gradients; ``gradients_kernel`` computes the others of all chunks at once. States and their
gradients are in memory meanwhile, 8 KiB for each token of a head of 128 x 128. No two programs add
to one element; torch adds the gradients of heads that share a key head.

Products of half precision have TF32 operands, whose digits are those of float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._core import env
from fusedops.kernels import _launch
from fusedops.kernels._arguments import DeltaRuleArguments, of_backward
from fusedops.kernels._attention_launch import readable
from fusedops.kernels._delta_rule_chunks import (
    CHUNK,
    NOT_SPECIALIZED,
    gradients_kernel,
    load_rows,
    place,
    prepare_kernel,
    square,
    store_rows,
)

_LARGEST = 128
_MOST_PROGRAMS = 32  # of a head and sequence, that share its chunks


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    v_ptr,
    beta_ptr,
    initial_ptr,
    ends_ptr,
    scores_ptr,
    inverse_ptr,
    read_keys_ptr,
    read_queries_ptr,
    written_ptr,
    decay_ptr,
    out_ptr,
    final_ptr,
    states_ptr,
    rest_ptr,
    new_ptr,
    stride_vb,
    stride_vt,
    stride_vh,
    tokens,
    heads,
    parts,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GATES: tl.constexpr,
    INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
    KEEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Write output and final state, or with ``KEEPS`` what the backward needs of each chunk."""
    part, head, n, batch, token, first, count, number = place(
        ends_ptr, tokens, heads, parts, PACKED
    )
    k = tl.arange(0, BLOCK_K)
    v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    wide_head = head.to(tl.int64)
    v_base = v_ptr + batch * stride_vb + token * stride_vt + wide_head * stride_vh
    of_head = first * heads + wide_head
    in_state = (k < HEAD_DIM)[:, None] & (v < VALUE_DIM)[None, :]
    of_state = k[:, None] * VALUE_DIM + v[None, :]
    at_state = (n * heads + wide_head) * HEAD_DIM * VALUE_DIM + of_state
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if INITIAL:
        state = tl.load(initial_ptr + at_state, mask=in_state, other=0.0)
    for start in tl.range(0, count, CHUNK):
        chunk = number + start // CHUNK
        squares = square(chunk, heads, wide_head)
        row = start + tl.arange(0, CHUNK)
        exists = row < count
        beta = tl.load(beta_ptr + of_head + row.to(tl.int64) * heads, mask=exists, other=0.0)
        gate = tl.arange(0, BLOCK_G)
        at = (chunk * heads + wide_head) * GATES
        decay = tl.load(decay_ptr + at + gate, mask=gate < GATES, other=0.0)[:, None]
        of_keys = of_head * HEAD_DIM
        stride_k = heads * HEAD_DIM
        stride_out = heads * VALUE_DIM
        rest = load_rows(v_base, row, stride_vt, exists, v, VALUE_DIM)
        read = load_rows(read_keys_ptr + of_keys, row, stride_k, exists, k, HEAD_DIM)
        rest -= tl.dot(read, state, input_precision=PRECISION)
        inverse = tl.load(inverse_ptr + squares)
        new = tl.dot(inverse, beta[:, None] * rest, input_precision=PRECISION)
        # What is loaded from here on would be loaded earlier, and spill.
        tl.debug_barrier()
        if KEEPS:
            at = (chunk * heads + wide_head) * HEAD_DIM * VALUE_DIM
            tl.store(states_ptr + at + of_state, state, mask=in_state)
            at = of_head * VALUE_DIM
            store_rows(rest_ptr + at, row, stride_out, exists, v, VALUE_DIM, rest)
            store_rows(new_ptr + at, row, stride_out, exists, v, VALUE_DIM, new)
        else:
            read = load_rows(read_queries_ptr + of_keys, row, stride_k, exists, k, HEAD_DIM)
            output = tl.dot(read, state, input_precision=PRECISION)
            scores = tl.load(scores_ptr + squares)
            output = tl.dot(scores, new, output, input_precision=PRECISION)
            at = of_head * VALUE_DIM
            store_rows(out_ptr + at, row, stride_out, exists, v, VALUE_DIM, output)
        written = load_rows(written_ptr + of_keys, row, stride_k, exists, k, HEAD_DIM)
        state = tl.dot(tl.trans(written), new, state * decay, input_precision=PRECISION)
    if not KEEPS:
        tl.store(final_ptr + at_state, state, mask=in_state)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def backward_kernel(
    beta_ptr,
    ends_ptr,
    scores_ptr,
    inverse_ptr,
    read_keys_ptr,
    read_queries_ptr,
    written_ptr,
    decay_ptr,
    grad_ptr,
    grad_final_ptr,
    grad_states_ptr,
    solved_ptr,
    dv_ptr,
    dinitial_ptr,
    tokens,
    heads,
    parts,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GATES: tl.constexpr,
    FINAL: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Write the gradients of the states after the chunks, of what was solved, and of values."""
    part, head, n, batch, token, first, count, number = place(
        ends_ptr, tokens, heads, parts, PACKED
    )
    k = tl.arange(0, BLOCK_K)
    v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    wide_head = head.to(tl.int64)
    of_head = first * heads + wide_head
    in_state = (k < HEAD_DIM)[:, None] & (v < VALUE_DIM)[None, :]
    of_state = k[:, None] * VALUE_DIM + v[None, :]
    at_state = (n * heads + wide_head) * HEAD_DIM * VALUE_DIM + of_state
    grad_state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if FINAL:
        grad_state = tl.load(grad_final_ptr + at_state, mask=in_state, other=0.0)
    chunks = tl.cdiv(count, CHUNK)
    for step in tl.range(0, chunks):
        start = (chunks - 1 - step) * CHUNK
        chunk = number + start // CHUNK
        squares = square(chunk, heads, wide_head)
        row = start + tl.arange(0, CHUNK)
        exists = row < count
        beta = tl.load(beta_ptr + of_head + row.to(tl.int64) * heads, mask=exists, other=0.0)
        gate = tl.arange(0, BLOCK_G)
        at = (chunk * heads + wide_head) * GATES
        decay = tl.load(decay_ptr + at + gate, mask=gate < GATES, other=0.0)[:, None]
        of_keys = of_head * HEAD_DIM
        stride_k = heads * HEAD_DIM
        at = (chunk * heads + wide_head) * HEAD_DIM * VALUE_DIM
        tl.store(grad_states_ptr + at + of_state, grad_state, mask=in_state)
        at = of_head * VALUE_DIM
        stride = heads * VALUE_DIM
        grad = load_rows(grad_ptr + at, row, stride, exists, v, VALUE_DIM)
        written = load_rows(written_ptr + of_keys, row, stride_k, exists, k, HEAD_DIM)
        grad_new = tl.dot(written, grad_state, input_precision=PRECISION)
        scores = tl.load(scores_ptr + squares)
        grad_new = tl.dot(tl.trans(scores), grad, grad_new, input_precision=PRECISION)
        inverse = tl.load(inverse_ptr + squares)
        solved = tl.dot(tl.trans(inverse), grad_new, input_precision=PRECISION)
        store_rows(solved_ptr + at, row, stride, exists, v, VALUE_DIM, solved)
        grad_value = solved * beta[:, None]
        store_rows(dv_ptr + at, row, stride, exists, v, VALUE_DIM, grad_value)
        read = load_rows(read_queries_ptr + of_keys, row, stride_k, exists, k, HEAD_DIM)
        grad_state *= decay
        grad_state = tl.dot(tl.trans(read), grad, grad_state, input_precision=PRECISION)
        read = load_rows(read_keys_ptr + of_keys, row, stride_k, exists, k, HEAD_DIM)
        grad_state = tl.dot(tl.trans(-read), grad_value, grad_state, input_precision=PRECISION)
    tl.store(dinitial_ptr + at_state, grad_state, mask=in_state)


def supports(query: torch.Tensor, key: torch.Tensor, *args: Any) -> str | None:
    size = max(query.shape[-1], args[0].shape[-1])
    if size > _LARGEST:
        return f"its kernels keep a head's state in registers: sizes up to {_LARGEST}, not {size}"
    return None


def supports_backward(grad_output: Any, grad_final: Any, *args: Any) -> str | None:
    return supports(*args)


class _Call:
    """A call with the matrices of its chunks, and the launches of its kernels."""

    def __init__(self, call: DeltaRuleArguments):
        query, key, value = map(readable, call[:3])
        batch, tokens, heads, self.value_dim = value.shape
        self.key_dim = key.shape[3]
        packed = call.cu_seqlens is not None
        self.sequences = call.cu_seqlens.shape[0] - 1 if call.cu_seqlens is not None else batch
        size, chunk = key.shape[3], CHUNK.value
        per_sequence = triton.cdiv(tokens, chunk)
        chunks = tokens // chunk + self.sequences if packed else per_sequence * batch
        self.programs = max(1, min(_MOST_PROGRAMS, per_sequence))
        self.state_shape = (self.sequences, heads, size, self.value_dim)
        self.chunk_states = (chunks, heads, size, self.value_dim)
        shapes: dict[str, tuple[int, ...]]
        shapes = {f"{name}_ptr": (chunks, heads, chunk, chunk) for name in _SQUARES}
        half = value.dtype != torch.float32
        self.arguments: dict[str, Any] = {
            "q_ptr": query,
            "k_ptr": key,
            "v_ptr": value,
            "gate_ptr": call.gate.float().contiguous(),
            "beta_ptr": call.beta.float().contiguous(),
            "ends_ptr": _launch.dense(call.cu_seqlens, query),
            "tokens": tokens,
            "heads": heads,
            "scale": call.scale,
            "GROUP": heads // key.shape[2],
            "HEAD_DIM": size,
            "VALUE_DIM": self.value_dim,
            "GATES": size if call.gate.dim() == 4 else 1,
            "NORM": call.qk_norm,
            "PACKED": packed,
            "PRECISION": "tf32" if half else _launch.precision(value.dtype),
        }
        for name, tensor in (("q", query), ("k", key), ("v", value)):
            strides = zip("bth", tensor.stride(), strict=False)
            self.arguments |= {f"stride_{name}{dim}": stride for dim, stride in strides}
        of_keys = (batch, tokens, heads, size)
        shapes |= {f"{name}_ptr": of_keys for name in _ROWS}
        shapes["decay_ptr"] = (chunks, heads, self.arguments["GATES"])
        self.arguments |= {name: self.empty(shape) for name, shape in shapes.items()}
        self.launch(prepare_kernel)

    def empty(self, shape: Sequence[int]) -> torch.Tensor:
        """Return a float32 tensor without values."""
        return torch.empty(shape, device=self.arguments["v_ptr"].device, dtype=torch.float32)

    def launch(self, kernel: Any, **more: Any) -> None:
        """Launch a kernel with those of the arguments that it has."""
        if self.sequences == 0:
            return
        walks = kernel in (forward_kernel, backward_kernel)
        gates = self.arguments["GATES"]
        sizes, options = _blocks(kernel, gates, self.key_dim, self.value_dim)
        parts = triton.cdiv(self.value_dim, sizes["BLOCK_V"]) if walks else self.programs
        arguments = self.arguments | sizes | {"parts": parts} | more
        arguments = {name: arguments[name] for name in kernel.arg_names if name in arguments}
        grid = (parts * self.arguments["heads"] * self.sequences,)
        with _launch.device_of(self.arguments["v_ptr"]):
            kernel[grid](**arguments, **options)

    def walk(self, initial: torch.Tensor | None, **outputs: torch.Tensor) -> None:
        """Run the forward kernel for output and final state, or for what the backward needs."""
        names = ("out_ptr", "final_ptr", "states_ptr", "rest_ptr", "new_ptr")
        pointers = dict.fromkeys(names, next(iter(outputs.values()))) | outputs
        pointers["initial_ptr"] = _launch.dense(initial, self.arguments["gate_ptr"])
        flags = {"INITIAL": initial is not None, "KEEPS": "states_ptr" in outputs}
        self.launch(forward_kernel, **pointers, **flags)


_SQUARES = ("keys", "scores", "inverse")  # matrices over the tokens of a chunk
_ROWS = ("read_keys", "read_queries", "written")  # a row for each token and head


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = DeltaRuleArguments(*args)
    output = arguments.value.new_empty(arguments.value.shape)
    if arguments.key.shape[3] * arguments.value.shape[2] * arguments.value.shape[3] == 0:
        return output.zero_(), _empty_state(arguments)
    call = _Call(arguments)
    final = call.empty(call.state_shape)
    call.walk(arguments.initial_state, out_ptr=output, final_ptr=final)
    return output, final


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    (grad_output, grad_final), arguments, _, mask = of_backward(
        DeltaRuleArguments, args, incoming=2
    )
    query, key, value, gate, beta = arguments[:5]
    if key.shape[3] * value.shape[2] * value.shape[3] == 0:
        zeros = [torch.zeros_like(t) for t in (*arguments[:5], _empty_state(arguments))]
        return tuple(grad if on else None for grad, on in zip(zeros, mask, strict=True))
    call = _Call(arguments)
    if grad_output is None:
        grad_output = torch.zeros_like(value)
    final = None if grad_final is None else grad_final.float().contiguous()
    of_values = {f"{name}_ptr": call.empty(value.shape) for name in ("rest", "new")}
    kept = {"states_ptr": call.empty(call.chunk_states)} | of_values
    grad_value = value.new_empty(value.shape)
    grad_initial = call.empty(call.state_shape)
    shared = {
        "grad_ptr": grad_output.to(value.dtype).contiguous(),
        "solved_ptr": call.empty(value.shape),
        "grad_states_ptr": call.empty(call.chunk_states),
    }
    pointers = {"dv_ptr": grad_value, "dinitial_ptr": grad_initial}
    pointers["grad_final_ptr"] = _launch.dense(final, grad_initial)
    of_keys = (*value.shape[:3], key.shape[3])
    results = [call.empty(shape) for shape in (of_keys, of_keys, gate.shape, beta.shape)]
    names = ("dq_ptr", "dk_ptr", "dgate_ptr", "dbeta_ptr")
    call.walk(arguments.initial_state, **kept)
    call.launch(backward_kernel, **shared, **pointers, FINAL=final is not None)
    gradients = dict(zip(names, results, strict=True))
    call.launch(gradients_kernel, **kept, **shared, **gradients)
    grads = [
        _of_rows(query, results[0], arguments.qk_norm),
        _of_rows(key, results[1], arguments.qk_norm),
        grad_value,
        results[2].to(gate.dtype),
        results[3].to(beta.dtype),
        grad_initial,
    ]
    return tuple(grad if on else None for grad, on in zip(grads, mask, strict=True))


def _empty_state(call: DeltaRuleArguments) -> torch.Tensor:
    """Return the state of a call whose state has no element."""
    count = call.value.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    shape = (count, call.value.shape[2], call.key.shape[3], call.value.shape[3])
    return call.value.new_empty(shape, dtype=torch.float32)


def _of_rows(rows: torch.Tensor, of_heads: torch.Tensor, norm: bool) -> torch.Tensor:
    """Return the gradient of queries or keys from that of each head's normalised ones."""
    grad = of_heads.unflatten(2, (rows.shape[2], -1)).sum(3)
    if norm:
        wide = rows.float()
        factor = torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)
        unit = wide * factor
        grad = factor * (grad - unit * (unit * grad).sum(-1, keepdim=True))
    return grad.to(rows.dtype)


def _blocks(kernel: Any, gates: int, key_dim: int, value_dim: int) -> _launch.Tiling:
    """Return block sizes and launch options of a kernel."""
    block_k, block_v = (max(16, triton.next_power_of_2(size)) for size in (key_dim, value_dim))
    widest = 16 if kernel is gradients_kernel or env.triton_interpreted() else 32
    sizes = {"BLOCK_K": block_k, "BLOCK_V": min(widest, block_v)}
    sizes["BLOCK_G"] = block_k if gates > 1 else 1
    num_warps = 4
    if kernel is prepare_kernel and gates == 1:
        num_warps = 2
    elif kernel is gradients_kernel and gates > 1:
        num_warps = 8
    # Lanes that add up products of each other must not fuse them: their sums would differ in bits.
    fusion = kernel not in (prepare_kernel, gradients_kernel)
    return sizes, {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": fusion}

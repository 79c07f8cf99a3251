"""What tests, benchmarks and documentation need to know of ``attention``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.ops.attention import attention
from fusedops.specs._attention_eager import NOT_FINITE, Attend, attend
from fusedops.specs.make import TensorFactory, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    attend: Attend = attend,
    **options: Any,
) -> Any:
    """Attend as model code does; also what the benchmark compares with."""
    left, right = window or (-1, -1)
    rows = query.shape[:-1]
    if query.dim() != 4:
        query, key, value = (
            t.reshape(-1, *((1,) if t.dim() == 2 else ()), *t.shape[-3:])
            for t in (query, key, value)
        )
    options |= {"attn_mask": attn_mask, "dropout_p": dropout_p, "scale": scale}
    window = (left, 0 if is_causal else right)
    output, lse = attend(query, key, value, window=window, **options)
    output = output.reshape(*rows, output.shape[-1])
    return (output, lse.reshape(rows)) if return_lse else output


def _eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> Any:
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    if options or (is_causal and attn_mask is not None):
        return written_out(*args, scale, enable_gqa, **options)
    return F.scaled_dot_product_attention(*args, scale=scale, enable_gqa=enable_gqa)


def _samples(new: TensorFactory) -> list[Sample]:
    plain, device = new.wide, new.device

    def qkv(
        batch: int = 2,
        heads: int = 2,
        rows: int = 5,
        columns: int = 7,
        size: int = 8,
        *,
        key_heads: int | None = None,
        value_size: int | None = None,
    ) -> tuple[torch.Tensor, ...]:
        shared = (batch, heads if key_heads is None else key_heads, columns)
        return (
            new(batch, heads, rows, size, key="q"),
            new(*shared, size, key="k"),
            new(*shared, size if value_size is None else value_size, key="v"),
        )

    def with_common(tensor: torch.Tensor) -> torch.Tensor:
        """Return queries or keys that share a feature: their scores have an offset of 1109.

        Times log2(e) it has the same exponent: kernels round scores in base 2, eager torch in base
        e.
        """
        same = torch.zeros_like(tensor)
        same[..., 0] = 56.0
        return torch.where(same > 0.0, same, tensor.detach()).requires_grad_()

    def keep(*shape: int) -> torch.Tensor:
        return plain(*shape, grad=False, key="mask") > -0.3

    slopes = torch.tensor([0.5, 0.0625], device=device, dtype=plain.dtype)
    none_of_second = keep(5, 7).clone()
    none_of_second[1] = False
    sinks = plain(2, key="sinks")
    packed = new(2, 6, 3, 4, 8, key="packed")  # [B, S, 3, H, D], as one linear makes it
    views = tuple(t.detach().transpose(1, 2).requires_grad_() for t in packed.unbind(2))
    return [
        Sample("plain", qkv(5, 2, 6, 6)),
        Sample("causal", (*qkv(), None, 0.0, True)),
        Sample("causal_more_queries", (*qkv(rows=9, columns=4), None, 0.0, True)),
        Sample("heads_inside", views),
        Sample("long", (*qkv(1, 1, 67, 150, 20), None, 0.0, True)),
        Sample("large_heads", qkv(1, 1, 3, 35, 130, value_size=70)),
        Sample("odd_sizes", qkv(1, 3, 37, 45, 5, value_size=3)),
        Sample("scale", qkv(), {"scale": 0.3}),
        Sample("grouped", qkv(2, 4, 5, 7, key_heads=2), {"enable_gqa": True}),
        Sample("one_key_head", (*qkv(1, 3, 4, 6, key_heads=1), None, 0.0, True, None, True)),
        Sample("boolean_mask", (*qkv(), keep(2, 2, 5, 7))),
        Sample("padding_mask", (*qkv(), keep(2, 1, 1, 7))),
        Sample("column_mask", (*qkv(), keep(5, 1))),
        Sample("a_row_of_nothing", (*qkv(), none_of_second)),
        Sample("additive_mask", (*qkv(), new(2, 2, 5, 7, key="bias"))),
        Sample("additive_mask_of_heads", (*qkv(), new(1, 2, 5, 7, key="bias"))),
        Sample("additive_mask_of_keys", (*qkv(), new(2, 1, 1, 7, key="bias"))),
        Sample("float32_mask", (*qkv(), plain(5, 7, key="bias", grad=False))),
        Sample("mask_and_causal", (*qkv(), keep(2, 1, 5, 7), 0.0, True)),
        Sample("window", qkv(rows=9, columns=9), {"window": (2, 1)}),
        Sample("window_left", (*qkv(rows=40, columns=40), None, 0.0, True), {"window": (3, -1)}),
        Sample("softcap", (*qkv(), None, 0.0, True), {"softcap": 2.0}),
        Sample("softcap_with_mask", (*qkv(), new(5, 7, key="bias")), {"softcap": 2.0}),
        Sample("alibi", (*qkv(), None, 0.0, True), {"alibi_slopes": slopes}),
        Sample("alibi_per_batch", qkv(), {"alibi_slopes": torch.stack([slopes, 2 * slopes])}),
        Sample("sinks", (*qkv(), None, 0.0, True), {"sinks": sinks}),
        Sample("log_sum_exp", qkv(), {"return_lse": True}),
        Sample("sinks_and_log_sum_exp", qkv(), {"sinks": sinks, "return_lse": True}),
        Sample("dropout", (*qkv(), None, 0.3), random=True),
        Sample("dropout_causal", (*qkv(1, 2, 40, 40), None, 0.5, True), random=True),
        Sample("dropout_of_all", (*qkv(), None, 1.0), random=True),
        Sample("extremes", (*qkv(), with_extremes(new(5, 7, key="bias")))),
        Sample("extreme_sinks", qkv(2, 6), {"sinks": with_extremes(plain(6, key="sinks"))}),
        Sample(
            "offset_of_scores_and_sinks",
            (*map(with_common, qkv()[:2]), qkv()[2]),
            {"sinks": plain(2, key="sinks", shift=1109.0)},
        ),
        Sample("offset_of_scores", (*map(with_common, qkv()[:2]), qkv()[2])),
        Sample("one_query", qkv(2, 4, 1, 9, key_heads=2), {"enable_gqa": True}),
        Sample("one_query_with_keys_to_keep", (*qkv(2, 4, 1, 37), keep(2, 1, 1, 37))),
        Sample("one_query_with_a_bias", (*qkv(2, 2, 1, 37), new(2, 2, 1, 37, key="bias"))),
        Sample("one_query_float32_mask", (*qkv(2, 2, 1, 9), plain(1, 9, key="bias", grad=False))),
        Sample(
            "one_query_with_everything",
            (*qkv(1, 2, 1, 70, 20), new(1, 2, 1, 70, key="bias")),
            {"softcap": 2.0, "window": (3, 40), "alibi_slopes": slopes, "sinks": sinks},
        ),
        Sample("one_of_all", qkv(1, 1, 1, 1, 1)),
        Sample("three_dims", tuple(t.detach()[0].requires_grad_() for t in qkv())),
        Sample("matrices", tuple(t.detach()[0, 0].requires_grad_() for t in qkv())),
        Sample("shared_keys", (qkv()[0], *(t.detach()[:1].requires_grad_() for t in qkv()[1:]))),
        Sample("no_queries", qkv(rows=0)),
        Sample("no_keys", qkv(columns=0)),
        Sample("no_batch", qkv(batch=0)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    q = torch.randn(2, 4, 5, 8, device=device)
    k = torch.randn(2, 2, 7, 8, device=device)
    k_all_heads = torch.randn(2, 4, 7, 8, device=device)
    mask = torch.ones(5, 6, device=device, dtype=torch.bool)

    slopes = torch.ones(3, device=device)
    vectors = {"query": q[0, 0, 0], "key": k[0, 0, 0], "value": k[0, 0, 0]}
    three_heads = {"key": k_all_heads[:, :3], "value": k_all_heads[:, :3], "enable_gqa": True}
    bad = bad_changes(query=q, key=k_all_heads, value=k_all_heads)
    return [
        bad("heads_without_gqa", "key", "enable_gqa", "2", key=k, value=k),
        bad("heads_do_not_divide", "heads", "3", **three_heads),
        bad("head_size", "key", "8", "6", key=k_all_heads[..., :6]),
        bad("value_tokens", "value", "[2, 4, 7,", value=k_all_heads[:, :, :5]),
        bad("batch", "key", "[2]", "[3]", key=k_all_heads[:1].repeat(3, 1, 1, 1)),
        bad("vector", "query", "2 dims", "[8]", **vectors),
        bad("mask_shape", "attn_mask", "[2, 4, 5, 7]", "[5, 6]", attn_mask=mask),
        bad("dropout", "dropout_p", "1.5", dropout_p=1.5),
        bad("window", "window", "-2", window=(-2, 0)),
        bad("softcap", "softcap", "-1.0", softcap=-1.0),
        bad("slopes", "alibi_slopes", "[3]", alibi_slopes=slopes),
        bad("sinks", "sinks", "[4]", "[3]", sinks=slopes),
    ]


def _case(
    batch: int, heads: int, rows: int, size: int, what: str = "causal", key_heads: int | None = None
) -> BenchCase:
    shared = heads if key_heads is None else key_heads

    def make(new: TensorFactory) -> Sample:
        def heads_of(count: int, key: str) -> torch.Tensor:
            made = new(batch, rows, count, size, key=key)
            return made.detach().transpose(1, 2).requires_grad_()

        q, k, v = heads_of(heads, "q"), heads_of(shared, "k"), heads_of(shared, "v")
        options: dict[str, Any] = {"enable_gqa": True} if shared != heads else {}
        if what == "causal":
            options["is_causal"] = True
        elif what == "mask":
            noise = new(batch, 1, 1, rows, dtype=torch.float32, grad=False)
            options["attn_mask"] = noise > -1.0
        elif what == "window":
            options |= {"is_causal": True, "window": (rows // 8, -1)}
        elif what == "softcap":
            options |= {"is_causal": True, "softcap": 30.0}
        elif what == "bias":
            options["attn_mask"] = new(1, heads, rows, rows, grad=False, key="bias")
        return Sample("bench", (q, k, v), options)

    tokens = batch * rows * size
    pairs = batch * heads * rows * rows * size
    pairs = pairs // 2 if what in ("causal", "softcap") else pairs
    pairs = pairs // 8 if what == "window" else pairs
    grouped = f"/{shared}" if shared != heads else ""
    label = f"{batch}x{heads}{grouped}x{rows}x{size} {what}"
    elements = ((2 * heads + 2 * shared) * tokens, (4 * heads + 4 * shared) * tokens)
    return BenchCase.moving(label, make, elements, (4 * pairs, 10 * pairs))


def _from_opinfo(
    query: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    # A drawn mask is torch's own, not ours.
    return None if kwargs.get("dropout_p", 0.0) else ((query, *args), kwargs)


SPEC = describe(attention, _eager, _samples, _bad_inputs, _case)(
    non_finite=tuple(functools.partial(written_out, attend=attend) for attend in NOT_FINITE),
    bench_cases=(
        _case(8, 12, 512, 64, "mask").headlined(),
        _case(4, 12, 1024, 64, "causal").headlined(),
        _case(8, 12, 128, 64, "mask"),
        _case(8, 12, 256, 64, "causal"),
        _case(1, 8, 4096, 128, "causal"),
        _case(2, 32, 1024, 128, "causal", key_heads=8),
        _case(2, 12, 1024, 64, "window"),
        _case(2, 12, 1024, 64, "softcap"),
        _case(4, 12, 512, 64, "bias"),
        _case(2, 8, 256, 256, "causal"),
        _case(1, 12, 16, 64, "causal"),
    ),
    summary="softmax(query key^T) value with masks, windows, soft-cap, ALiBi, sinks, grouped heads",
    autocast="lower",
    opinfo=("nn.functional.scaled_dot_product_attention",),
    from_opinfo=_from_opinfo,
    limits=(
        "alibi_slopes is not differentiable: give the bias as attn_mask for that.",
        "In half precision the probabilities are rounded before the second product, so the gradient"
        " of a float32 mask is no more precise than query's dtype.",
    ),
)

"""Device functions of several Triton kernels: activations and derivatives, dropout, parts of tiles.

The formulae are those of ``csrc/cpu/elementwise/activation.h``. No libdevice: the normal law is
``exp(-x^2/2)`` times a polynomial in ``1 / (1 + 0.3 |x|)``, which unlike ``1 + erf(x)`` does not
cancel in the tail, and ``(1 + tanh u) / 2`` is ``sigmoid(2 u)``. As in torch an activation of inf
is inf, and what multiplies an infinity by a factor that vanishes is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops._core import env, philox

PHILOX_ROUNDS = tl.constexpr(philox.ROUNDS)
INTERPRETED = tl.constexpr(env.triton_interpreted())
LOG2E = tl.constexpr(1.4426950408889634)
# Of GELU by tanh: sqrt(8 / pi), and that times 0.044715.
ROOT = tl.constexpr(1.5957691216057308)
CUBE = tl.constexpr(0.07135481282052166)


@triton.jit
def clamp(x, low, high):
    """Bound ``x``; NaN stays NaN."""
    x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def reciprocal(x):
    """Return 1 / x of float32 to one unit in the last place; of more than 2^126 it is 0."""
    if INTERPRETED:
        return 1.0 / x
    else:
        # The division that "/" becomes scales its operands first: eight instructions, not one.
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def exp(x):
    """Return e^x of float32, numbers below 2^-126 as 0: two instructions, five with them."""
    return tl.exp2(x * LOG2E)


@triton.jit
def normal_law(x, dtype: tl.constexpr):
    """Return the distribution function of the normal law and its density.

    For results in half precision the tail is right to 1.6e-6 of itself, a hundredth of the rounding
    that follows (above 8, where nothing is left of it, to 0.6 percent); in float32 to 2e-7.
    """
    t = reciprocal(1.0 + 0.3 * tl.abs(x))
    if dtype == tl.float32:
        p = -0.020623552 * t + 0.11243606
        p = p * t - 0.22821465
        p = p * t + 0.19178593
        p = p * t - 0.079424635
        p = p * t + 0.09615744
        p = p * t + 0.07838944
        p = p * t + 0.11023547
        p = p * t + 0.11957181
        p = p * t + 0.11968669
    else:
        p = -0.08264706627 * t + 0.2331053199
        p = p * t - 0.03706593069
        p = p * t + 0.1555044152
        p = p * t + 0.1107226745
        p = p * t + 0.1203798112
    # Of what is large the square is inf, the exponential 0, and so is the tail.
    e = tl.exp2(x * x * (-0.5 * LOG2E))
    tail = e * (t * p)
    return tl.where(x < 0.0, tail, 1.0 - tail), e * 0.3989422804014327


@triton.jit
def logistic(z):
    """Return the logistic function alone: an exponential that overflows leaves the 0 meant."""
    return reciprocal(1.0 + exp(-z))


@triton.jit
def sigmoid(z):
    """Return the logistic function and its derivative, without overflow or cancellation."""
    t = exp(-tl.abs(z))
    large = reciprocal(1.0 + t)
    small = t * large
    return tl.where(z < 0.0, small, large), small * large


@triton.jit
def act_value(x, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Return the activation of float32 ``x`` for a result that is rounded to ``dtype``.

    Names are those of ``_core/activation.py``.
    """
    if ACTIVATION == "identity":
        return x
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive
    elif ACTIVATION == "silu":
        return x * logistic(x)
    elif ACTIVATION == "gelu":
        below, _ = normal_law(x, dtype)
        return x * below
    elif ACTIVATION == "gelu_tanh":
        # sqrt(8 / pi) * (x + 0.044715 x^3); x^2 is bounded so that it stays finite.
        return x * logistic(x * (ROOT + CUBE * tl.minimum(x * x, 1e8)))
    else:
        return x * logistic(1.702 * x)


@triton.jit
def act_both(x, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Return ``act_value`` and the derivative, of relu where it passes ``x`` on: see with_slope.

    What both are made of is made once; a caller that wants one of them pays for no other.
    """
    if ACTIVATION == "identity" or ACTIVATION == "relu":
        return act_value(x, ACTIVATION, dtype), tl.full(x.shape, 1.0, tl.float32)
    elif ACTIVATION == "relu2":
        return act_value(x, ACTIVATION, dtype), 2.0 * x
    elif ACTIVATION == "silu":
        value, slope = sigmoid(x)
        return x * value, value + x * slope
    elif ACTIVATION == "gelu":
        below, density = normal_law(x, dtype)
        return x * below, below + x * density
    elif ACTIVATION == "gelu_tanh":
        # The square overflows before x does; 0 * x is NaN at infinities.
        bounded = clamp(x, -1e3, 1e3)
        square = bounded * bounded
        value, slope = sigmoid(bounded * (ROOT + CUBE * square))
        return x * value, value + bounded * (ROOT + 3.0 * CUBE * square) * slope + 0.0 * x
    else:
        value, slope = sigmoid(1.702 * x)
        return x * value, value + x * (1.702 * slope)


@triton.jit
def act_slope(x, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Return the derivative that ``act_both`` returns."""
    _, slope = act_both(x, ACTIVATION, dtype)
    return slope


@triton.jit
def with_slope(grad, slope, x, ACTIVATION: tl.constexpr):
    """Return ``grad * slope``; as in torch, nothing passes what relu stopped, NaN neither."""
    if ACTIVATION == "relu" or ACTIVATION == "relu2":
        return tl.where(x <= 0.0, 0.0, grad * slope)
    else:
        return grad * slope


@triton.jit
def halves(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the left and the right half of a tile."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def split(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):
    """Return the columns of a tile in ``PARTS`` (1, 4 or 8) equal parts, left to right."""
    if PARTS == 1:
        return (tile,)
    else:
        left, right = halves(tile, BLOCK_M, BLOCK_N)
        a, b = halves(left, BLOCK_M, BLOCK_N // 2)
        c, d = halves(right, BLOCK_M, BLOCK_N // 2)
        if PARTS == 4:
            return a, b, c, d
        else:
            a1, a2 = halves(a, BLOCK_M, BLOCK_N // 4)
            b1, b2 = halves(b, BLOCK_M, BLOCK_N // 4)
            c1, c2 = halves(c, BLOCK_M, BLOCK_N // 4)
            d1, d2 = halves(d, BLOCK_M, BLOCK_N // 4)
            return a1, a2, b1, b2, c1, c2, d1, d2


@triton.jit
def kept(start, seed_ptr, limit, BLOCK_N: tl.constexpr, DROPOUT: tl.constexpr):
    """Return which elements of rows dropout keeps; ``_core/philox.py`` is the specification.

    ``start`` is the linear index (int64) of the first column: a scalar for a block ``[N]``,
    ``[M, 1]`` for ``[M, N]``. Modes are those of ``_launch.dropout_arguments`` that draw numbers:
    ``"draw"`` gives a counter's four words to four neighbours and needs starts that four divides;
    others draw a counter per element.
    """
    if DROPOUT == "draw" or DROPOUT == "draw placed":
        counter = (start >> 2) + tl.arange(0, BLOCK_N // 4)
        w0, w1, w2, w3 = _words(counter, seed_ptr)
        bound = limit.to(tl.uint32, bitcast=True)
        even = tl.interleave(w0 > bound, w2 > bound)
        odd = tl.interleave(w1 > bound, w3 > bound)
        return tl.interleave(even, odd)
    else:
        return kept_at(start + tl.arange(0, BLOCK_N), seed_ptr, limit)


@triton.jit
def kept_at(index, seed_ptr, limit):
    """Return which elements dropout keeps, by a linear index (int64) for each."""
    w0, w1, w2, w3 = _words(index >> 2, seed_ptr)
    word = index & 3
    drawn = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    return drawn > limit.to(tl.uint32, bitcast=True)


@triton.jit
def _words(counter, seed_ptr):
    seed = tl.load(seed_ptr)
    offset = tl.load(seed_ptr + 1)
    offset_low = (offset & 0xFFFFFFFF).to(tl.uint32)
    offset_high = ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, offset_low, offset_high, PHILOX_ROUNDS)


@triton.jit
def _row_places(start, seed_ptr, DROPOUT: tl.constexpr):
    """Return where rows that begin at ``start`` stand in a larger tensor, if they do."""
    if DROPOUT == "draw placed" or DROPOUT == "select placed":
        run = tl.load(seed_ptr + 2)
        stride = tl.load(seed_ptr + 3)
        unit = tl.load(seed_ptr + 4)
        piece = tl.load(seed_ptr + 5 + start % run // unit)
        return start // run * stride + piece + start % unit
    else:
        return start


@triton.jit
def dropout(x, start, seed_ptr, limit, scale, DROPOUT: tl.constexpr):
    """Return dropout of rows ``x``; arguments as ``kept``, and the modes that draw nothing."""
    if DROPOUT == "none":
        return x
    elif DROPOUT == "all":
        return tl.zeros(x.shape, tl.float32)
    else:
        start = _row_places(start, seed_ptr, DROPOUT)
        keep = kept(start, seed_ptr, limit, x.shape[-1], DROPOUT)
        return tl.where(keep, x * scale, 0.0)

"""Device functions that several Triton kernels use: GELU and its derivative, dropout.

The formulae are those of ``csrc/cpu/activation.h``. No libdevice: the normal law is
``exp(-x^2/2)`` times a polynomial in ``1 / (1 + 0.3 |x|)``, which unlike ``1 + erf(x)`` does not
cancel in the tail, and ``(1 + tanh u) / 2`` is ``sigmoid(2 u)``. As in torch an activation of inf
is inf, and what multiplies an infinity by a factor that vanishes is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops._core import philox

PHILOX_ROUNDS = tl.constexpr(philox.ROUNDS)


@triton.jit
def clamp(x, low, high):
    """Bound ``x``; NaN stays NaN."""
    x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def normal_law(x):
    """Return the distribution function of the normal law and its density, for |x| <= 14.5."""
    t = 1.0 / (1.0 + 0.3 * tl.abs(x))
    p = -0.020623552 * t + 0.11243606
    p = p * t - 0.22821465
    p = p * t + 0.19178593
    p = p * t - 0.079424635
    p = p * t + 0.09615744
    p = p * t + 0.07838944
    p = p * t + 0.11023547
    p = p * t + 0.11957181
    p = p * t + 0.11968669
    e = tl.exp(-0.5 * x * x)
    tail = e * (t * p)
    return tl.where(x < 0.0, tail, 1.0 - tail), e * 0.3989422804014327


@triton.jit
def sigmoid(z):
    """Return the logistic function and its derivative, without overflow or cancellation."""
    t = tl.exp(-tl.abs(z))
    large = 1.0 / (1.0 + t)
    small = t * large
    return tl.where(z < 0.0, small, large), small * large


@triton.jit
def gelu_value(x, APPROXIMATE: tl.constexpr):
    """Return GELU of float32 ``x``; ``APPROXIMATE`` is ``"none"``, ``"tanh"`` or ``"fast"``."""
    if APPROXIMATE == "none":
        below, _ = normal_law(clamp(x, -14.5, 14.5))
        return x * below
    elif APPROXIMATE == "tanh":
        # sqrt(8 / pi) * (x + 0.044715 x^3); x^2 is bounded so that it stays finite.
        z = x * (1.5957691216057308 + 0.07135481282052166 * tl.minimum(x * x, 1e8))
        value, _ = sigmoid(z)
        return x * value
    else:
        value, _ = sigmoid(1.702 * x)
        return x * value


@triton.jit
def gelu_slope(x, APPROXIMATE: tl.constexpr):
    """Return the derivative of GELU at float32 ``x``."""
    if APPROXIMATE == "none":
        below, density = normal_law(clamp(x, -14.5, 14.5))
        return below + x * density
    elif APPROXIMATE == "tanh":
        # The square overflows before x does; 0 * x is NaN at infinities.
        bounded = clamp(x, -1e3, 1e3)
        square = bounded * bounded
        z = bounded * (1.5957691216057308 + 0.07135481282052166 * square)
        dz = 1.5957691216057308 + 3.0 * 0.07135481282052166 * square
        value, slope = sigmoid(z)
        return value + bounded * dz * slope + 0.0 * x
    else:
        value, slope = sigmoid(1.702 * x)
        return value + x * (1.702 * slope)


@triton.jit
def act_value(x, ACTIVATION: tl.constexpr):
    """Return the activation of float32 ``x``; names are those of ``_core/activation.py``."""
    if ACTIVATION == "identity":
        return x
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive
    elif ACTIVATION == "silu":
        # An exponential that overflows leaves the 0 that is meant; a select would cost registers.
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return gelu_value(x, "none")
    elif ACTIVATION == "gelu_tanh":
        return gelu_value(x, "tanh")
    else:
        return gelu_value(x, "fast")


@triton.jit
def act_slope(x, ACTIVATION: tl.constexpr):
    """Return the derivative at float32 ``x``, of relu where it passes ``x`` on: see with_slope."""
    if ACTIVATION == "identity" or ACTIVATION == "relu":
        return tl.full(x.shape, 1.0, tl.float32)
    elif ACTIVATION == "relu2":
        return 2.0 * x
    elif ACTIVATION == "silu":
        value, slope = sigmoid(x)
        return value + x * slope
    elif ACTIVATION == "gelu":
        return gelu_slope(x, "none")
    elif ACTIVATION == "gelu_tanh":
        return gelu_slope(x, "tanh")
    else:
        return gelu_slope(x, "fast")


@triton.jit
def with_slope(grad, slope, x, ACTIVATION: tl.constexpr):
    """Return ``grad * slope``; as in torch, nothing passes what relu stopped, NaN neither."""
    if ACTIVATION == "relu" or ACTIVATION == "relu2":
        return tl.where(x <= 0.0, 0.0, grad * slope)
    else:
        return grad * slope


@triton.jit
def kept(start, seed_ptr, limit, BLOCK_N: tl.constexpr, DROPOUT: tl.constexpr):
    """Return which elements of rows dropout keeps; ``_core/philox.py`` is the specification.

    ``start`` is the linear index (int64) of the first column: a scalar for a block ``[N]``,
    ``[M, 1]`` for ``[M, N]``. Modes are those of ``_launch.dropout_arguments`` that draw numbers:
    ``"draw"`` gives a counter's four words to four neighbours and needs starts that four divides;
    ``"select"`` draws a counter per element.
    """
    seed = tl.load(seed_ptr)
    offset = tl.load(seed_ptr + 1)
    offset_low = (offset & 0xFFFFFFFF).to(tl.uint32)
    offset_high = ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    bound = limit.to(tl.uint32, bitcast=True)
    if DROPOUT == "draw":
        counter = (start >> 2) + tl.arange(0, BLOCK_N // 4)
        low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(seed, low, high, offset_low, offset_high, PHILOX_ROUNDS)
        even = tl.interleave(w0 > bound, w2 > bound)
        odd = tl.interleave(w1 > bound, w3 > bound)
        return tl.interleave(even, odd)
    else:
        index = start + tl.arange(0, BLOCK_N)
        counter = index >> 2
        low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(seed, low, high, offset_low, offset_high, PHILOX_ROUNDS)
        word = index & 3
        drawn = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
        return drawn > bound


@triton.jit
def dropout(x, start, seed_ptr, limit, scale, DROPOUT: tl.constexpr):
    """Return dropout of rows ``x``; arguments as ``kept``, and the modes that draw nothing."""
    if DROPOUT == "none":
        return x
    elif DROPOUT == "all":
        return tl.zeros(x.shape, tl.float32)
    else:
        keep = kept(start, seed_ptr, limit, x.shape[-1], DROPOUT)
        return tl.where(keep, x * scale, 0.0)

"""The activations themselves: values and slopes of float32 tiles. One branch here is one activation
everywhere.

Comparisons are written so that NaN passes through, as in torch.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """By exp; where x is small that would cancel, and the series is exact to the last bit."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = 1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835))))
    return tl.where(tl.abs(x) < 0.25, x * near, tl.where(x < 0.0, -far, far))


@triton.jit
def act_slope(x, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """(f(x), f'(x)). Without a use of the second the compiler drops its work."""
    if ACT == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
        dy = tl.where(x <= 0.0, 0.0, 1.0)
    elif ACT == "srelu":
        r = tl.where(x <= 0.0, 0.0, x)
        y = r * r
        dy = 2.0 * r
    elif ACT == "sigmoid":
        y = tl.sigmoid(x)
        dy = y * (1.0 - y)
    elif ACT == "silu":
        s = tl.sigmoid(x)
        y = x * s
        dy = s + y * (1.0 - s)
    elif ACT == "qgelu":
        s = tl.sigmoid(1.702 * x)
        y = x * s
        dy = s + 1.702 * y * (1.0 - s)
    elif ACT == "situ":
        t = tanh(x * (1.0 / ALPHA))
        s = tl.sigmoid(x)
        y = ALPHA * t * s
        dy = (1.0 - t * t) * s + y * (1.0 - s)
    elif ACT == "gelu_tanh":  # 0.5 (1 + tanh(z)) = sigmoid(2 z)
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = x * s
        dy = s + y * (1.0 - s) * (1.5957691216057308 + 0.2140644488178074 * x * x)
    elif ACT == "gelu":
        c = 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
        y = x * c
        dy = c + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        tl.static_assert(ACT == "clamped_silu", "unknown activation")
        g = tl.where(x > LIMIT, LIMIT, x)
        s = tl.sigmoid(ALPHA * g)
        y = g * s
        dy = tl.where(x > LIMIT, 0.0, s + ALPHA * y * (1.0 - s))
    return y, dy


@triton.jit
def linear_slope(u, ACT: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """(l(u), l'(u)) for the half that is not the gate: itself, clamped and shifted, or bounded by tanh."""
    if ACT == "clamped_silu":
        y = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u)) + OFFSET
        du = tl.where((u > LIMIT) | (u < -LIMIT), 0.0, 1.0)
    elif ACT == "situ":
        t = tanh(u * (1.0 / LIMIT))
        y = LIMIT * t
        du = 1.0 - t * t
    else:
        y = u
        du = tl.full(u.shape, 1.0, tl.float32)
    return y, du


@triton.jit
def gate_columns(cols, INTERLEAVE: tl.constexpr):
    """Where the gate of output column j stands: j, or in blocks of INTERLEAVE columns."""
    if INTERLEAVE == 0:
        return cols
    else:
        return cols // INTERLEAVE * (2 * INTERLEAVE) + cols % INTERLEAVE


@triton.jit
def act_grad(
    x_row, cols, dy, mask, N,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """(y, dgate, dlinear) of a tile, dy already float32; dlinear is dgate where there is no gate.

    x_row are row pointers (B, 1), cols the output columns (1, B).
    """
    gate = gate_columns(cols, INTERLEAVE)
    x = tl.load(x_row + gate, mask=mask, other=0.0).to(tl.float32)
    f, df = act_slope(x, ACT, ALPHA, LIMIT)
    if GATED:
        step = INTERLEAVE if INTERLEAVE else N
        u = tl.load(x_row + gate + step, mask=mask, other=0.0).to(tl.float32)
        lin, dlin = linear_slope(u, ACT, LIMIT, OFFSET)
        return f * lin, dy * df * lin, dy * f * dlin
    else:
        return f, dy * df, dy * df

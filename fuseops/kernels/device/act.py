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
        dy = s + y * (1.702 * (1.0 - s))  # 1.702 y alone may be inf
    elif ACT == "situ":
        t = tanh(x * (1.0 / ALPHA))
        s = tl.sigmoid(x)
        y = ALPHA * t * s
        dy = (1.0 - t * t) * s + y * (1.0 - s)
    elif ACT == "gelu_tanh":  # 0.5 (1 + tanh(z)) = sigmoid(2 z)
        square = tl.minimum(
            x * x, 1024.0
        )  # s is 0 or 1 from there on, and inf times 0 would be NaN
        s = tl.sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * square))
        y = x * s
        dy = s + y * (1.0 - s) * (1.5957691216057308 + 0.2140644488178008 * square)
    elif ACT == "gelu":
        c = 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
        y = x * c
        dy = c + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        tl.static_assert(ACT == "clamped_silu", "unknown activation")
        g = tl.where(x > LIMIT, LIMIT, x)
        s = tl.sigmoid(ALPHA * g)
        y = g * s
        dy = tl.where(x > LIMIT, 0.0, s + ALPHA * (g * (s * (1.0 - s))))  # as of qgelu
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
def pairs(first, N, BLOCK_N: tl.constexpr):
    """(1, 2 BLOCK_N) columns that hold the gate and what it gates of output column j at 2 j and 2 j + 1, and which
    there are: whole lines of memory, where every other column would be loaded by itself.
    """
    cols = 2 * first + tl.arange(0, 2 * BLOCK_N)[None, :]
    return cols, cols < 2 * N


@triton.jit
def load_sides(
    x_row, inside, first, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr
):
    """(gate, what it gates) of BLOCK_N output columns from `first` on, float32; twice x where there is no gate.

    x_row are row pointers (B, 1), inside which of them there are.
    """
    if INTERLEAVE == 1:
        cols, there = pairs(first, N, BLOCK_N)
        x = tl.load(x_row + cols, mask=inside & there, other=0.0)
        gate, up = x.reshape(x.shape[0], BLOCK_N, 2).split()
        return gate.to(tl.float32), up.to(tl.float32)
    else:
        cols = first + tl.arange(0, BLOCK_N)[None, :]
        at, mask = x_row + gate_columns(cols, INTERLEAVE), inside & (cols < N)
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(at + (INTERLEAVE if INTERLEAVE else N), mask=mask, other=0.0)
            return gate, up.to(tl.float32)
        else:
            return gate, gate


@triton.jit
def store_sides(x_row, inside, first, N, gate, up, GATED: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Write the two where `load_sides` reads them, in the dtype of x."""
    dtype: tl.constexpr = x_row.dtype.element_ty
    BLOCK_N: tl.constexpr = gate.shape[1]
    if INTERLEAVE == 1:
        cols, there = pairs(first, N, BLOCK_N)
        x = tl.join(gate.to(dtype), up.to(dtype)).reshape(gate.shape[0], 2 * BLOCK_N)
        tl.store(x_row + cols, x, mask=inside & there)
    else:
        cols = first + tl.arange(0, BLOCK_N)[None, :]
        at, mask = x_row + gate_columns(cols, INTERLEAVE), inside & (cols < N)
        tl.store(at, gate.to(dtype), mask=mask)
        if GATED:
            tl.store(at + (INTERLEAVE if INTERLEAVE else N), up.to(dtype), mask=mask)


@triton.jit
def act_value(
    gate, up, ACT: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """y of a tile."""
    y, _ = act_slope(gate, ACT, ALPHA, LIMIT)
    if GATED:
        linear, _ = linear_slope(up, ACT, LIMIT, OFFSET)
        y *= linear
    return y


@triton.jit
def act_grad(
    gate, up, dy, ACT: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """(y, dgate, dup) of a float32 tile; dup is dgate where there is no gate."""
    f, df = act_slope(gate, ACT, ALPHA, LIMIT)
    if GATED:
        linear, slope = linear_slope(up, ACT, LIMIT, OFFSET)
        return f * linear, dy * df * linear, dy * f * slope
    else:
        return f, dy * df, dy * df

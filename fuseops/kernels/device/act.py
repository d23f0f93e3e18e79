"""The activations themselves, for Triton kernels: values and slopes of float32 tiles, and how gate and up lie in
memory. One branch here is one activation everywhere.

Comparisons are written so that NaN passes through, as in torch.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Compute tanh by exp; where |x| is small that would cancel, and the series is exact to the last bit."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = 1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835))))
    return tl.where(tl.abs(x) < 0.25, x * near, tl.where(x < 0.0, -far, far))


@triton.jit
def act_slope(x, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Compute an activation and its derivative, (f(x), f'(x)). Without a use of the second the compiler drops its
    work.
    """
    if ACT == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif ACT == "srelu":
        r = tl.where(x <= 0.0, 0.0, x)
        y = r * r
        slope = 2.0 * r
    elif ACT == "sigmoid":
        y = tl.sigmoid(x)
        slope = y * (1.0 - y)
    elif ACT == "silu":
        s = tl.sigmoid(x)
        y = x * s
        slope = s + y * (1.0 - s)
    elif ACT == "qgelu":
        s = tl.sigmoid(1.702 * x)
        y = x * s
        slope = s + y * (1.702 * (1.0 - s))  # 1.702 y alone may be inf
    elif ACT == "situ":
        t = tanh(x * (1.0 / ALPHA))
        s = tl.sigmoid(x)
        y = ALPHA * t * s
        slope = (1.0 - t * t) * s + y * (1.0 - s)
    elif ACT == "gelu_tanh":  # 0.5 (1 + tanh(z)) = sigmoid(2 z)
        # from x^2 = 1024 on s is 0 or 1, and inf times 0 would be NaN
        square = tl.minimum(x * x, 1024.0)
        s = tl.sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * square))
        y = x * s
        slope = s + y * (1.0 - s) * (1.5957691216057308 + 0.2140644488178008 * square)
    elif ACT == "gelu":
        cdf = 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
        y = x * cdf
        slope = cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        tl.static_assert(ACT == "clamped_silu", "unknown activation")
        clamped = tl.where(x > LIMIT, LIMIT, x)
        s = tl.sigmoid(ALPHA * clamped)
        y = clamped * s
        slope = tl.where(x > LIMIT, 0.0, s + ALPHA * (clamped * (s * (1.0 - s))))  # as of qgelu
    return y, slope


@triton.jit
def linear_slope(u, ACT: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """Compute the factor of the half that is not the gate, and its derivative, (l(u), l'(u)): itself, clamped and
    shifted, or bounded by tanh.
    """
    if ACT == "clamped_silu":
        y = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u)) + OFFSET
        slope = tl.where((u > LIMIT) | (u < -LIMIT), 0.0, 1.0)
    elif ACT == "situ":
        t = tanh(u * (1.0 / LIMIT))
        y = LIMIT * t
        slope = 1.0 - t * t
    else:
        y = u
        slope = tl.full(u.shape, 1.0, tl.float32)
    return y, slope


@triton.jit
def gate_columns(cols, INTERLEAVE: tl.constexpr):
    """Map output columns j to the columns of their gates in x: j, or in blocks of INTERLEAVE columns."""
    if INTERLEAVE == 0:
        return cols
    else:
        return cols // INTERLEAVE * (2 * INTERLEAVE) + cols % INTERLEAVE


@triton.jit
def interleaved_columns(col0, N, BLOCK_N: tl.constexpr):
    """Compute the columns (1, 2 BLOCK_N) that hold gate and up of output column j at 2 j and 2 j + 1, and their mask.

    Loads of these are whole lines of memory; every other column would be loaded by itself.
    """
    cols = 2 * col0 + tl.arange(0, 2 * BLOCK_N)[None, :]
    return cols, cols < 2 * N


@triton.jit
def load_gate_up(
    x_row, row_mask, col0, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr
):
    """Load (gate, up) of BLOCK_N output columns from `col0` on, float32; twice x where there is no gate.

    x_row are pointers to rows (B, 1), row_mask (B, 1) their mask.
    """
    if INTERLEAVE == 1:
        cols, col_mask = interleaved_columns(col0, N, BLOCK_N)
        x = tl.load(x_row + cols, mask=row_mask & col_mask, other=0.0)
        gate, up = x.reshape(x.shape[0], BLOCK_N, 2).split()
        return gate.to(tl.float32), up.to(tl.float32)
    else:
        cols = col0 + tl.arange(0, BLOCK_N)[None, :]
        ptrs, mask = x_row + gate_columns(cols, INTERLEAVE), row_mask & (cols < N)
        gate = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(ptrs + (INTERLEAVE if INTERLEAVE else N), mask=mask, other=0.0)
            return gate, up.to(tl.float32)
        else:
            return gate, gate


@triton.jit
def store_gate_up(
    x_row, row_mask, col0, N, gate, up, GATED: tl.constexpr, INTERLEAVE: tl.constexpr
):
    """Store gate and up where `load_gate_up` reads them, in the dtype of x."""
    dtype: tl.constexpr = x_row.dtype.element_ty
    BLOCK_N: tl.constexpr = gate.shape[1]
    if INTERLEAVE == 1:
        cols, col_mask = interleaved_columns(col0, N, BLOCK_N)
        x = tl.join(gate.to(dtype), up.to(dtype)).reshape(gate.shape[0], 2 * BLOCK_N)
        tl.store(x_row + cols, x, mask=row_mask & col_mask)
    else:
        cols = col0 + tl.arange(0, BLOCK_N)[None, :]
        ptrs, mask = x_row + gate_columns(cols, INTERLEAVE), row_mask & (cols < N)
        tl.store(ptrs, gate.to(dtype), mask=mask)
        if GATED:
            tl.store(ptrs + (INTERLEAVE if INTERLEAVE else N), up.to(dtype), mask=mask)


@triton.jit
def act_value(
    gate, up, ACT: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Compute y of a float32 tile: f(gate), times l(up) where GATED."""
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
    """Compute (y, dgate, dup) of a float32 tile; dup is dgate where there is no gate."""
    f, df = act_slope(gate, ACT, ALPHA, LIMIT)
    if GATED:
        linear, slope = linear_slope(up, ACT, LIMIT, OFFSET)
        return f * linear, dy * df * linear, dy * f * slope
    else:
        return f, dy * df, dy * df

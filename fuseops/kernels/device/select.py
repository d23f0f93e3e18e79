"""The largest of many int32, or all in order: networks over tuples of tensors, all of it minima and
maxima.

Numbers that a thread holds are sorted without a word to others; rows are spread over few threads.
"""

# Tuples grow in loops that Triton unrolls.
# mypy: disable-error-code="assignment, misc, var-annotated"

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-2147483648)
NONE: tl.constexpr = tl.constexpr(-2147483648 + 4096)
"""Of nothing that was left out: room for what callers subtract."""


@triton.jit
def merged(x, N: tl.constexpr):
    """A bitonic tuple of N tensors, in descending order at every place."""
    if N == 1:
        return x
    else:
        upper = ()
        lower = ()
        for i in tl.static_range(N // 2):
            upper = upper + (tl.maximum(x[i], x[i + N // 2]),)
            lower = lower + (tl.minimum(x[i], x[i + N // 2]),)
        return merged(upper, N // 2) + merged(lower, N // 2)


@triton.jit
def merged_pair(a, b, N: tl.constexpr):
    """Two tuples of N tensors in descending order as one (odd-even merge, Batcher 1968)."""
    if N == 1:
        return (tl.maximum(a[0], b[0]), tl.minimum(a[0], b[0]))
    else:
        even = merged_pair(a[::2], b[::2], N // 2)
        odd = merged_pair(a[1::2], b[1::2], N // 2)
        c = (even[0],)
        for i in tl.static_range(N - 1):
            c = c + (tl.maximum(odd[i], even[i + 1]), tl.minimum(odd[i], even[i + 1]))
        return c + (odd[N - 1],)


@triton.jit
def largest_of(x, N: tl.constexpr, L: tl.constexpr):
    """(the L largest, or all, of a tuple of N int32 tensors, in descending order at every place; the
    largest that is left out, NONE without one)
    """
    if N == 1:
        return x, tl.full(x[0].shape, NONE, dtype=tl.int32)
    else:
        a, left = largest_of(x[: N // 2], N // 2, L)
        b, other = largest_of(x[N // 2 :], N // 2, L)
        left = tl.maximum(left, other)
        if N <= L:
            return merged_pair(a, b, N // 2), left
        else:
            c = ()
            for i in tl.static_range(L):
                c = c + (tl.maximum(a[i], b[L - 1 - i]),)
                left = tl.maximum(left, tl.minimum(a[i], b[L - 1 - i]))
            return merged(c, L), left


@triton.jit
def largest_of_rows(x, left, L: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """The same of the rows of L sorted tensors (R, W) and of what they left out: L tensors (R,)."""
    y = ()
    if W == 1:
        for i in tl.static_range(L):
            y = y + (tl.reshape(x[i], (R,)),)
        return y, tl.reshape(left, (R,))
    else:
        odd = tl.arange(0, 2)[None, None, :] == 1  # every other list is turned round: bitonic pairs
        left = tl.max(tl.reshape(left, (R, W // 2, 2)), axis=2)
        for i in tl.static_range(L):
            there = tl.reshape(x[i], (R, W // 2, 2))
            back = tl.reshape(x[L - 1 - i], (R, W // 2, 2))
            pair = tl.where(odd, back, there)
            y = y + (tl.max(pair, axis=2),)
            left = tl.maximum(left, tl.min(pair, axis=2))
        return largest_of_rows(merged(y, L), left, L, R, W // 2)


@triton.jit
def quarters(x, R: tl.constexpr, W: tl.constexpr):
    """(R, 4 W) -> four tensors (R, W); every fourth number of a row belongs to one."""
    ac, bd = tl.split(tl.reshape(x, (R, W, 2, 2)))
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return (a, b, c, d)


@triton.jit
def rows_of(x, N: tl.constexpr, R: tl.constexpr):
    """(N, R) -> its N rows (R,), each spread over all threads."""
    if N == 1:
        return (tl.reshape(x, (R,)),)
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, (2, N // 2, R)), (1, 2, 0)))
        return rows_of(a, N // 2, R) + rows_of(b, N // 2, R)


@triton.jit
def largest_of_pieces(keys, N: tl.constexpr, R: tl.constexpr, W: tl.constexpr, L: tl.constexpr):
    """(the L largest of each row of N tensors (R, W), in descending order, each (R,); the largest that
    is left out): a selection network over the numbers of each thread, then over the W of a row.
    """
    own, left = largest_of(keys, N, L)
    top = ()
    for i in tl.static_range(L):
        if i < N:
            top = top + (own[i],)
        else:
            top = top + (tl.full((R, W), LOWEST, dtype=tl.int32),)
    return largest_of_rows(top, left, L, R, W)


@triton.jit
def numbered(key, number, LOW: tl.constexpr):
    """Keys whose lowest bits are a number, the lower number the larger: all keys of a row differ."""
    return (key & ~LOW) | (LOW - number)


@triton.jit
def numbered_pieces(
    pieces, firsts, LOW: tl.constexpr, P: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):
    """4 P tensors (R, W) of keys that have their experts in the place of the lowest bits, of P pieces
    (R, 4 W), quads of them of the experts from `firsts` on.
    """
    keys = ()
    for p in tl.static_range(P):
        each = quarters(pieces[p], R, W)
        for j in tl.static_range(4):
            keys = keys + (numbered(each[j], firsts[p] + j, LOW),)
    return keys


@triton.jit
def top_one_by_one(
    keys, cols, E,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """K times the largest key that is left, the lower expert first among equals."""
    left = tl.where(cols < E, keys, LOWEST)
    experts = tl.zeros((BLOCK_R, BLOCK_K), dtype=tl.int32)
    slots = tl.arange(0, BLOCK_K)[None, :]
    for k in range(K):
        top = tl.max(left, axis=1)[:, None]
        best = tl.min(tl.where(left == top, cols, BLOCK_E), axis=1)[:, None]
        experts = tl.where(slots == k, best, experts)
        left = tl.where(cols == best, LOWEST, left)
    return experts


@triton.jit
def exchanged(x, N: tl.constexpr, T: tl.constexpr, S: tl.constexpr):
    """N tensors (T,): of every two threads S apart the first gets the larger, the second the smaller."""
    first = tl.arange(0, 2)[None, :, None] == 0
    y = ()
    for i in tl.static_range(N):
        pair = tl.reshape(x[i], (T // (2 * S), 2, S))
        larger, smaller = tl.max(pair, axis=1)[:, None, :], tl.min(pair, axis=1)[:, None, :]
        y = y + (tl.reshape(tl.where(first, larger, smaller), (T,)),)
    return y


@triton.jit
def turned(x, N: tl.constexpr, mask):
    """Complements where the mask is -1: the other way round in order."""
    y = ()
    for i in tl.static_range(N):
        y = y + (x[i] ^ mask,)
    return y


@triton.jit
def sorted_by_threads(x, T: tl.constexpr):
    """int32 (8 T,) in ascending order, T threads of one warp with eight each: a bitonic sort
    (Batcher 1968), whose lists run down in every other thread because their complements run up.
    """
    thread = tl.arange(0, T)
    a, b, c, d = quarters(tl.reshape(~x, (2, 4 * T)), 2, T)
    a, e = tl.split(tl.trans(a))
    b, f = tl.split(tl.trans(b))
    c, g = tl.split(tl.trans(c))
    d, h = tl.split(tl.trans(d))
    turn = -(thread & 1)
    y, _ = largest_of(turned((a, b, c, d, e, f, g, h), 8, turn), 8, 8)
    for level in tl.static_range(1, 6):
        if 1 << level <= T:
            next_turn = -((thread >> level) & 1)
            y = turned(y, 8, turn ^ next_turn)
            turn = next_turn
            for m in tl.static_range(level):
                y = exchanged(y, 8, T, 1 << (level - 1 - m))
            y = merged(y, 8)
    even = tl.join(tl.join(y[0], y[4]), tl.join(y[2], y[6]))
    odd = tl.join(tl.join(y[1], y[5]), tl.join(y[3], y[7]))
    return ~tl.reshape(tl.join(even, odd), (8 * T,))

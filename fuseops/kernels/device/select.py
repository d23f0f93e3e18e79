"""The largest of many int32: selection networks over tuples of tensors, all of it minima and maxima.

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

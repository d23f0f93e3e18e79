"""Operands of FP8 GEMMs for tests: random codes, and scales that differ from block to block, so that one read from a
wrong place shows.
"""

import torch

BLOCK = 128
SCALINGS = {"rows": ("block", "row", "tensor"), "columns": ("square", "block", "tensor")}


def codes(g, *shape, dtype=torch.float8_e4m3fn):
    return torch.randn(shape, generator=g, device=g.device).mul_(64).clamp_(-448, 448).to(dtype)


def scales(g, *shape):
    """Powers of two from 2^-10 to 2^-4."""
    return torch.exp2(torch.randint(-10, -3, shape, generator=g, device=g.device).float())


def blocks(size):
    return -(-size // BLOCK)


def any_scale(g, scaling, lead, rows, k, groups):
    """The scale of codes (*lead, rows, k)."""
    shape = {
        "block": (blocks(k), rows), "square": (*lead, blocks(rows), blocks(k)), "row": (*lead, rows),
        "tensor": (groups,) if rows % 2 else (),
    }[scaling]  # fmt: skip
    return scales(g, *shape) * (1 if scaling in ("block", "square") else 1.3)


def of_mm(g, scaling, rows, n, k, groups, dtype=torch.float8_e4m3fn):
    """(x, x_scale, weight, weight_scale, scaling); groups 0: dense."""
    lead, of_weight = (groups,) * (groups > 0), "square" if scaling == "block" else scaling
    x, weight = codes(g, rows, k, dtype=dtype), codes(g, *lead, n, k)
    x_scale = any_scale(g, scaling, (), rows, k, max(groups, 1))
    return x, x_scale, weight, any_scale(g, of_weight, lead, n, k, max(groups, 1)), scaling


def of_wgrad(g, scaling, offs, rows, n, k, dtype=torch.float8_e4m3fn):
    """(dy, dy_scale, x, x_scale, scaling): columns of groups that end at offs (a CPU tensor), or of all rows."""
    if offs is None:
        columns, used = blocks(rows) * BLOCK, torch.arange(blocks(rows) * BLOCK) < rows
    else:
        groups = len(offs)
        columns = (rows // BLOCK + groups) * BLOCK
        used = torch.zeros(columns, dtype=torch.bool)
        for e, (start, end) in enumerate(zip([0, *offs.tolist()], offs.tolist(), strict=False)):
            begin = (start // BLOCK + e) * BLOCK
            used[begin : begin + end - start] = True
    made = []
    for size, kind in ((n, dtype), (k, torch.float8_e4m3fn)):
        data = codes(g, size, columns, dtype=kind)
        data.view(torch.uint8).masked_fill_(~used.to(g.device), 0)
        count = 1 if offs is None else len(offs)
        made += [data, any_scale(g, scaling, (), size, columns, count)]
    return *made, scaling


def assert_products(got, want):
    """Tensor cores keep about 14 bits of a sum of products of FP8 numbers."""
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, want.shape)
    got, want = got.float(), want.float()
    if not want.numel():
        return
    assert got.isfinite().all()
    largest = want.abs().amax()
    assert (got - want).norm() <= 4e-3 * want.norm(), ((got - want).norm() / want.norm()).item()
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=max(1e-3 * largest.item(), 1e-30))

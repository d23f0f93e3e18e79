"""An op of your own with Triton kernels, registered with torch under your own package's name, and tested.

Run it: python examples/custom_kernel.py (on a CPU the twins run, and with TRITON_INTERPRET=1 the kernels)
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import fuseops as fo
from fuseops.kernels import Space, kernel_op, launch

BLOCKS = Space("softcap", lambda dims, itemsize: [{"BLOCK": 1024, "num_warps": w} for w in (4, 8)])


@triton.jit(do_not_specialize=["n"])
def softcap_fwd_kernel(x, y, n, cap, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n).to(tl.float32)
    tl.store(y + i, (cap * (2 * tl.sigmoid(2 * v / cap) - 1)).to(y.dtype.element_ty), mask=i < n)


@triton.jit(do_not_specialize=["n"])
def softcap_bwd_kernel(x, dy, dx, n, cap, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    s = tl.sigmoid(2 * tl.load(x + i, mask=i < n).to(tl.float32) / cap)
    d = tl.load(dy + i, mask=i < n).to(tl.float32) * 4 * s * (1 - s)
    tl.store(dx + i, d.to(dx.dtype.element_ty), mask=i < n)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softcap_fwd_twin(x: Tensor, cap: float) -> Tensor:
    return (cap * torch.tanh(wide(x) / cap)).to(x.dtype)


def softcap_bwd_twin(x: Tensor, dy: Tensor, cap: float) -> Tensor:
    return (wide(dy) * (1 - torch.tanh(wide(x) / cap) ** 2)).to(x.dtype)


def launched(kernel: Any, cap: float, *inputs: Tensor) -> Tensor:
    out, n = torch.empty_like(inputs[0]).contiguous(), inputs[0].numel()
    config = BLOCKS.pick(n, (1,), out)  # `fuseops tune` times the candidates; a call never does
    grid = (triton.cdiv(n, config["BLOCK"]),)
    launch(kernel, grid, *(t.contiguous() for t in inputs), out, n, cap, **config)
    return out


@kernel_op(twin=softcap_fwd_twin)
def softcap_fwd(x: Tensor, cap: float) -> Tensor:
    return launched(softcap_fwd_kernel, cap, x)


@kernel_op(twin=softcap_bwd_twin)
def softcap_bwd(x: Tensor, dy: Tensor, cap: float) -> Tensor:
    return launched(softcap_bwd_kernel, cap, x, dy)


class SoftCapSaved(NamedTuple):
    x: Tensor | None


class SoftCap(fo.Op[SoftCapSaved]):
    """y = cap * tanh(x / cap), as Gemma caps its logits.   x (...,)"""

    saves_for = {"x": ("x",)}

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def fwd(self, x: Tensor) -> fo.Out:
        return fo.Out(softcap_fwd(x, self.cap), SoftCapSaved(x))

    def bwd(self, saved: SoftCapSaved, dy: Tensor) -> fo.Grads:
        assert saved.x is not None
        return fo.Grads(softcap_bwd(saved.x, dy, self.cap))


device = "cuda" if torch.cuda.is_available() else "cpu"
x = 20 * torch.randn(37, 11, device=device)
torch.testing.assert_close(softcap_fwd(x, 30.0), softcap_fwd_twin(x, 30.0))
torch.testing.assert_close(softcap_bwd(x, x, 30.0), softcap_bwd_twin(x, x, 30.0))
fo.testing.assert_bwd_is_vjp(SoftCap(30.0), x)
model = fo.Sequential(fo.ops.Linear(11, 8, device=device), SoftCap(30.0))
model(x).sum().backward()
torch.library.opcheck(softcap_fwd.op, (x, 30.0), test_utils=("test_schema", "test_faketensor"))
print(softcap_fwd, "is", softcap_fwd.op._schema)

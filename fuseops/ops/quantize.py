"""Quantize gives y in the format that the recipe has for inputs of GEMMs.   (..., K) -> (..., K)"""

from __future__ import annotations

from torch import Tensor

from fuseops.arguments import check_flags
from fuseops.recipes import Operand, Quantized, columns_follow, quantize

from .op import Call, Grads, NothingSaved, Op, Out


class Quantize(Op[NothingSaved]):
    """y is x as a `Quantized`, in the format that the recipe has for inputs of GEMMs.   (..., K) -> (..., K)

    A GEMM after it reads the codes; any other op gets the dequantized tensor. A Sequential that ends with it returns
    the `Quantized`, and a Tap after it publishes one. Gradients stay in high precision.
    forward: False returns x.
    backward: the gradient is rounded to the format that the recipe has for gradients, and dequantized.
    Without a recipe, and under torch.compile at the end of a Sequential, y is a tensor.
    Column codes are made too where they cannot be derived from rows: of one group, which grouped ops do not take
    (`fo.quantize(x, scaling, offs)` makes those of groups).
    """

    saves_for = {"x": ()}
    floats = True
    quantizes = True
    takes_quantized = True

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        check_flags("Quantize", forward=forward, backward=backward)
        self.in_forward, self.in_backward = forward, backward

    def extra_repr(self) -> str:
        return f"forward={self.in_forward}, backward={self.in_backward}"

    def fwd(self, x: Operand, *, call: Call) -> Out:
        roles = call.precision.roles
        scaling = None if roles is None else roles.input
        if not self.in_forward or scaling is None or isinstance(x, Quantized):
            return Out(x, NothingSaved())
        return Out(quantize(x, scaling, col=not columns_follow(scaling)), NothingSaved())

    def bwd(self, saved: NothingSaved, dy: Tensor, *, call: Call) -> Grads:
        roles = call.precision.roles
        scaling = None if roles is None else roles.grad_output
        if not self.in_backward or scaling is None:
            return Grads(dy)
        return Grads(quantize(dy, scaling, col=False).dequantize())

"""The choice whether GEMMs read routed rows from a copy or by index; `fuseops tune` tunes it as it does tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.kernels.configs import Switch
from fuseops.recipes import Operand

# By default from a weight's width on: a GEMM that gathers loses a share of its time, which grows with its width, and a
# copy costs the same for any. Measured on an H200 over the shapes of benchmarks/moe_layer.py. The rows of fc1 are
# copied once more for its weight gradient; those of fc2's gradients serve two GEMMs, the first of which ends in dSwiGLU
# where that is fused.
FC1 = Switch("routed_fc1", "COPY", lambda rows, dims: dims[0] >= 4096)
FC2_BWD = Switch("routed_fc2_bwd", "COPY", lambda rows, dims: dims[0] >= 4096)
FC2_DSWIGLU = Switch("routed_fc2_dswiglu", "COPY", lambda rows, dims: dims[0] > 512)


def copies_rows(x: Operand, index: Tensor | None, space: Switch, width: int) -> bool:
    """Whether this GEMM reads a copy. Never in traced code, where the number of rows is a symbol."""
    if index is None or torch.compiler.is_compiling():
        return False
    return space.enabled(index.shape[0], (width, x.shape[1]), x)  # type: ignore[arg-type]

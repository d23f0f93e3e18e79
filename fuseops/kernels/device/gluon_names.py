"""Names of Gluon that differ between Triton 3.6, 3.8 and 3.9: device code takes them from here.

load_tile       TMA load, global to shared memory; an mbarrier counts its bytes
store_tile      TMA store, shared to global memory
add_tile        TMA reduction: add a tile of shared memory to global memory
load_rows       cp.async, global to shared memory, by a tensor of pointers
thread_barrier  barrier of the warps of a program, or of its partition (bar.sync)
reinterpret     view of shared memory with another shape, dtype or layout
"""

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import shared_memory_descriptor
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(shared_memory_descriptor, "reinterpret"):  # since 3.9
    reinterpret = shared_memory_descriptor.reinterpret
else:
    reinterpret = shared_memory_descriptor._reinterpret

if hasattr(tma, "async_load"):  # since 3.8
    load_tile, store_tile = tma.async_load, tma.async_store
    add_tile, load_rows = tma.async_atomic_add, async_copy.async_load
    thread_barrier = gl.barrier
else:
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    load_rows = async_copy.async_copy_global_to_shared
    thread_barrier = gl.thread_barrier

    @builtin
    def add_tile(descriptor, coord, src, _semantic=None):
        """Add a tile of shared memory to global memory by a TMA reduction, which the L2 cache performs."""
        coords = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coords, src.handle)

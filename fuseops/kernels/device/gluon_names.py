"""Names of Gluon that differ between Triton 3.6 and 3.9: device code takes them from here."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):  # since 3.9
    load_tile, store_tile = tma.async_load, tma.async_store
    load_rows = async_copy.async_load
    reinterpret = shared_memory_descriptor.reinterpret
    thread_barrier = gl.barrier
else:
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    load_rows = async_copy.async_copy_global_to_shared
    reinterpret = shared_memory_descriptor._reinterpret
    thread_barrier = gl.thread_barrier

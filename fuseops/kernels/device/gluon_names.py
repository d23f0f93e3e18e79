"""Names of Gluon that differ between Triton 3.6 and 3.9: device code takes them from here."""

from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):  # since 3.9
    load_tile, store_tile = tma.async_load, tma.async_store
else:
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

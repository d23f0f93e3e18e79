"""The code that runs on the GPU: Triton, and Gluon where Hopper's wgmma, TMA and warp specialization are told by hand.

Launchers are in `fuseops.kernels`; `launch.device("norm")` imports a module of this folder, and with it Triton, at its
first launch. Names of kernels end in `_kernel`; all else is a device function, which is inlined. Triton modules run
from sm_80 on unless this list says more; Gluon modules are of sm_90 alone.

    norms, activations  norm, activation, rope, dropout, bias
    router              router, router_bwd, router_losses, routing (counts, scan and places of copies)
    rows of tokens      permute (scatter, gather, combine), peers (the same between GPUs, over peer memory)
    losses, dense       cross_entropy, add_mm
    quantization        quantize (vectors along rows), quantize_columns (transposed), operands, norm_operand, fp8_swiglu
                        (rows and columns at once), amax (a scale a group or matrix), micro (MXFP8, NVFP4): all
                        sm_89
    grouped GEMMs       grouped_mm, grouped_few (weight gradients of few rows)
    block-scaled GEMM   micro_gemm: sm_100

    Gluon, sm_90
    grouped GEMMs       grouped_pingpong (forward, dgrad), grouped_wgrad_pingpong; producers and rings: grouped_rings;
                        epilogues: grouped_swiglu, grouped_dswiglu
    FP8 GEMMs           fp8_gemm; producer and rings: fp8_rings; epilogue: fp8_stores
    FP8 activations     fp8_dswiglu (SwiGLU and its backward as FP8 operands); transposition: fp8_turned

    Shared helpers
    reduce              PDL (`pdl_trigger`, `pdl_wait`), sums whose bits are the same in every lane and run, column sums
    act                 values and slopes of activations, gate and up columns
    select              selection and sorting networks
    groups              rows of groups, and groups in blocks of rows
    quantize            amax, inverse scales, saturating conversion
    quantize_columns    transposed stores
    gluon_gemm          descriptors, tile order, parts of accumulators: what GEMMs in Gluon share
    sums                TMA stores and reductions of float32 weight gradients
    gluon_names         Gluon's functions under one name for all supported Tritons

The ahead-of-time table (`fuseops.kernels.source`) knows a kernel by its code without comments, docstrings and names of
what is local, so a rename makes no row stale; an edit that moves a statement does.
"""

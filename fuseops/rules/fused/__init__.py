"""The fused ops of the built-in rules, one file each; `builtin_rules.py` says when they run.

of a GEMM and its neighbours   add_norm, bias_act, linear_act, linear_add, norm_linear
of whole MLPs                  mlp (dense), grouped_mlp, routed_mlp (tokens in, tokens out)
of elementwise ops             pointwise
what they share                front (what comes before the first GEMM), activated (back through the activation),
                               gemm_bwd (a GEMM's backward in two halves)
which kernels, which order     dswiglu, routed_copies; under a recipe coded_swiglu, quantized_order
"""

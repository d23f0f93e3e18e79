"""The fused ops of the built-in rules, one file each; `builtin_rules.py` says when they run.

of a GEMM and its neighbours   add_norm, bias_act, linear_act, linear_add, norm_linear
of whole MLPs                  mlp (dense), grouped_mlp, routed_mlp (tokens in, tokens out)
of elementwise ops             pointwise
shared by them                 norm_prologue (the ops before the first GEMM), act_backward, gemm_bwd (a GEMM's backward
                               in two halves)
choice of kernels and order    dswiglu, routed_copies; under a recipe quantized_swiglu, wgrad_order
"""

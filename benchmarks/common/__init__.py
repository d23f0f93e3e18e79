"""What several scripts share.

measure             timing in turn, ratios round by round with their interval, what a figure belongs to
runs                what a script is asked, and the cells of its file
layers              of layers: steps, graphs, memory, time by kernel
grouped_problems,   products of expert MLPs in bf16 and in FP8: operands, candidates, whether ours is right
fp8_problems
memory_cases        memory-bound kernels, their arguments and peers; floors, what no kernel can be faster than
offload_stacks      stacks of blocks whose saved tensors move; offload_ranks, ranks that train with offload and without
"""

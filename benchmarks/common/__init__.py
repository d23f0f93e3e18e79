"""What several scripts share.

measure             timing in turn, ratios round by round with their interval, what a figure belongs to
layers              scripts that measure cells: steps, graphs, memory, time by kernel, the command line
grouped_problems,   products of expert MLPs in bf16 and in FP8: operands, candidates, whether ours is right
fp8_problems
memory_cases        memory-bound kernels, their arguments and peers; floors, what no kernel can be faster than
offload_stacks      stacks of blocks whose saved tensors move
"""

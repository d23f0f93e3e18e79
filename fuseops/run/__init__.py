"""A call, from the side inputs of the caller to the one autograd Function.

a sequence     composed (its children), splice (what is inside them), runner (its pieces)
               sides (what callers pass), config (`configure` and scopes)
a run of ops   run (finds the plan of a call), entries (those it keeps), modes (of ops by themselves), gate
               (where a recipe pays)
compiled code  compiled (a call as dynamo traces it), closed (without guards on names), told (of the planner), traced
               (how it knows objects)
its execution  bridge (the autograd Function), steps (what it runs, written out), repeats (of calls alike), saving, pure
               (level-1 ops), draws (their random numbers), ranges (of a profile)
gradients      weight_grads (main_grad, backward_dw), data_parallel (their ranks), buffers (of the caller),
               second_order (refused)
errors         first (whether ops keep the contract, at the first call), unfused (what members of a fused op give),
               checks, debug (of values on the device)
"""

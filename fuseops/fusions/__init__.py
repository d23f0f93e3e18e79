"""Rules, plans, the planner, Sequential and its one autograd Function.

rules          rule (what one is, and how it matches), builtin_rules, conditions, fused/ (a file an op)
a sequence     sequential, runner (its pieces), sides (what callers pass), config (`configure` and scopes)
its plan       run (finds that of a call), key (by what), facts, cover (which rules fire), build
what it says   plan (the records), explain/ (as text, HTML or JSON)
running it     segment (its steps), bridge (the autograd Function), saving, pure (level-1 ops), traced (compiled code)
gradients      weight_grads (main_grad, backward_dw), buffers (of the caller), second_order (refused)
errors         first (whether ops keep the contract, at the first call), checks, debug (of values on the device)
trial runs     fakes, untouched (the model afterwards)
"""

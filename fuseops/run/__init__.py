"""The execution of a call, from the caller's side inputs to the one autograd Function.

a sequence     composed (its children), splice (nested Sequentials), runner (runs of ops and plain modules in order),
               sides (arguments of the caller), config (`configure` and scopes)
a run of ops   run (executes the plan of a call), plan_lookup (finds it, or builds it), plan_cache, modes (how an op
               runs outside of a span), gate (whether a recipe pays)
compiled code  compiled (a call as dynamo traces it), guard_free (no guards on names), trace_queries (answers of the
               planner)
execution      bridge (the autograd Function), steps (generates the code of a segment), repeats (replays transcripts of
               calls), saving (saved tensors), pure (level-1 ops), outside (what else a backward reads), generators
               (random state), ranges (for the profiler)
gradients      weight_grads (main_grad, backward_dw), data_parallel (reduces delayed gradients), buffers (of the
               caller), second_order (refuses second derivatives)
errors         contract (checks of ops at their first call), unfused (expected results of fused ops), checks (messages),
               debug (checks of values on the device)
"""

"""Rules, plans, the planner, Sequential and its autograd bridge; one file a fused op."""

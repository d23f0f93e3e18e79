"""Which saved tensors leave, decided beforehand: profile of a step, hardware, planner, and what the plan will cost."""

"""Which saved tensors leave, decided beforehand: profile of a step, hardware, planner, and what the plan will cost.

a step       step (recorded or run dry), record, fused (ops of a dry run), recompute; profile is what they give
a machine    hardware, measure, roofline (times of ops for dry runs)
a choice     planner, cost_model (what it asks), timetable (when what would move)
its cost     simulate (the schedule on a simulated clock), turns and pipeline (a step of each rank)
the plan     plan, decided (its data), text, html, trace; together (of ranks that share a host)
"""

"""Plans of which saved tensors are offloaded: the profile of a step, hardware, planner, and the predicted cost.

a step       step (recorded or run dry), record, fused (ops of a dry run), recompute; profile (their result)
a machine    hardware, measure, roofline (times of ops for dry runs)
a choice     planner, cost_model (its predictions), timetable (when each tensor would move)
its cost     simulate (the schedule on a simulated clock), turns and pipeline (a step of each rank)
the plan     plan, plan_data (its data), text, html, trace; together (of ranks that share a host)
"""

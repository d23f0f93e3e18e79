"""What runs: the plan of a run of ops, pure data and pure functions. Nothing here holds a tensor's values.

chain     the ops that one plan covers
key       by what a plan is found again; facts (what a plan depends on)
cover     which rules fire, and why the others do not
build     spans, segments and their steps; segment (those records)
records   what a plan says of itself: spans, misses, saved tensors
"""

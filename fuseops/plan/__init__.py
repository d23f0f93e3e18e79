"""The plan of a run of ops: pure data and pure functions. Nothing here holds a tensor's values.

chain     the ops that one plan covers
key       the cache key of a plan, and its guard; facts (inputs of a plan)
cover     the rules that fire, and the reasons why others do not
build     spans, segments and their steps; segment (their records)
records   the public records of a plan: spans, misses, saved tensors
"""

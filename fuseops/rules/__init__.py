"""Fusion rules, each one line of data, and the fused ops that they build.

rule            the `Rule` record and the matching of its pattern
builtin_rules   the tables of rules; conditions (their limits), fused/ (one file a fused op)
"""

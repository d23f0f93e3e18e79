"""What may fuse: rules, each one line of data, and the fused ops that they build.

rule            what a rule is, and how its pattern matches
builtin_rules   the tables; conditions (what their limits are), fused/ (one file a fused op)
"""

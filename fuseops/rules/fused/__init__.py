"""The fused ops of the built-in rules, one file each; `builtin_rules.py` says when they run."""

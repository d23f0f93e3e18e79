"""The fused ops of the built-in rules, one file each; `tables.py` says when they run."""

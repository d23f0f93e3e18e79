"""The main job, `python -m fuseops demo`: a small mixture of experts is trained and checked.

job     all of it: data (the text), model, train, checks (fused, unfused and offloaded are equal)
outcome what it found; report the page of that
"""

DEFAULT_STEPS = 300  # what the bar on the held-out loss is set for

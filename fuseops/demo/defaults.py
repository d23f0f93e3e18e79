"""What the command line must know of the demo before it imports any of it."""

DEFAULT_STEPS = 300  # what the bar on the held-out loss is set for

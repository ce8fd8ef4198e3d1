"""Saving and resuming a whole RLHF run: every model, the data, the random states, in one commit."""

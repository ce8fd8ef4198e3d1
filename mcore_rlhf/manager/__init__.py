"""Saving and resuming a whole RLHF run: every model, the data, the RNG states, in one commit."""

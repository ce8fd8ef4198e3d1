"""``mcore-rlhf resume-check``: run a trainer with and without a kill, and compare everything that it left, bit for bit."""

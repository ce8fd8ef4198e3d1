"""Scripts with the flags of other people's converters; each is a command of its own, such as ``mcore-rlhf-to-hf``."""

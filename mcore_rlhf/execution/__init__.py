"""Carrying a conversion out: in one process, by many, or on from where another one was killed; the bytes are the same."""

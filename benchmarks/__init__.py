"""Benchmarks: the bars of the project, measured by ``python -m benchmarks``, and kept in RESULTS.md."""

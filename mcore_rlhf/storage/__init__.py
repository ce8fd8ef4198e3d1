"""Bytes: torch's zip files, read without running anything and written as a stream; manifests; publishing a
folder.

Imports ``core`` and ``errors`` only, and torch only inside functions, so that importing this package is
quick.
"""

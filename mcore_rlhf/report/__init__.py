"""Pages to look at: one HTML file that needs no network, for a checkpoint, a conversion, a comparison or a run.

What stands on a page is plain data, made by functions of this room and by those that print ``--json``, and embedded in it.
"""

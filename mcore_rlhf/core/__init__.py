"""The one idea, as pure values: boxes, names, the catalogue, the plan, and how a plan is carried out.

Nothing here opens a file, knows a format or imports torch.
"""

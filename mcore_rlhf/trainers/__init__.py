"""How other trainers lay out their runs: a table each, which says how steps are called, where roles, counters, data and trackers lie.

``table`` has the type, whose relations are read both ways: a step's folder and its number, a role and its place. One small file for each
trainer; a new one is a file, and a line in ``known``. No tensor is opened here, and no pickle.
"""

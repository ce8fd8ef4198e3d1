"""What each trainer's loader restores, ignores, starts anew and refuses: one small file of rows for each, and ``known`` has them all.

The rows are of one release each, which the file names; what a row says was seen in a run of that loader where ``ran`` says so, and read in
its code otherwise.
"""

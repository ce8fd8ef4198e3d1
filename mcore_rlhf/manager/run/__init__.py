"""What runs when a step is saved or loaded: the manager, its commit, the steps of a root, when to save and what to keep."""

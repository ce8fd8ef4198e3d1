"""Drop-ins for other people's training scripts, so that they save and resume through the manager."""

"""Live trainers as sources and targets of checkpoints: one file per framework."""

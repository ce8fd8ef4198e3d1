"""What runs of FSDP keep, in whatever files: param groups of torch's optimizers, schedulers, random states, tied weights."""

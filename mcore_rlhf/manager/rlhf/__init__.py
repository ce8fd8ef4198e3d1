"""What training needs to go on besides models: the RLHF state and the data sampler."""

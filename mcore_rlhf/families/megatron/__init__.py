"""What both of Megatron's formats share: arguments, param groups, buffers, random states, and the layout of a new run."""

"""What a source is besides its tensors, and how one family of names becomes another: Megatron's, and a torch module's own."""

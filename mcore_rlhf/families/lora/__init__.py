"""LoRA adapters: what their tensors are called, what describes them, the model they belong to, and how they are added to it."""

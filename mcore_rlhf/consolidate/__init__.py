"""One fp32 state dict out of a training checkpoint: in memory, as ``.bin`` shards or as safetensors shards.

Names are the checkpoint's own. Trained parameters come from their fp32 masters, frozen ones and buffers from what the model
computes with; integer buffers keep their type. No optimizer state is read.
"""

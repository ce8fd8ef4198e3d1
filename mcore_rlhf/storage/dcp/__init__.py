"""Folders of torch.distributed.checkpoint (DCP): ``.metadata`` and ``.distcp`` files, without torch.distributed.

``metadata`` reads the one, ``folder`` opens both (``items``, ``checks``), ``writer`` makes them, ``rankfile`` reads what ranks saved by
themselves. Nothing is imported here: who only asks what a folder is needs none of them.

Format: torch 2.13.0, ``torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py``; looked at in genuine folders
of FSDP, FSDP2 and Megatron-core 0.16.1 (``torch_dist``).
"""

METADATA_FILE = ".metadata"

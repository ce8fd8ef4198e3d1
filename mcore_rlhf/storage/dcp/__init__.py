"""Folders of torch.distributed.checkpoint (DCP): ``.metadata`` and ``.distcp`` files, without torch.distributed.

Format: torch 2.13.0, ``torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py``; looked at in genuine folders
of FSDP, FSDP2 and Megatron-core 0.16.1 (``torch_dist``).
"""

from __future__ import annotations

from .checks import item_key as item_key
from .folder import DcpFile as DcpFile
from .folder import DcpFolder as DcpFolder
from .folder import DcpObject as DcpObject
from .folder import DcpTensor as DcpTensor
from .folder import load_tensor as load_tensor
from .folder import unwrap as unwrap
from .metadata import FILE as METADATA_FILE
from .metadata import Path_ as Path_
from .rankfile import Local as Local
from .rankfile import RankFile as RankFile
from .rankfile import read_rank_file as read_rank_file
from .writer import Distcp as Distcp
from .writer import Item as Item
from .writer import ObjectItem as ObjectItem
from .writer import TensorItem as TensorItem
from .writer import dcp_metadata as dcp_metadata
from .writer import records as records
from .writer import saved as saved

__all__ = [
    "METADATA_FILE",
    "DcpFile",
    "DcpFolder",
    "DcpObject",
    "DcpTensor",
    "Distcp",
    "Item",
    "Local",
    "ObjectItem",
    "Path_",
    "RankFile",
    "TensorItem",
    "dcp_metadata",
    "item_key",
    "load_tensor",
    "read_rank_file",
    "records",
    "saved",
    "unwrap",
]  # fmt: skip

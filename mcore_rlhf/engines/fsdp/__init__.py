"""A live FSDP trainer, FSDP2 (``fully_shard``) or FSDP1: its parts as torch's DCP files, and any such checkpoint into it."""

from .engine import FsdpEngine

__all__ = ["FsdpEngine"]

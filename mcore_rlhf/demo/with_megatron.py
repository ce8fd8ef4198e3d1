"""Importing this imports megatron-core, with the stand-ins where there is no GPU. It goes before ``megatron``."""

from mcore_rlhf.demo.cpu_megatron import import_megatron

import_megatron()

"""Which folders are ``torch_dist`` checkpoints.

Source: megatron-core 0.16.1, ``dist_checkpointing/core.py`` (``CheckpointingConfig``, ``maybe_load_config``) and
``dist_checkpointing/strategies/common.py`` (``COMMON_STATE_FNAME``).
"""

from __future__ import annotations

import json
from pathlib import Path

from mcore_rlhf.errors import Incomplete, Unsupported
from mcore_rlhf.families.megatron.folders import Located, locate
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.dcp import METADATA_FILE

CONFIG = "metadata.json"
COMMON = "common.pt"
BACKEND = "torch_dist"
CONFIG_TEXT = json.dumps(
    {"sharded_backend": BACKEND, "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
)
"""The content of ``metadata.json``."""


INNER = "dist_ckpt"
"""Where verl has it in a role's folder, beside ``huggingface/``.

Source: verl ``verl/utils/checkpoint/megatron_checkpoint_manager.py`` and ``verl/utils/megatron_utils.py``
(``get_dist_checkpoint_path``) at b178a3c.
"""


def is_dist_folder(path: Path) -> bool:
    """Whether a folder directly holds such a checkpoint, or what is left of one."""
    if "sharded_backend" in _config(path):
        return True
    return (path / COMMON).is_file() and ((path / METADATA_FILE).is_file() or any(path.glob("__*_*.distcp")))


def locate_dist(path: Path, step: int | None) -> Located:
    """Find the checkpoint that a path means, and look at its ``metadata.json``.

    Raises:
        NotACheckpoint: There is none.
        UsageError: Several, and nothing says which.
        Incomplete: Its save was not finished.
        Unsupported: It is one of another backend of Megatron-core's, or has no arguments.
    """
    path = path / INNER if is_dist_folder(path / INNER) else path
    located = locate(path, step, is_dist_folder, f"{CONFIG} and {METADATA_FILE}")
    folder = located.folder
    config = _config(folder)
    if not config:
        raise Incomplete(
            f"{folder / CONFIG}: missing or empty; Megatron writes it last: the save was not finished\n"
            "Use an older step, or copy the folder again if it was whole where it came from."
        )
    backend = config.get("sharded_backend")
    if backend != BACKEND:
        raise Unsupported(
            f"{folder / CONFIG}: sharded_backend is {backend!r}, expected {BACKEND!r}\n"
            "Load it with the Megatron that wrote it, and save it with --ckpt-format torch_dist or torch."
        )
    _check_version(folder / CONFIG, config)
    if not (folder / METADATA_FILE).is_file():
        raise Incomplete(
            f"{folder / METADATA_FILE}: missing (a plain ls or cp * passes over it)\nCopy the folder again, or use an older step."
        )
    if not (folder / COMMON).is_file():
        raise Unsupported(
            f"{folder / COMMON}: is not there, and the run's arguments with it: it is not known how to read such a folder\n"
            "If a copy left it out, copy it as well."
        )
    return located


def _check_version(file: Path, config: dict[str, object]) -> None:
    """Megatron-core registers its strategies by backend and version, and knows version 1 alone; so does this."""
    for key in ("sharded_backend_version", "common_backend_version"):
        if config.get(key, 1) != 1:
            raise Unsupported(
                f"{file}: {key} is {config[key]!r}, and only 1 is known\n"
                "A later Megatron wrote it: save it there with --ckpt-format torch, or use a later mcore_rlhf."
            )


def _config(path: Path) -> dict[str, object]:
    """What ``metadata.json`` says; empty where there is none that can be read."""
    file = path / CONFIG
    try:
        config = reading.read_json(file) if file.is_file() else {}
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}

"""What lies beside a checkpoint whose parts have folders of their own: the list of contents, as verl writes it.

Source: verl 0.9.1, ``verl/utils/checkpoint/megatron_checkpoint_manager.py`` (``_build_checkpoint_manifest``; ``MANIFEST_SCHEMA_VERSION``
2). No loader reads it; it is there once a step is whole.
"""

from __future__ import annotations

import json

from mcore_rlhf.families.dist_parts import DistParts
from mcore_rlhf.families.megatron.new_run import NewRun

_SCHEMA, _FORMAT = 2, "megatron_dist_checkpoint"


def contents_of(run: NewRun, parts: DistParts) -> dict[str, str]:
    """The file ``ckpt_contents.json``, and what is in it; none where the trainer has no such list.

    Args:
        run: The checkpoint that is to be written.
        parts: Where its parts lie.
    """
    if not parts.contents or parts.adapted:
        return {}
    bridged = not parts.model
    contents = {"model": {"path": parts.model, "format": _FORMAT, "backend": "dist_checkpointing"}}
    if bridged:
        contents = {"model": {"path": parts.described, "format": "huggingface", "backend": "mbridge"}}
    if run.choices.optimizer is not None:
        contents["optimizer"] = {"path": parts.optimizer, "format": _FORMAT}
        if run.source.state.scheduler is not None:
            contents["lr_scheduler"] = {"path": parts.optimizer, "format": _FORMAT, "key": parts.scheduler}
    contents["rng_state"] = {"path": parts.extra, "format": _FORMAT, "key": "rng_state"}
    found = {
        "schema_version": _SCHEMA,
        "framework": "megatron",
        "role": run.source.role,
        "global_step": run.source.state.iteration,
        "world_size": run.choices.parallel.world_size,
        "backend": {"has_bridge": bridged, "use_dist_checkpointing": not bridged, "peft": False},
        "save_contents": ["model", *(["optimizer"] if run.choices.optimizer is not None else []), "extra"],
        "contents": contents,
        "saved_any_dist_ckpt": True,
    }
    return {parts.contents: json.dumps(found, indent=2, sort_keys=True)}

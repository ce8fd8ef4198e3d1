"""The ``config.json`` that travelled with a Megatron checkpoint: it says more than arguments do, where it is of the same model."""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.source import Source
from mcore_rlhf.models.huggingface.config import architecture_of, sizes_of_config
from mcore_rlhf.models.huggingface.relation import from_megatron

from .reference_config import CONFIG, config_in


def travelled_config(source: Source, notes: Report) -> dict[str, object] | None:
    """The description that belongs to a Megatron source, or None where there is none or its tensors are others.

    Args:
        source: Megatron's.
        notes: Told that it is not used, and why.
    """
    config = config_in(source.carried) if source.carried is not None else {}
    if not config:
        return None
    model = source.model
    shapes = {s.name: s.global_shape for s in model.params if s.name not in model.unused}
    try:
        from_megatron(shapes, replace(sizes_of_config(config), mtp=model.mtp_layers), architecture_of(config))
    except CheckpointError as error:
        why = str(error).splitlines()[0]
        notes.add(
            Fate.NOTE, f"{CONFIG}: the one that travelled with the checkpoint is not used, the run is another: {why}"
        )
        return None
    return config

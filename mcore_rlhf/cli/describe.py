"""A checkpoint as plain facts: what several commands say about a source or a target, with keys that stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from mcore_rlhf.core.names import PARAM, TensorName

from .output import Facts

if TYPE_CHECKING:
    from mcore_rlhf.families.source import Source
    from mcore_rlhf.layouts.parallel import ParallelConfig
    from mcore_rlhf.models.spec import ModelSpec


def parallel_facts(parallel: ParallelConfig) -> Facts:
    """``tp``, ``pp``, ``vpp``, ``cp``, ``ep``, ``etp``, ``dp``, ``world_size``, ``pipeline_layout``, ``text``."""
    degrees = {name: getattr(parallel, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")}
    return {
        **degrees,
        "world_size": parallel.world_size,
        "pipeline_layout": parallel.pipeline_layout,
        "text": str(parallel),
    }


def source_facts(source: Source) -> Facts:
    """``path``, ``format``, ``role``, ``iteration``, ``release``, ``parallel``."""
    return {
        "path": str(source.root),
        "format": source.format,
        "role": source.role,
        "iteration": source.state.iteration,
        "release": source.state.release,
        "parallel": parallel_facts(source.parallel),
    }


def model_facts(model: ModelSpec) -> Facts:
    """Layers, experts, vocabulary, number of tensors and of parameters, and parameters by dtype."""
    dtypes: Counter[str] = Counter()
    for param in model.params:
        dtypes[str(param.dtype)] += prod(param.global_shape)
    return {
        "num_layers": model.num_layers,
        "mtp_layers": model.mtp_layers,
        "num_experts": model.num_experts,
        "tied": model.tied,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.padded_vocab_size,
        "tensors": len(model.params),
        "parameters": sum(dtypes.values()),
        "dtypes": dict(dtypes),
    }


def optimizer_facts(source: Source) -> Facts | None:
    """``kind``, ``states`` (name → dtype) and ``param_groups``, or None without optimizer."""
    if source.optimizer is None:
        return None
    groups = [{**_plain(group.fields), "expert": group.expert} for group in source.state.groups]
    return {"kind": source.optimizer, "states": _state_dtypes(source), "param_groups": groups}


def _plain(fields: Mapping[str, object]) -> Facts:
    """Numbers that are stored as tensors without dimensions, such as torch's ``step``, as numbers."""
    return {key: value.item() if getattr(value, "shape", None) == () else value for key, value in fields.items()}  # type: ignore[attr-defined]


def _state_dtypes(source: Source) -> dict[str, str | None]:
    """The dtype of each state, as the first trained parameter that has it stores it."""
    found: dict[str, str | None] = dict.fromkeys(source.states)
    for param in source.model.params:
        missing = [state for state, dtype in found.items() if dtype is None]
        if not missing or not param.trainable:
            continue
        for state in missing:
            entry = source.catalog.get(TensorName(source.role, param.name, state))
            found[state] = str(entry.dtype) if entry is not None else None
    return found


def tensor_count(source: Source, *, with_optimizer: bool = True) -> int:
    """Logical tensors, in all states or only the parameters themselves."""
    return len(source.catalog) if with_optimizer else sum(name.state == PARAM for name in source.catalog)


def layout_text(parallel: Facts) -> str:
    """``TP2×PP2×DP2 (8 ranks)``, with the pipeline layout where there is one."""
    ranks = parallel["world_size"]
    split = f", pipeline layout {parallel['pipeline_layout']}" if parallel["pipeline_layout"] else ""
    return f"{parallel['text']} ({ranks} {'rank' if ranks == 1 else 'ranks'}){split}"


def iteration_text(facts: Facts) -> str:
    """``iteration 50``, or ``release``."""
    return "release" if facts["release"] else f"iteration {facts['iteration']:,}"

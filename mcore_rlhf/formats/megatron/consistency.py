"""Holding the rank files against each other: one checkpoint, one iteration, every rank in its own folder, no key missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems
from mcore_rlhf.families.megatron.arguments import Arguments, stored_arguments
from mcore_rlhf.families.megatron.folders import MODEL_FILES, OPTIMIZER_FILE, Located
from mcore_rlhf.models.megatron import is_routed_expert, layer_of

from .shards import RankShard

_EVERY_LAYER = re.compile(
    r"(linear_(qkv|proj|q_proj|q_up_proj|kv_up_proj)\.weight|(input_layernorm|pre_mlp_layernorm|layer_norm_)\.?weight)$"
)
"""Parameters without which a layer cannot compute. Others may be in some layers only."""

_SAME_EVERYWHERE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size", "context_parallel_size", "data_parallel_size", "num_layers", "hidden_size",
    "padded_vocab_size", "consumed_train_samples",
)  # fmt: skip


def check_ranks(shards: Sequence[RankShard], located: Located, notes: Report) -> None:
    """The files of all ranks must be of one checkpoint.

    Raises:
        LayoutMismatch: They are of different iterations or runs, or lie in each other's folders; all problems together.
    """
    problems = Problems()
    _check_iterations(shards, located, problems)
    _check_arguments(shards, problems)
    _check_places(shards, problems)
    problems.raise_if_any()
    _note_other_files(shards, located, notes)


def _check_iterations(shards: Sequence[RankShard], located: Located, problems: Problems) -> None:
    found = {shard.pt.file: shard.top.get("iteration") for shard in shards}
    advice = "Files of two checkpoints are mixed, or a folder was renamed."
    if len(set(found.values())) > 1:
        some = ", ".join(f"{value} in {file}" for file, value in list(found.items())[:4])
        problems.add(LayoutMismatch, f"the ranks' files are of different iterations: {some}", advice)
        return
    iteration = next(iter(found.values()))
    if located.iteration is not None and iteration is not None and iteration != located.iteration:
        problems.add(
            LayoutMismatch,
            f"{located.folder.name}: the folder is of iteration {located.iteration}, its files are of iteration {iteration}",
            advice,
        )


def _check_arguments(shards: Sequence[RankShard], problems: Problems) -> None:
    first = _arguments(shards[0])
    for shard in shards[1:]:
        mine = _arguments(shard)
        for name in _SAME_EVERYWHERE:
            if mine and first and mine.get(name) != first.get(name):
                problems.add(
                    LayoutMismatch,
                    f"args.{name} is {first.get(name)} in {shards[0].pt.file}, but {mine.get(name)} in {shard.pt.file}",
                    "Files of two runs are mixed.",
                )


def _check_places(shards: Sequence[RankShard], problems: Problems) -> None:
    """Files know which rank wrote them; tools that do not care give all the same number, or none."""
    stored = {shard.at.rank: _arguments(shard).get("rank") for shard in shards}
    if set(stored.values()) != set(stored):
        return
    for shard in shards:
        if stored[shard.at.rank] != shard.at.rank:
            problems.add(
                LayoutMismatch,
                f"{shard.pt.file}: written by rank {stored[shard.at.rank]}, but {shard.at.folder} belongs to rank {shard.at.rank}",
                "Rank folders were swapped.",
            )


def _arguments(shard: RankShard) -> Mapping[str, object]:
    return stored_arguments(shard.top)


def _note_other_files(shards: Sequence[RankShard], located: Located, notes: Report) -> None:
    known = {*MODEL_FILES, OPTIMIZER_FILE}
    for shard in shards:
        others = sorted(p.name for p in Path(located.folder, shard.at.folder).glob("*.pt") if p.name not in known)
        if others:
            notes.add(Fate.LOST, f"{shard.at.folder}: {', '.join(others[:3])}: not a file of this format, not read")


def check_keys(shards: Sequence[RankShard], args: Arguments) -> None:
    """No rank and no layer may lack a key that its peers have.

    Raises:
        Incomplete: Some do; all of them are listed.
    """
    problems = Problems()
    _check_peers(shards, problems)
    if not any(
        args.values.get(name) for name in ("heterogeneous_layers_config_path", "hybrid_override_pattern", "spec")
    ):
        _check_layers(shards, problems)
    problems.raise_if_any()


def _check_peers(shards: Sequence[RankShard], problems: Problems) -> None:
    """Ranks of one pipeline stage hold the same dense keys."""
    keys: dict[tuple[int, int], dict[str, str]] = {}
    for shard in shards:
        for part in shard.parts:
            stage = keys.setdefault((shard.at.pp_rank, part.vpp_rank), {})
            stage.update((name, shard.pt.file) for name in part.tensors if not is_routed_expert(name))
    for shard in shards:
        for part in shard.parts:
            for name, file in keys[shard.at.pp_rank, part.vpp_rank].items():
                if name not in part.tensors:
                    problems.add(Incomplete, f"{shard.pt.file}: {name} is missing, which {file} has")


def _check_layers(shards: Sequence[RankShard], problems: Problems) -> None:
    """Layers of one kind have the same keys: a layer whose keys are a part of another's has lost some."""
    suffixes: dict[int, frozenset[str]] = {}
    for shard in shards:
        for part in shard.parts:
            for name in part.tensors:
                layer = layer_of(name)
                if layer is not None and _EVERY_LAYER.search(name) and not is_routed_expert(name):
                    suffixes[layer] = suffixes.get(layer, frozenset()) | {name.partition(f"layers.{layer}.")[2]}
    whole = {keys: layer for layer, keys in suffixes.items()}
    for layer, keys in suffixes.items():
        for more, other in whole.items():
            if keys < more:
                lost = ", ".join(sorted(more - keys)[:3])
                problems.add(Incomplete, f"decoder layer {layer} has no {lost}, which layer {other} has")
                break

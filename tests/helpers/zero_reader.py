"""Native DeepSpeed checkpoints, merged as ``zero_to_fp32.py`` does it: whole tensors, one rank after the other. Nothing of mcore_rlhf."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from tests.helpers.plain_load import plain_load

MASTER = "master"


@dataclass
class Merged:
    """One model-parallel rank.

    Args:
        param: Weights, buffers and frozen parameters as stored, by name; aliases included.
        states: Whole tensors of the optimizer by (name, state).
        step: Adam's step of every parameter.
        groups: Names per param group, in the order of the files.
        settings: Every param group's other entries.
        top: The content of the first model file.
    """

    param: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    step: dict[str, float] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    top: dict[str, Any] = field(default_factory=dict)


def read_zero(tag: Path, mp_rank: int = 0) -> Merged:
    """Merge one model-parallel rank of stage 0, 1, 2 or 3."""
    sliced = sorted(tag.glob(f"zero_pp_rank_*_mp_rank_{mp_rank:02d}_model_states.pt"), key=_dp_rank)
    tops = [plain_load(path) for path in sliced or [tag / f"mp_rank_{mp_rank:02d}_model_states.pt"]]
    optim = sorted(tag.glob(f"*zero_pp_rank_*_mp_rank_{mp_rank:02d}_optim_states.pt"), key=_dp_rank)
    merged = Merged(top=tops[0])
    module = tops[0]["module"] or {}
    merged.param = {name: value for name, value in module.items() if value.numel() or not sliced}
    osds = [plain_load(path)["optimizer_state_dict"] for path in optim]
    if sliced:
        for name, shape in (tops[0]["frozen_param_shapes"] or {}).items():
            flat = torch.cat([top["frozen_param_fragments"][name] for top in tops])
            merged.param[name] = flat[: prod(shape)].reshape(shape)
        _merge_sliced(merged, osds)
    elif osds:
        _merge_flat(merged, osds)
    elif tops[0]["optimizer"]:
        _merge_plain(merged, tops[0]["optimizer"])
    return merged


def _dp_rank(path: Path) -> int:
    return int(re.search(r"pp_rank_(\d+)", path.name)[1])  # type: ignore[index]


def _merge_flat(merged: Merged, osds: list[dict[str, Any]]) -> None:
    base = [osd["base_optimizer_state"] for osd in osds]
    elastic = isinstance(base[0], list)
    for g, shapes in enumerate(merged.top["param_shapes"]):
        merged.groups.append(list(shapes))
        of_rank = [b[g] if elastic else b["state"][g] for b in base]
        flats = {MASTER: torch.cat([osd["single_partition_of_fp32_groups"][g] for osd in osds])}
        for key, value in of_rank[0].items():
            if torch.is_tensor(value) and value.dim() == 1:
                flats[key] = torch.cat([state[key] for state in of_rank])
        merged.settings.append({} if elastic else _settings(base[0]["param_groups"][g]))
        gaps = osds[0].get("param_alignment_paddings", [[0] * len(shapes)] * (g + 1))[g]
        step = osds[0].get("base_optimizer_state_step", of_rank[0].get("step"))
        offset = 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            merged.step[name] = float(step or 0)
            for key, flat in flats.items():
                merged.states[name, key] = flat[offset : offset + prod(shape)].reshape(shape)
            offset += prod(shape) + gap


def _merge_sliced(merged: Merged, osds: list[dict[str, Any]]) -> None:
    inner = [osd["optimizer_state_dict"] for osd in osds]
    for group in inner[0]["param_groups"]:
        merged.settings.append(_settings(group))
        merged.groups.append([name for sub in group["params"] for name in merged.top["param_shapes"][sub]])
    for sub, shapes in enumerate(merged.top["param_shapes"]):
        of_rank = [
            {**i["state"][sub], MASTER: osd["fp32_flat_groups"][sub]} for i, osd in zip(inner, osds, strict=True)
        ]
        offset = 0
        for name, shape in shapes.items():
            q = -(-prod(shape) // len(osds))
            merged.step[name] = float(of_rank[0].get("step", 0))
            for key, value in of_rank[0].items():
                if torch.is_tensor(value) and value.dim() == 1:
                    flat = torch.cat([state[key][offset : offset + q] for state in of_rank])
                    merged.states[name, key] = flat[: prod(shape)].reshape(shape)
            offset += q


def _merge_plain(merged: Merged, optimizer: dict[str, Any]) -> None:
    """Names are taken from ``param_shapes``, which only this project's own stage-0 files have."""
    inner = optimizer.get("optimizer_state_dict", optimizer)
    masters = optimizer.get("fp32_groups")
    for g, group in enumerate(inner["param_groups"]):
        merged.settings.append(_settings(group))
        merged.groups.append(list((merged.top["param_shapes"] or [[]] * (g + 1))[g]))
        for place, (index, name) in enumerate(zip(group["params"], merged.groups[-1], strict=False)):
            for key, value in inner["state"][index].items():
                if key == "step":
                    merged.step[name] = float(value)
                else:
                    merged.states[name, key] = value
            if masters is not None:
                merged.states[name, MASTER] = masters[g][place]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}

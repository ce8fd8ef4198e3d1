"""A second reader of legacy Megatron checkpoints, for tests: written from the facts alone, with ``torch.load`` and ``cat``.

It imports nothing of mcore_rlhf, so that it cannot share a mistake with it. It knows the kinds of checkpoint that the
tests have, holds everything in memory, and asserts instead of explaining.

Facts: Megatron-LM core_v0.16.1 ``training/checkpointing.py``; megatron-core 0.16.1 ``distributed/param_and_grad_buffer.py``,
``optimizer/{distrib_optimizer,optimizer}.py``, ``transformer/{attention,mlp,multi_latent_attention}.py``, ``moe/experts.py``.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import torch

from tests.helpers.independent_merge import EMBEDDING, OUTPUT, Key, Rank, degrees, is_routed, merged
from tests.helpers.plain_load import bits, plain_load


@dataclass
class Reading:
    """A whole checkpoint: ``tensors[name, state]`` under global names."""

    args: Namespace
    iteration: int
    ranks: list[Rank]
    tensors: dict[Key, torch.Tensor]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.tensors}


def read(root: Path) -> Reading:
    """Read the checkpoint that a root's tracker names, and merge it."""
    tracker = (root / "latest_checkpointed_iteration.txt").read_text().strip()
    folder = root / (tracker if tracker == "release" else f"iter_{int(tracker):07d}")
    first = plain_load(min(folder.glob("mp_rank_*")) / "model_optim_rng.pt")
    args = first["args"]
    ranks = [_rank(path, args) for path in sorted(folder.glob("mp_rank_*"))]
    for rank in ranks:
        _read_local(rank, args)
    return Reading(args, first["iteration"], ranks, merged(ranks, args))


def _rank(path: Path, args: Namespace) -> Rank:
    _, pp, ep, _ = degrees(args)
    numbers = [int(part) for part in path.name.split("_")[2:]]
    assert len(numbers) == 1 + (pp > 1) + (ep > 1), path
    tp_rank = numbers.pop(0)
    pp_rank = numbers.pop(0) if pp > 1 else 0
    ep_rank = numbers.pop(0) if ep > 1 else 0
    optimizer = path / "distrib_optim.pt"
    distrib = plain_load(optimizer) if optimizer.exists() else None
    return Rank(path.name, tp_rank, pp_rank, ep_rank, plain_load(path / "model_optim_rng.pt"), distrib)


def _params(chunk: dict[str, Any]) -> list[str]:
    skipped = ("_extra_state", "expert_bias", "local_tokens_per_expert", "inv_freq")
    return [k for k, v in chunk.items() if isinstance(v, torch.Tensor) and not k.endswith(skipped)]


def _read_local(rank: Rank, args: Namespace) -> None:
    """Note the parameters of a rank, and find their optimizer states."""
    for number, chunk in enumerate(rank.chunks()):
        for name, value in chunk.items():
            if isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
                rank.local[number, name] = {"param": value}
    stored = rank.model.get("optimizer")
    if stored is None:
        return
    chained = args.num_experts is not None and args.expert_model_parallel_size > 1
    members = stored if isinstance(stored, list) else [stored]
    files = rank.distrib if isinstance(rank.distrib, list) else [rank.distrib]
    assert len(members) == 1 + chained, rank.folder
    for number, member in enumerate(members):
        mine = [
            (v, name)
            for v, chunk in enumerate(rank.chunks())
            for name in _params(chunk)
            if (chained and is_routed(name)) == (number == 1)
        ]
        if args.use_distributed_optimizer:
            if rank.distrib is not None and files[number] is not None:
                _read_flat(rank, files[number], mine, args, expert=number == 1)
        else:
            _read_plain(rank, member, mine, args)


def _read_flat(rank: Rank, content: dict[Any, Any], mine: list[tuple[int, str]], args: Namespace, expert: bool) -> None:
    assert content["buckets_coalesced"] is True
    buffers: dict[tuple[int, torch.dtype], list[str]] = defaultdict(list)
    for v, name in mine:
        buffers[v, rank.chunks()[v][name].dtype].append(name)
    assert [k for k in content if isinstance(k, int)] == list(range(len(buffers))), (rank.folder, list(content))
    for index, ((v, dtype), names) in enumerate(buffers.items()):
        ((dtypes, states),) = content[index].items()
        assert dtypes[0] == dtype, (dtypes, dtype)
        chunk = rank.chunks()[v]
        starts, buffer_starts, unpadded, padded = _flat(chunk, names, args, rank, v, expert)
        assert states["numel_unpadded"] == unpadded, (rank.folder, states["numel_unpadded"], unpadded)
        storages = {chunk[name].untyped_storage().data_ptr() for name in names}
        assert len(storages) == 1, f"{rank.folder}: {len(storages)} storages in buffer {index}"
        assert chunk[names[0]].untyped_storage().nbytes() == padded * dtype.itemsize, rank.folder
        for name in names:
            tensor = chunk[name]
            assert tensor.storage_offset() == buffer_starts[name], (rank.folder, name)
            for state, flat in states.items():
                if isinstance(flat, torch.Tensor):
                    assert flat.shape == (unpadded,)
                    piece = flat[starts[name] : starts[name] + tensor.numel()].view(tensor.shape)
                    rank.local[v, name]["master" if state == "param" else state] = piece
            assert torch.equal(rank.local[v, name]["master"].to(dtype), tensor), (rank.folder, name)


def _flat(
    chunk: dict[str, Any], names: list[str], args: Namespace, rank: Rank, v: int, expert: bool
) -> tuple[dict[str, int], dict[str, int], int, int]:
    """(start in the file, start in the buffer, length in the file, length of the buffer)."""
    tp, pp, ep, etp = degrees(args)
    stage = args.world_size // pp
    group = stage // (etp * ep) if expert else stage // tp
    divisor = lcm(group, 128, 65536) if args.ddp_pad_buckets_for_high_nccl_busbw else lcm(group, 128)
    limit = None
    if args.overlap_grad_reduce and rank.pp == 0 and v == 0:
        limit = args.ddp_bucket_size or max(40_000_000, 1_000_000 * (stage // tp))
    tied = not args.untie_embeddings_and_output_weights
    has_mtp = any(key.startswith("mtp.") for key in chunk)
    owner = OUTPUT if rank.pp == pp - 1 and not has_mtp else EMBEDDING  # which weight other stages have a copy of
    start = opened = done = 0
    filled = False
    in_file, in_buffer = {}, {}
    for name in reversed(names):
        start = -(-start // 64) * 64
        shared = pp > 1 and (tied or bool(args.mtp_num_layers)) and name == owner and (tied or name == EMBEDDING)
        if shared and filled:
            done, start, filled = done + start - opened, -(-start // divisor) * divisor, False
            opened = start
        in_file[name], in_buffer[name] = done + start - opened, start
        start, filled = start + chunk[name].numel(), True
        if shared or (limit is not None and start - opened >= limit):
            done, start, filled = done + start - opened, -(-start // divisor) * divisor, False
            opened = start
    if filled:
        done, start = done + start - opened, -(-start // divisor) * divisor
    return in_file, in_buffer, done, start


def _read_plain(rank: Rank, member: dict[str, Any], mine: list[tuple[int, str]], args: Namespace) -> None:
    mixed = "fp32_from_fp16_params" in member
    inner = member["optimizer"] if mixed else member
    numbers = [i for group in inner["param_groups"] for i in group["params"]]
    assert numbers == list(range(len(mine))), (rank.folder, numbers)
    for g, group in enumerate(inner["param_groups"]):
        names = [key for key in mine if _in_group(group, key[1], rank.local[key]["param"], args)]
        assert len(names) == len(group["params"]), (rank.folder, g, len(names), len(group["params"]))
        for at, (number, key) in enumerate(zip(group["params"], names, strict=True)):
            states = rank.local[key]
            states.update({k: t for k, t in inner["state"][number].items() if isinstance(t, torch.Tensor) and t.dim()})
            if mixed:
                states["master"] = member["fp32_from_fp16_params"][g][at]
                assert torch.equal(states["master"].to(states["param"].dtype), states["param"]), (rank.folder, key)
            assert all(t.shape == states["param"].shape for t in states.values()), (rank.folder, key)


def _in_group(group: dict[str, Any], name: str, param: torch.Tensor, args: Namespace) -> bool:
    decayed = not (param.dim() == 1 or name.endswith(".bias"))
    decoupled = args.decoupled_lr is not None and name in (EMBEDDING, OUTPUT)
    is_decoupled = args.decoupled_lr is not None and args.decoupled_lr == group["max_lr"]
    return (group["wd_mult"] == 1.0) == decayed and is_decoupled == decoupled


def differences(a: Reading, b: Reading, *, ignore: tuple[str, ...] = ()) -> list[str]:
    """What is not bit for bit equal: names, states, shapes, dtypes, elements; of a vocabulary, the rows that both have."""
    keys = [k for k in {**a.tensors, **b.tensors} if k[1] not in ignore]
    return [f"{key}: {what}" for key in keys if (what := _difference(key, a.tensors.get(key), b.tensors.get(key)))]


def _difference(key: Key, a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    if a is None or b is None:
        return f"only in the {'second' if a is None else 'first'}"
    if a.dtype != b.dtype:
        return f"{a.dtype} and {b.dtype}"
    if key[0].endswith((EMBEDDING, OUTPUT)):
        rows = min(len(a), len(b))
        a, b = a[:rows], b[:rows]
    if a.shape != b.shape:
        return f"{tuple(a.shape)} and {tuple(b.shape)}"
    return "" if bits(a) == bits(b) else f"{int((a != b).sum())} of {a.numel()} elements differ"

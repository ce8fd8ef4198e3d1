"""In place of training: what Megatron-LM's ``load_checkpoint`` restores of a checkpoint from which one key after the other was taken.

Where ``pretrain`` would begin to train, the model, the optimizer and the schedule are changed, a folder is loaded, and what they are then
is held against what they are after the whole checkpoint was loaded; and beside that stands what ``will-resume`` says of the same folder.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.training import checkpointing, get_args

from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome
from mcore_rlhf.trainers.settings_file import read_settings
from tests.helpers.one_key import At, keys_of, object_in, without_in_object, without_key, without_names
from tests.reference.pretrain_mock import main

SOURCE, OUT, SKIPPED = Path(os.environ["LOADS_FROM"]), Path(os.environ["SCRIPT_OUT"]), ("args",)
"""``args`` has hundreds of keys, which are those that Megatron compares; a few are taken."""
_OF_FLAT = ("optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1",)
_OF_ARGS = ("consumed_train_samples", "iteration", "num_layers", "tensor_model_parallel_size")


def _states(optimizer: Any) -> Iterator[torch.Tensor]:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in one.optimizer.param_groups:
            for param in group["params"]:
                yield param.data
                yield from (value for value in one.optimizer.state.get(param, {}).values() if torch.is_tensor(value))


def _change(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Everything is other than in the checkpoint, so that what was not restored shows."""
    with torch.no_grad():
        for param in model[0].parameters():
            param.fill_(0.25)
        for tensor in _states(optimizer):
            tensor.fill_(0.5)
    for group in optimizer.param_groups:
        group["lr"] = 0.75
    scheduler.num_steps, get_args().consumed_train_samples = 0, 0
    torch.manual_seed(77)


def _load(root: Path, model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any] | str:
    """What is there after it; the error where it fails or exits."""
    _change(model, optimizer, scheduler)
    args = get_args()
    args.load, checkpointing._CHECKPOINT_VERSION = str(root), None  # as in a new process
    try:
        iteration, _ = checkpointing.load_checkpoint(model, optimizer, scheduler)
    except BaseException as error:  # an exit, and torch's CheckpointException, which is no Exception
        return f"{type(error).__name__}: {error}"[:200]
    return {
        "weights": torch.cat([param.detach().float().flatten() for param in model[0].parameters()]),
        "optimizer": torch.cat([tensor.float().flatten() for tensor in _states(optimizer)]),
        "scheduler": scheduler.num_steps,
        "counters": iteration,
        "data": args.consumed_train_samples,
        "RNG": torch.get_rng_state(),
    }


def _same(one: Any, other: Any) -> bool:
    return bool(torch.equal(one, other)) if torch.is_tensor(one) else bool(one == other)


def _looked_at(tree: Any) -> list[At]:
    """Where something is taken; none where there is no such thing."""
    found = () if tree is None else keys_of(tree)
    return [at for at in found if len(at) <= 5 and not (at[0] in SKIPPED and len(at) > 1 and at[1] not in _OF_ARGS)]


def _removals(root: Path) -> Iterator[tuple[str, At, Callable[[], object]]]:
    """Each file and key, and what takes it; of torch_dist the files themselves, too, the names in ``.metadata``, and keys of objects."""
    for file in sorted(path for path in root.glob("iter_*/*") if path.is_file()):
        yield str(file.relative_to(root)), (), file.unlink
    for file in sorted(root.glob("iter_*/.metadata")):
        for name in pickle.loads(file.read_bytes()).state_dict_metadata:
            yield (
                str(file.relative_to(root)),
                (name,),
                lambda f=file, n=name: without_names(pickle.loads(f.read_bytes()), {n}, f),
            )
        for name in ("common_state/shard_0_1", *_OF_FLAT):
            for at in _looked_at(object_in(file.parent, name)):
                yield (
                    str(file.relative_to(root)),
                    (name, *at),
                    lambda f=file, n=name, a=at: without_in_object(f.parent, n, a),
                )
    for file in sorted(root.glob("iter_*/metadata.json")):
        for name in json.loads(file.read_text()):
            yield (
                str(file.relative_to(root)),
                (name,),
                lambda f=file, n=name: f.write_text(json.dumps(without_key(json.loads(f.read_text()), (n,)))),
            )
    for file in sorted(path for path in root.glob("iter_*/**/*.pt") if path.is_file()):
        for at in _looked_at(torch.load(file, weights_only=False)):
            yield (
                str(file.relative_to(root)),
                at,
                lambda f=file, a=at: torch.save(without_key(torch.load(f, weights_only=False), a), f),
            )


def sweep(forward: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **more: Any) -> tuple[int, int]:
    """Stands where Megatron's ``train`` is called."""
    config = OUT.with_suffix(".args")
    config.write_text(" ".join(sys.argv[1:]))
    wanted = _load(SOURCE, model, optimizer, scheduler)
    assert isinstance(wanted, dict), wanted
    rows, scratch = [], OUT.with_suffix(".root")
    for file, at, take in _removals(Path(shutil.copytree(SOURCE, scratch))):
        whole = (scratch / file).read_bytes()
        take()
        live = _load(scratch, model, optimizer, scheduler)
        found = forecast(scratch, loader_named("megatron-lm")[0], read_settings(config))
        told = {one.thing.value: [one.row.outcome is Outcome.RESTORED, one.why] for one in found.roles.get("", [])}
        real = live if isinstance(live, str) else {key: _same(value, wanted[key]) for key, value in live.items()}
        rows.append({
            "file": file, "key": "/".join(map(str, at)), "real": real, "told": told, "stops": found.stops, "doubtful": bool(found.doubtful),
        })  # fmt: skip
        (scratch / file).write_bytes(whole)
    OUT.write_text(json.dumps(rows))
    os._exit(0)


if __name__ == "__main__":
    main(sweep)

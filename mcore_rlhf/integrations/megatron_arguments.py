"""What a script's arguments ask for: where to load from, and what cannot be done.

Source: Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``, ``checkpointing.py`` (``load_checkpoint``,
``check_checkpoint_args``).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_rlhf.errors import CheckpointError, NotACheckpoint, Problems, Unsupported
from mcore_rlhf.manager.world import World

from .megatron_source import LoadSource, find


def agreed_source(args: Any, load_arg: str) -> LoadSource:
    """Where a script loads from, as rank 0 sees the disk; collective. Sets ``args.finetune`` where that follows from it.

    Args:
        args: Megatron-LM's ``args``.
        load_arg: The name of the argument with the folder.

    Raises:
        CheckpointError: Nothing is there, and something has to be; or it cannot be read. On every rank.
    """
    world = World.current()
    try:
        return _from_first(world, args, load_arg)
    finally:
        world.close()


def _from_first(world: World, args: Any, load_arg: str) -> LoadSource:
    source, error = LoadSource("nothing"), None
    if world.coordinates:
        try:
            source = _source(args, load_arg)
        except CheckpointError as problem:
            error = problem
    world.raise_together(error, "looking for a checkpoint")
    source, args.finetune = world.from_first((source, args.finetune))
    return source


def _source(args: Any, load_arg: str) -> LoadSource:
    """Falls back to ``--pretrained-checkpoint``, which is fine-tuned from."""
    step = getattr(args, "ckpt_step", None)
    source = find(getattr(args, load_arg), step)
    pretrained = getattr(args, "pretrained_checkpoint", None)
    if source.kind == "nothing" and pretrained is not None:
        source = find(pretrained, step)
        if source.kind == "nothing":
            raise NotACheckpoint(
                f"{getattr(args, load_arg)} (--load), {pretrained} (--pretrained-checkpoint): no checkpoint"
            )
        args.finetune = True
    if source.kind == "nothing" and getattr(args, "exit_on_missing_checkpoint", False):
        raise NotACheckpoint(f"{getattr(args, load_arg)}: no checkpoint, and --exit-on-missing-checkpoint was given")
    return source


def refuse_unsupported(args: Any) -> None:
    """Say what of the arguments cannot be done.

    Raises:
        Unsupported: All of it.
    """
    problems = Problems()
    if args.ckpt_format != "torch":
        problems.add(
            Unsupported, f"--ckpt-format {args.ckpt_format}: the manager writes Megatron's torch format",
            "Give --ckpt-format torch; checkpoints of other formats are still loaded.",
        )  # fmt: skip
    if getattr(args, "non_persistent_ckpt_type", None) or getattr(args, "non_persistent_save_interval", None):
        problems.add(
            Unsupported, "--non-persistent-ckpt-type, --non-persistent-save-interval: not done by the manager",
            "Leave them out, and save more often instead: megatron_lm.install(asynchronous=True).",
        )  # fmt: skip
    if str(getattr(args, "optimizer", "")).startswith("dist_"):
        problems.add(Unsupported, f"--optimizer {args.optimizer}: its states lie in files of its own")
    if getattr(args, "load_main_params_from_ckpt", False):
        problems.add(Unsupported, "--load-main-params-from-ckpt: use --no-load-optim alone, or load the optimizer")
    problems.raise_if_any()


def refuse_modelopt(training: Any, chunks: Sequence[torch.nn.Module]) -> None:
    """Refuse a model whose further state would be lost.

    Args:
        training: Megatron-LM's module ``megatron.training.checkpointing``.
        chunks: The model.

    Raises:
        Unsupported: ModelOpt (quantization, pruning) keeps a state for it.
    """
    state: dict[str, object] = {}
    if getattr(training, "has_nvidia_modelopt", False):
        training.save_modelopt_state(training.unwrap_model(chunks), state)
    if state:
        raise Unsupported(
            "the model was changed by ModelOpt, and its state cannot be saved: use Megatron-LM's own functions"
        )


def comparable(stored: Mapping[str, object], args: Any) -> Namespace:
    """Stored arguments for Megatron's comparison, but for the layout: another one has been loaded through a plan."""
    layout = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "padded_vocab_size")
    return Namespace(**{**stored, **{name: getattr(args, name, None) for name in layout}})

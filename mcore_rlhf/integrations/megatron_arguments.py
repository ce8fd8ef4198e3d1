"""What a script's arguments ask for: where to load from, and what cannot be done.

Source: Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``, ``checkpointing.py`` (``load_checkpoint``,
``check_checkpoint_args``).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_rlhf.errors import CheckpointError, NotACheckpoint, Problems, StorageError, Unsupported
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.steps import is_hidden, tracker_text
from mcore_rlhf.manager.run.world import World


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
    if world.is_rank0:
        try:
            source = _source(args, load_arg)
        except CheckpointError as problem:
            error = problem
    world.raise_on_all(error, "looking for a checkpoint")
    source, args.finetune = world.broadcast((source, args.finetune))
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


RELEASE = "release"

Kind = Literal["nothing", "root", "step", "model", "megatron"]
"""``root``: its newest committed step. ``step``: that one. ``model``: a single model, in any format that is read.
``megatron``: a format that is Megatron's own function's to load (``torch_dist``, ``torch_dcp``)."""


@dataclass(frozen=True, slots=True)
class LoadSource:
    """Where a script loads from. Only names are looked at; what is found is opened and checked by the manager.

    Source of Megatron's own layout: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``read_metadata``,
    ``get_checkpoint_name``, ``_get_checkpoint_format``).

    Args:
        kind: See :data:`Kind`.
        path: The root, the step or the model's folder.
        release: Whether it is a release: weights without an iteration.
        format: What Megatron-LM calls the format, where it is its own function's to load.
    """

    kind: Kind
    path: Path = Path()
    release: bool = False
    format: str = ""

    @property
    def root(self) -> Path:
        """The folder of all steps."""
        return self.path if self.kind == "root" else self.path.parent

    @property
    def which(self) -> str | Path:
        """What the manager is asked to load."""
        return "auto" if self.kind == "root" else self.path

    def model_folder(self, role: str) -> Path:
        """A folder that Megatron's own functions read: with a tracker and ``iter_…`` folders."""
        if self.kind == "root":
            newest = steps.newest(self.path)
            return self.path if newest is None else newest.local / role
        return self.path / role if self.kind == "step" else self.path


def find(folder: str | None, step: int | None = None) -> LoadSource:
    """Understand a folder.

    Args:
        folder: ``--load`` or ``--pretrained-checkpoint``; None where it was not given.
        step: ``--ckpt-step``.

    Raises:
        NotACheckpoint: There are steps, and none of them can be resumed from; or the one that is wanted is not there.
        StorageError: It cannot be read.
    """
    if folder is None:
        return LoadSource("nothing")
    path = Path(folder).absolute()
    if steps.step_of(path) is not None and path.is_dir():
        return LoadSource("step", path)
    return _wanted(path, step) if step else _newest(path)


def has_steps(folder: str | None) -> bool:
    """Whether a folder is the root of a run, or one step of it."""
    if folder is None:
        return False
    path = Path(folder).absolute()
    return bool(_visible(path)) or (steps.step_of(path) is not None and path.is_dir())


def _wanted(path: Path, step: int) -> LoadSource:
    ours, theirs = steps.step_folder(path, step), path / f"iter_{step:07d}"
    if ours.is_dir():
        return LoadSource("step", ours)
    if theirs.is_dir():
        return _model(theirs, theirs, release=False)
    raise NotACheckpoint(f"{path}: --ckpt-step asks for {step}, and there is neither {ours.name} nor {theirs.name}")


def _newest(path: Path) -> LoadSource:
    found = _visible(path)
    if any(step.resumable for step in found):
        return LoadSource("root", path)
    tracked = _tracked(path)
    if tracked is not None and tracked.is_dir():
        return _model(path, tracked, tracked.name == RELEASE)
    if found:
        listed = "; ".join(f"{step.path.name} ({step.state}: {step.quarantined or step.why})" for step in found[-5:])
        raise NotACheckpoint(
            f"{path}: there are steps, and none of them can be resumed from: {listed}\n"
            "A step that another trainer wrote is loaded when --load names it, or once `mcore-rlhf adopt STEP` has verified it. "
            "To begin anew, give another folder."
        )
    if steps.looks_foreign(path):
        return _model(path, path, path.name == RELEASE)
    return LoadSource("nothing", path)


def _visible(path: Path) -> list[steps.Step]:
    """Steps that are not being written: leftovers of a killed save mean that there is nothing yet."""
    return [step for step in steps.listed(path) if not is_hidden(step.path)] if path.is_dir() else []


def _tracked(path: Path) -> Path | None:
    """The folder that Megatron's tracker names."""
    try:
        text = tracker_text(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path}: its tracker cannot be read: {error}") from error
    if text == RELEASE:
        return path / RELEASE
    return path / f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 19 else None


def _model(path: Path, iteration: Path, release: bool) -> LoadSource:
    if (iteration / "metadata.json").is_file():
        return LoadSource("megatron", path, release, "torch_dist")
    if (iteration / ".metadata").is_file():
        return LoadSource("megatron", path, release, "torch_dcp")
    return LoadSource("model", path, release)


@dataclass(frozen=True, slots=True, eq=False)
class ScriptObjects:
    """What a script hands to Megatron-LM's functions.

    Args:
        model: Its model chunks, or a single one.
        optimizer: Its optimizer, or None.
        scheduler: Its parameter scheduler, or None.
    """

    model: Any
    optimizer: Any | None
    scheduler: Any | None

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """The model chunks."""
        return [self.model] if isinstance(self.model, torch.nn.Module) else list(self.model)

    def is_same(self, other: ScriptObjects) -> bool:
        """Whether both are the same live objects."""
        mine, theirs = [(*one.chunks, one.optimizer, one.scheduler) for one in (self, other)]
        return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))

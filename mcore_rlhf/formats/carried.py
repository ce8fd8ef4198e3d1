"""Files that go along byte for byte: what a model's folder has besides its weights, in whatever format those are.

A Hugging Face folder has them at its top: the config, the tokenizer, code, a licence. Any other format gets them in
:data:`FOLDER`, beside the step's own files, where no loader looks; whoever reads the step finds them there. So a model that went
through another format is a model that ``from_pretrained`` takes again. Runs of verl keep the same files in ``huggingface``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.inventory import WAITING
from mcore_rlhf.families.module import CONFIG, config_in
from mcore_rlhf.families.sidecar import ORIGIN, STATE, FormerFamily, Sidecar, beside, sidecar_files
from mcore_rlhf.families.source import Source
from mcore_rlhf.storage.leftovers import Carried, Leftover, leftovers
from mcore_rlhf.storage.paths import ReadablePath

from .base import Target

FOLDER = "mcore_rlhf/carried"
"""Where they lie in a format that has no place for them."""
WITH_SIDECARS = ("hf", "peft", "dcp")
"""Formats that have no place for anything but tensors: their readers and writers look after what lies beside."""
AT_THE_TOP = ("hf", "peft")
"""Formats whose folders hold such files themselves."""
_OF_THE_MODEL = (CONFIG, "generation_config.json")
"""They describe a whole model, which an adapter is none of."""
_VERL = "huggingface"
"""Source: verl v0.7, ``verl/utils/checkpoint/fsdp_checkpoint_manager.py``, ``megatron_checkpoint_manager.py``."""
_VERL_INNER = "dist_ckpt"
"""Megatron's files in a role's folder of verl's, beside :data:`_VERL`. Source: as above."""
_TOKENIZER = "tokenizer"
"""In the step's folder, where a target of the same format has it too. Source: Megatron-LM main (0.20), ``training/checkpointing.py``
(``save_tokenizer_assets``)."""
_WITH_TAGS = ("deepspeed", "universal")
_TRACKERS = ("latest", "latest_universal", "zero_to_fp32.py")
"""Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``save_checkpoint``, ``_copy_recovery_script``)."""
_SHOWN = 20


def with_carried(source: Source, stubs: Sequence[str]) -> Source:
    """A source with what lies beside its files: what waits for the way back, and the files that go along.

    Its model is described by the config among them where nothing else does it.

    Args:
        source: As its reader opened it.
        stubs: Further classes that may become inert stubs.
    """
    source = _with_origin(source, stubs)
    if source.format in AT_THE_TOP:
        opened = {file.path for file in source.files} - {CONFIG}
        return replace(source, carried=Carried(source.root, leftovers(source.root, opened)))
    folder = _folder_of(source)
    carried = _beside_the_tag(source) if folder is None else Carried(folder, leftovers(folder, ()))
    family = source.family.described(lambda: (config_in(carried) if carried else {}) or FormerFamily.of(source).config)
    return replace(source, carried=carried, family=family)


def _with_origin(source: Source, stubs: Sequence[str]) -> Source:
    """What waits beside the files of a format that has a place for all else; in client state, where it once was, for any."""
    other = dict(source.state.other)
    old = other.pop(ORIGIN, None)
    if isinstance(old, Mapping):
        source = replace(source, state=replace(source.state, other=other), origin=old)
    if source.format in WITH_SIDECARS:
        return source
    try:
        found = beside(source, stubs)
    except CheckpointError as error:
        source.notes.add(Fate.LOST, f"what {STATE} keeps: {error}")
        return source
    if found is None:
        return source
    folder, sidecar = found
    return replace(source, origin=sidecar.origin, files=(*source.files, *sidecar_files(source.root, folder)))


def unopened(source: Source) -> tuple[Leftover, ...]:
    """Every file of the step that was opened which no reader looked into, by path relative to the step's folder.

    Args:
        source: As it was opened; what it has in :attr:`~mcore_rlhf.families.source.Source.carried` is not among them.
    """
    if source.format in AT_THE_TOP:
        return ()
    step = PurePosixPath(_step_folder(file.path for file in source.files))
    opened = {str(PurePosixPath(file.path).relative_to(step)) for file in source.files}
    taken = [FOLDER]
    if source.carried is not None and source.carried.folder == source.root / step / _TOKENIZER:
        taken.append(_TOKENIZER)
    inside = tuple(f"{name}/" for name in taken)
    return tuple(item for item in leftovers(source.root / step, opened) if not item.path.startswith(inside))


def bring_along(source: Source, target: Target) -> None:
    """Let a target that does not look at files itself take those of its source, and say what stays behind.

    Args:
        source: What the target is made of.
        target: The target.
    """
    if source.origin and target.format not in WITH_SIDECARS:
        _leave_origin(source, target)
    files = {} if source.carried is None else source.carried.files
    if target.format == "peft":
        taken = {*target.texts, *(file.path for file in target.files), *_OF_THE_MODEL}
        target.carried = {name: path for name, path in files.items() if name not in taken}
        tell_kept(target.carried, target.report)
    elif target.format not in AT_THE_TOP:
        place = PurePosixPath(_step_folder(file.path for file in target.files), _place(source, target))
        described = source.family.config
        texts = {} if source.carried is None else dict(source.carried.texts)
        known = FormerFamily.of(source).config if source.carried is None else config_in(source.carried)
        if described and described != known:  # what the user gave, or what the run says now
            files.pop(CONFIG, None)
            texts[CONFIG] = json.dumps(described, indent=2) + "\n"
        target.texts.update({str(place / name): text for name, text in texts.items()})
        target.carried = {str(place / name): path for name, path in files.items()}
        tell_kept(files, target.report)


def _place(source: Source, target: Target) -> str:
    """Where files that go along lie beside a target's own."""
    own = source.carried is not None and source.carried.folder.name == _TOKENIZER and source.format == target.format
    return _TOKENIZER if own else FOLDER


def _leave_origin(source: Source, target: Target) -> None:
    """Put what waits for the way back beside the target's files."""
    folder = _step_folder(file.path for file in target.files)
    texts, lost = Sidecar(origin=source.origin).texts(f"{folder}/" if folder else "")
    target.texts.update(texts)
    target.holds = {**target.holds, WAITING: source.origin}
    for what in lost:
        target.report.add(Fate.LOST, f"{what}: no JSON can hold it")


def tell_kept(files: Mapping[str, ReadablePath], report: Report) -> None:
    """Say which files go along."""
    if files:
        report.add(Fate.KEPT, f"{_listed(list(files))}: byte for byte")


def _listed(paths: list[str]) -> str:
    more = len(paths) - _SHOWN
    return ", ".join(paths[:_SHOWN]) + (f", and {more} more" if more > 0 else "")


def _folder_of(source: Source) -> ReadablePath | None:
    """Where the files of a source that is no model's folder lie: beside the step's own, or above them."""
    inner = [PurePosixPath(file.path).parents for file in source.files[:1]]
    for place in (*(str(parent) for parents in inner for parent in parents), "."):
        for name in (FOLDER, _VERL, *([_TOKENIZER] if source.format == "megatron-dist" else [])):
            folder = source.root / place / name
            if folder.is_dir():
                return folder
    beside = source.root.parent / _VERL
    return beside if source.root.name == _VERL_INNER and beside.is_dir() else None


def _beside_the_tag(source: Source) -> Carried | None:
    """What transformers' Trainer leaves beside the tag of a DeepSpeed run: config, tokenizer, states of its own.

    Source: transformers 5.23.0, ``trainer.py`` (``_save_checkpoint``).
    """
    if source.format not in _WITH_TAGS or not (source.root / CONFIG).is_file():
        return None
    tags = {path.parent.name for path in source.root.glob("*/*_states.pt")}
    found = leftovers(source.root, _TRACKERS)
    return Carried(source.root, tuple(item for item in found if PurePosixPath(item.path).parts[0] not in tags))


def _step_folder(paths: Iterable[str]) -> str:
    """The folder that all files of a target have in common: ``iter_0000050``, a tag's; empty where they lie at the top."""
    first = {PurePosixPath(path).parts[0] if "/" in path else "" for path in paths}
    return first.pop() if len(first) == 1 else ""

"""The formats themselves, made of the lines of :data:`~.known.KNOWN`; which of them a folder is, and what is in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import filter as filter_names
from importlib import import_module
from pathlib import Path

from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    Lossy,
    NotACheckpoint,
    Unreadable,
    Unsupported,
    UsageError,
    headline,
    log_of,
)
from mcore_rlhf.families.megatron.folders import TRACKER, refuse_of_ranks
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, refuse
from mcore_rlhf.families.passes import OPENED, Passage, through
from mcore_rlhf.families.selection import with_role
from mcore_rlhf.families.source import Source, contradictory_degrees, contradictory_rates
from mcore_rlhf.families.trainer_files import ACCELERATE, FSDP_WHOLE, TRANSFORMERS
from mcore_rlhf.storage.paths import ReadablePath, files_below, no_files
from mcore_rlhf.storage.patience import read_patiently
from mcore_rlhf.storage.unfinished import interrupted, refuse_unfinished
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.suggestions import FORMATS as FORMAT_WORDS
from mcore_rlhf.suggestions import did_you_mean, hub_name
from mcore_rlhf.trainers.known import TRAINERS
from mcore_rlhf.trainers.torchdata import astray

from .base import Format
from .believing import opened, roles_of
from .carried import with_carried
from .checksums import contradictions, listed_at, refuse_damaged_texts, with_checksums
from .dcp import APART
from .hf import FORMAT as HF
from .hf import HuggingFaceFormat
from .hf_trainer import HfRunFormat
from .known import KNOWN, KnownFormat, for_people
from .megatron import FORMAT as MEGATRON
from .megatron_dist import MegatronDistFormat
from .peft import FORMAT as PEFT
from .torch_file import FORMAT as TORCH


def _made(row: KnownFormat) -> Format:
    """The format of a line: one that is given others here, since a format knows none itself, or else what its module calls ``FORMAT``."""
    where = f"{__package__}.{row.module or row.name.replace('-', '_')}"
    found = _GIVEN.get(row.name) or import_module(where).FORMAT
    if not isinstance(found, Format):
        raise TypeError(f"{where}: FORMAT is no Format, but a {type(found).__name__}")
    if (said := (found.name, found.family)) != row[:2]:
        raise TypeError(f"{where}: its name and family are {said}, and in KNOWN of formats/known.py {row[:2]}")
    return found


_WEIGHTS = (HF, PEFT, APART, HuggingFaceFormat(alone=FSDP_WHOLE))
_OF_OTHERS: tuple[Format, ...] = (
    MegatronDistFormat(HF, MEGATRON),
    HfRunFormat(TRANSFORMERS, _WEIGHTS),
    HfRunFormat(ACCELERATE, _WEIGHTS, HuggingFaceFormat),
)
_GIVEN: Mapping[str, Format] = {form.name: form for form in _OF_OTHERS}
FORMATS: tuple[Format, ...] = tuple(map(_made, KNOWN))
"""In the order in which a folder is looked at."""
OF_ENGINES: tuple[Format, ...] = (TORCH,)
"""What an engine of ours keeps of any module, which may be none that other formats have: in a step beside models of these, it goes along
as it is."""

_SHOWN = 5
_PARTS_DEEP = 3
"""Files of a checkpoint lie at most so deep in it: ``iter_0000002/mp_rank_00/model_optim_rng.pt``."""
_log = log_of(__name__)


def named() -> list[Format]:
    """All formats in the order in which people name them."""
    return sorted(FORMATS, key=lambda one: for_people(one.name, one.family))


def format_named(name: str) -> Format:
    """The format of that name.

    Raises:
        Unsupported: There is none.
    """
    for known in FORMATS:
        if known.name == name:
            return known
    names, runs = [one.name for one in FORMATS], [one.name for one in TRAINERS if one.formats]
    raise Unsupported(
        f"unknown format {name!r}{did_you_mean(name, [*names, *runs], FORMAT_WORDS)}\n"
        f"Known: {', '.join(names)}. Trainers whose runs are written: {', '.join(runs)}."
    )


def wanted_format(options: ConvertOptions) -> Format:
    """The format that is to be written, for which all of the options mean something.

    Raises:
        Unsupported: There is no such format.
        UsageError: Options that mean nothing for it, or have impossible values; all of them.
    """
    wanted = format_named(options.to)
    refuse(wanted, named(), read=options.read, write=options.write, run=options)
    return wanted


def open_checkpoint(path: ReadablePath, options: ReadOptions, *, partial: bool = False) -> Source:
    """Open whatever checkpoint a path means: a root, one iteration, or a step that has roles as sub-folders.

    Its files are those that a manifest of ours lists, if there is one, with the checksums in it.

    Args:
        path: The folder.
        options: Which role and step, which rules.
        partial: Whether an optimizer that is not understood stays unread: :attr:`Source.unread` says why.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged, or cannot be read.
    """
    return read_patiently(path, lambda: _opened(path, options, partial))


def _opened(path: ReadablePath, options: ReadOptions, partial: bool) -> Source:
    folder, inner = _meant(path, options)
    listed = listed_at(folder, trackers(), options.step)
    try:
        source = with_checksums(_with_what_is_beside(folder, inner, partial), listed)
        _note_beside(source, checkpoint_path(path), folder, options)
        source.notes.through([_OTHERWISE], source)
        _log.info("opened %s: %s, %s, %d tensors", folder, source.format, source.parallel, len(source.catalog))
        return through(OPENED, Passage(source, read=inner))
    except CheckpointError:
        refuse_damaged_texts(folder, listed)
        raise


def open_without_manifest(path: ReadablePath, options: ReadOptions) -> Source:
    """The same for someone who only looks: what a manifest of ours says otherwise of files is noted, and they are shown as they are.

    Sizes are looked at, and the checksums of texts and of the manifest itself. An optimizer that is not understood stays unread.

    Args:
        path: The folder.
        options: Which role and step, which rules.

    Raises:
        CheckpointError: There is no checkpoint, or what its reader looks at is damaged, or cannot be read.
    """
    return read_patiently(path, lambda: _shown(path, options))


def _shown(path: ReadablePath, options: ReadOptions) -> Source:
    folder, inner = _meant(path, options)
    source = _with_what_is_beside(folder, inner, partial=True)
    _note_beside(source, checkpoint_path(path), folder, options)
    source.notes.through([_SAID], list(contradictions(folder, trackers(), options.step)))
    source.notes.through([_OTHERWISE], source)
    return through(OPENED, Passage(source, read=inner))


def _with_what_is_beside(folder: ReadablePath, options: ReadOptions, partial: bool) -> Source:
    """What a format's reader makes of a folder, with what lies beside."""
    try:
        read = _read(folder, options, partial)
    except CheckpointError as error:
        odd: list[str] = []
        with suppress(OSError):
            odd = no_files(folder)
        if not odd or isinstance(error, Unreadable):
            raise
        listed = ", ".join(odd[:_SHOWN]) + (", …" if len(odd) > _SHOWN else "")
        raise type(error)(f"{error}\nNo file, but a pipe, a socket or a device: {listed}") from error
    return with_carried(read, next((one for one in FORMATS if one.name == read.format), None), options.stubs)


def _read(folder: ReadablePath, options: ReadOptions, partial: bool) -> Source:
    """What a format's reader makes of a folder; without the optimizer, where only that is not understood, or fits no other layout."""
    found = detect(folder)
    try:
        return opened(found, folder, options)
    except (Unsupported, Lossy) as error:
        if not (partial and options.optimizer):
            raise
        try:
            source = opened(found, folder, replace(options, optimizer=False))
        except (Corrupt, Incomplete):  # more than not understood
            raise
        except CheckpointError:
            raise error from None
        source.unread, source.refused = str(error), type(error)
        source.notes.add(Fate.LOST, f"the optimizer, which is there and not understood: {headline(source.unread)}")
        return source


_SAID: Rule[Sequence[str]] = Rule(Fate.NOTE, "{text}", lambda texts: [{"text": text} for text in texts])


def _meant(path: ReadablePath, options: ReadOptions) -> tuple[ReadablePath, ReadOptions]:
    """The folder that a path means, and the options with the role in it."""
    given, path = path, checkpoint_path(path, follow_links=options.follow_links)
    require_folder(path, str(given))
    models = _models(path)
    if options.only is not None:
        options = with_role(options, models)
    folder, role = _role_folder(path, models, options.role)
    return folder, replace(options, role=role)


def require_folder(path: ReadablePath, given: str = "") -> None:
    """Refuse what no checkpoint can be.

    Args:
        path: Where it should be.
        given: What was typed for it.

    Raises:
        NotACheckpoint: Nothing is there, or a file.
        Unreadable: It lies aside, or is half moved into.
    """
    refuse_unfinished(path)
    if not path.exists():
        raise NotACheckpoint(f"{path}: no such file or folder{_near(path, given)}")
    if not path.is_dir():
        raise NotACheckpoint(f"{path}: expected the folder of a checkpoint, found a file{_around(path)}")


def _near(path: ReadablePath, given: str) -> str:
    """What lies beside a path that does not exist, and is called nearly so; or, where there is no such folder, a model of the Hub."""
    above = path.parent
    names: list[str] = []
    with suppress(OSError):  # who may not look there hears that nothing is there
        if not isinstance(above, Path) or not above.is_dir():
            return hub_name(given)
        names = [child.name for child in above.iterdir()]
    return did_you_mean(path.name, (name for name in names if not name.startswith(".")))


def _around(path: ReadablePath) -> str:
    """The checkpoint of which a file or folder is a part; a line of advice, or nothing."""
    folders = [above for above in path.parents[:_PARTS_DEEP] if isinstance(above, Path)]
    with suppress(OSError, CheckpointError):  # who may not look there, or at it, hears nothing of it
        whole = next((above for above in folders if format_at(above) is not None), None)
        return f"\nIt is a part of {whole}: give that." if whole is not None else ""
    return ""


def format_at(path: ReadablePath, formats: Iterable[Format] = FORMATS) -> Format | None:
    """The format of a folder; None where it is no checkpoint in one that is known.

    Args:
        path: The folder.
        formats: Those that it may have.
    """
    likely = formats
    with suppress(OSError):  # where nobody may look, all are asked
        names = [child.name for child in path.iterdir()] if path.is_dir() else []
        likely = [one for one in formats if not one.markers or any(filter_names(names, mark) for mark in one.markers)]
    return next((known for known in likely if known.detect(path)), None)


def detect(path: ReadablePath) -> Format:
    """The format of a folder.

    Raises:
        NotACheckpoint: No known format.
    """
    found = format_at(path, FORMATS)
    if found is not None:
        return found
    refuse_of_ranks(path)
    part = _around(path) or (f"\n{left}" if (left := interrupted(path)) else "")
    if part:
        raise NotACheckpoint(f"{path}: not a checkpoint in a format that is known{part}")
    raise NotACheckpoint(
        f"{path}: not a checkpoint in a format that is known ({', '.join(f.name for f in FORMATS)})\n"
        f"Expected a folder with {TRACKER} and iter_XXXXXXX folders, or an iter_XXXXXXX folder itself; "
        "or DeepSpeed's: one with 'latest' or 'latest_universal', or the folder of a tag; or FSDP's: .metadata beside .distcp files, "
        "dcp_checkpoint, model_world_size_W_rank_R.pt; or a folder with config.json and safetensors, or an adapter_config.json; "
        "or a state.pt with a model in it, as TorchEngine and torch.save write it."
    )


def trackers() -> frozenset[str]:
    """What the trackers of all formats are called."""
    return frozenset(known.tracker for known in FORMATS if known.tracker)


def _role_folder(path: ReadablePath, models: Mapping[str, ReadablePath], role: str | None) -> tuple[ReadablePath, str]:
    """The folder of one role: the path itself, or a sub-folder of a step such as ``global_step_50/actor``."""
    chosen = [name for name in models if role in (None, name)]
    if len(chosen) == 1:
        return models[chosen[0]], chosen[0]
    if models:
        names = ", ".join(models)
        if role is not None:
            raise NotACheckpoint(
                f"{path}: has no model of the role {role!r}; it has: {names}{did_you_mean(role, models)}"
            )
        raise UsageError(f"{path}: holds several checkpoints: {names}\nName one with --role, or give its folder.")
    return path, role or "actor"


def _contradictory(source: Source) -> list[dict[str, str]]:
    found = [*contradictory_rates(source.state), *contradictory_degrees(source.state.args)]
    if wrong := astray(source.state.other):
        found.append(f"{source.root}: the loader's state contradicts itself: {wrong}")
    return [{"text": text} for text in found]


_OTHERWISE: Rule[Source] = Rule(Fate.NOTE, "{text}", _contradictory, contradicts=True)


def _note_beside(source: Source, path: ReadablePath, folder: ReadablePath, options: ReadOptions) -> None:
    """Where one model of a step was opened, and nobody said that the rest is not wanted."""
    if folder == path or with_role(options, [folder.name]).role is not None:
        return
    beside = [name for name in files_below(path) if not name.startswith(f"{folder.name}/")]
    if beside:
        listed = ", ".join(beside[:_SHOWN]) + (f", … ({len(beside)} files)" if len(beside) > _SHOWN else "")
        source.notes.add(Fate.LOST, f"what lies beside {folder.name}/, of which alone this is: {listed}")


def roles_in(path: ReadablePath) -> list[str]:
    """The models in a step, by role; none where the path is a checkpoint of one."""
    return [*_models(path)]


def _models(path: ReadablePath) -> dict[str, ReadablePath]:
    """The folder of each model by role: those in a step, or the path itself where a format says that it holds several."""
    found = format_at(path, FORMATS)
    return models_in(path) if found is None else dict.fromkeys(roles_of(found, path), path)


def is_model(path: ReadablePath) -> bool:
    """Whether a folder is a checkpoint of one model, in a format that is read."""
    return format_at(path, FORMATS) is not None


def models_in(step: ReadablePath, but: Collection[str] = ()) -> dict[str, ReadablePath]:
    """The folders in a step that are models, by name; what engines keep as they like counts where there is nothing else.

    Args:
        step: The step's folder.
        but: Names of folders that are none.
    """
    there = (
        child for child in sorted(step.iterdir()) if child.is_dir() and not child.name.startswith(".")
    )  # not yet, or no longer
    children = [child for child in there if child.name not in but]
    for formats in ([one for one in FORMATS if one not in OF_ENGINES], OF_ENGINES):
        if found := {child.name: child for child in children if format_at(child, formats) is not None}:
            return found
    return {}

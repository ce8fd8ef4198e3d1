"""Files that go along byte for byte: what a model's folder has besides its weights, in whatever format those are.

A Hugging Face folder has them at its top: the config, the tokenizer, code, a licence. Any other format gets them in
:data:`FOLDER`, beside the step's own files, where no loader looks; whoever reads the step finds them there. So a model that went
through another format is a model that ``from_pretrained`` takes again. Runs of verl keep the same files in ``huggingface``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from mcore_rlhf.core.facts import Fate, Item, Kind, Reason, Rule, Values, same
from mcore_rlhf.errors import Incomplete, Problems
from mcore_rlhf.families.fsdp.state import is_of_one
from mcore_rlhf.families.inventory import WAITING, state_dict_of
from mcore_rlhf.families.lora.names import CONFIG as OF_ADAPTER
from mcore_rlhf.families.megatron.folders import TRACKER
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.module import CONFIG, OF_RANKS, ModuleState, config_in, described
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.run_folders import INNER, RLINF_FOLDER, SPLIT_WEIGHTS, SWIFT, files_of_step
from mcore_rlhf.families.sidecar import STATE, UNHELD, FormerFamily, Sidecar, sidecar_files
from mcore_rlhf.families.source import Source
from mcore_rlhf.families.trainer_counters import COUNTED, STEP, NewCounters, read_counters
from mcore_rlhf.families.trainer_files import ROWS, RunFiles, new_states, of_ranks, rng_item
from mcore_rlhf.storage.leftovers import (
    OPTIMIZER,
    CarriedFiles,
    Leftover,
    leftovers,
    look_into,
    of_trainer,
    reason_of_name,
)
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pieces import DESCRIBED, PIECES_INDEX
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.record_file import StoredFile

from .base import FileLayout, Format, Target, TargetFile

FOLDER = "mcore_rlhf/carried"
"""Where they lie in a format that has no place for them."""
_OF_THE_MODEL = (CONFIG, "generation_config.json")
"""They describe a whole model, which an adapter is none of."""
_VERL = "huggingface"
"""Beside Megatron's files, or their parts.

Source: verl v0.7, ``verl/utils/checkpoint/fsdp_checkpoint_manager.py``, ``megatron_checkpoint_manager.py``.
"""
_TOKENIZER = "tokenizer"
"""In the step's folder, where a target of the same format has it too. Source: Megatron-LM main (0.20), ``training/checkpointing.py``
(``save_tokenizer_assets``)."""
_TRACKERS = ("latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py")
"""Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``save_checkpoint``, ``_copy_recovery_script``)."""
_SHOWN = 20


def with_carried(source: Source, known: Format | None, stubs: Sequence[str]) -> Source:
    """A source with what lies beside its files: what waits for the way back, and the files that go along.

    Its model is described by the config among them where nothing else does it.

    Args:
        source: As its reader opened it.
        known: Its format; None of what is read under another name, and never written.
        stubs: Further classes that may become inert stubs.
    """
    source = replace(source, of_run=_of_run(source, stubs))
    if known is not None and known.tags:
        source = _with_trainers(source, stubs)
    source = source if known is not None and known.own_sidecar else _with_origin(source, stubs)
    if known is not None and known.model_folder:
        family = ModuleState.of(source)
        place = "" if family is None else family.place  # of a further model, which the description at the top is not of
        opened = {file.path for file in source.files} - {f"{place}{CONFIG}"} | ({CONFIG} if place else set())
        found = leftovers(source.root, opened, stubs)
        if source.optimizer is None:
            source.notes.through([_BESIDE], [item.path for item in found if of_trainer(item.path) == OPTIMIZER])
        inner = (
            DESCRIBED if (source.root / DESCRIBED / CONFIG).is_file() and not (source.root / CONFIG).is_file() else ""
        )
        return replace(
            source, carried=CarriedFiles(source.root, found, of_model=True, inner=place.rstrip("/") or inner)
        )
    tokenizer = (_TOKENIZER,) if known is not None and known.tokenizer_beside else ()
    folder = _folder_of(source, (FOLDER, _VERL, SPLIT_WEIGHTS, DESCRIBED, *tokenizer))
    if folder is not None:
        index = [PIECES_INDEX.rpartition("/")[2]] if folder.name == DESCRIBED else []
        weights = [PurePosixPath(file.path) for file in source.files if reason_of_name(file.path) is Reason.WEIGHTS]
        index += [
            file.name for file in weights if source.root / file.parent == folder
        ]  # in which the weights themselves lie
        carried: CarriedFiles | None = CarriedFiles(folder, leftovers(folder, index, stubs))
    else:
        carried = (
            _beside_the_tag(source, stubs) if known is not None and known.tags else _beside_the_iteration(source, stubs)
        )
    source = replace(source, carried=carried)
    if ModuleState.of(source) is None:
        return source
    waits = FormerFamily.of(source).config if source.origin else {}
    return described(source, lambda: (config_in(carried) if carried else {}) or waits)


def _with_trainers(source: Source, stubs: Sequence[str]) -> Source:
    """A run of DeepSpeed's with what its trainer keeps beside the folder of the tag: the schedule, the ranks' random states.

    Sources: accelerate 1.15.0, ``accelerator.py`` (``save_state``); transformers 5.23.0, ``trainer.py`` (``_save_checkpoint``).
    """
    rows = [row for row in ROWS if row.lie_in(source.root)]
    if source.optimizer is None or len(_tags(source)) != 1 or len(rows) != 1:
        return source
    (row,) = rows
    return _with_random_states(_with_schedule(source, row, stubs), row, stubs)


def _with_schedule(source: Source, row: RunFiles, stubs: Sequence[str]) -> Source:
    """With the one beside the tag, unless DeepSpeed has another of its own in it."""
    if not (source.root / row.scheduler).is_file():
        return source
    opened, own = read_pt(source.root, row.scheduler, stubs=stubs), source.state.scheduler
    tree = opened.materialize(opened.tree)
    if own is not None and not same(own, tree):
        return source
    held = state_dict_of(tree, row.scheduler, source.notes)
    source.notes.through([_SCHEDULED], [row.scheduler] if held is not None else [])
    state = replace(source.state, scheduler=None if held is None else dict(held))
    files = (*source.files, StoredFile.of_zip(row.scheduler, opened.directory))
    return replace(source, state=state, family=replace(ModuleState.needed(source), beside=row), files=files)


def _with_random_states(source: Source, row: RunFiles, stubs: Sequence[str]) -> Source:
    """With those of every rank of the tag; of other ranks than its own they are left where they lie."""
    try:
        ranks, world = len(row.rng_files(source.root)), source.parallel.world_size
    except Incomplete as error:
        source.notes.add(Fate.LOST, f"random states: {error}")
        return source
    if ranks != world:
        source.notes.through([_OF_OTHERS], {"theirs": of_ranks(ranks), "own": of_ranks(world)} if ranks else {})
        return source
    rng, stored = row.read_rng(source.root, stubs)
    return replace(
        source, family=replace(ModuleState.needed(source), beside=row, rng=rng), files=(*source.files, *stored)
    )


def _with_origin(source: Source, stubs: Sequence[str]) -> Source:
    """What waits beside the files of a format that has a place for all else, or above them."""
    above = (parent for file in source.files[:1] for parent in PurePosixPath(file.path).parents)
    place = next((parent for parent in above if (source.root / parent / STATE).exists()), None)
    if place is None:
        return source
    found = Sidecar.kept(source.root / place, stubs, source.notes)
    if found is None:
        return source
    folder = "" if place == PurePosixPath() else f"{place}/"
    return replace(source, origin=found.origin, files=(*source.files, *sidecar_files(source.root, folder)))


def _of_run(source: Source, stubs: Sequence[str]) -> tuple[Leftover, ...]:
    """The files of the step that lie beside it, each looked into as whoever unpickles it would."""
    megatron = MegatronState.of(source)
    if megatron is None or megatron.located is None or megatron.located.iteration is None:
        return ()
    root, problems = megatron.located.root, Problems()
    beside = root if isinstance(root, Path) else None
    found = [
        Leftover(name, (root / name).stat().st_size, look_into(root / name, stubs, problems, beside=beside))
        for name in files_of_step(root, megatron.located.iteration)
    ]
    problems.raise_if_any()
    return tuple(found)


def unopened(source: Source) -> tuple[Leftover, ...]:
    """Every file of the step that was opened which no reader looked into, by path relative to the step's folder.

    Args:
        source: As it was opened; what it has in :attr:`~mcore_rlhf.families.source.Source.carried` is not among them.
    """
    if source.carried is not None and source.carried.of_model:
        return ()
    placed = (file.path for file in source.files if "/" in file.path or not _is_trainers(source.root))
    own, step = _step_folder(placed), step_of(source)
    opened = {str(PurePosixPath(file.path).relative_to(step)) for file in source.files}
    taken = [FOLDER]
    beside, folder = None if source.carried is None else source.carried.folder, source.root / step
    if beside is not None and beside.name in (_TOKENIZER, DESCRIBED, _VERL) and folder in beside.parents:
        taken.append(beside.relative_to(folder).as_posix())
    if str(step) != (own or "."):
        opened.update(_TRACKERS)
        taken += _tags(source) - {own}
    inside = tuple(f"{name}/" for name in taken)
    return tuple(item for item in leftovers(source.root / step, opened) if not item.path.startswith(inside))


def step_of(source: Source) -> PurePosixPath:
    """The folder of the step that was opened, relative to the source's root: a role's own, where its files lie in one inside it."""
    step = _step_folder(file.path for file in source.files)
    return PurePosixPath("" if step in (INNER, RLINF_FOLDER) or _is_trainers(source.root) else step)


def _is_trainers(root: ReadablePath) -> bool:
    """Whether a folder is one step of a trainer that has its own state in it, beside the folder of the tag or of the model.

    Source: transformers 5.23.0, ``trainer.py`` (``_save_checkpoint``); accelerate 1.15.0, ``accelerator.py`` (``save_state``).
    """
    return any(of_trainer(child.name) and child.is_file() for child in root.iterdir())


def bring_along(source: Source, target: Target, wanted: Format, write: WriteOptions) -> None:
    """Let a target that does not look at files itself take those of its source, and say what stays behind.

    Args:
        source: What the target is made of.
        target: The target.
        wanted: Its format.
        write: May say what lies beside the tag in the run that it is for; else that is what lay beside the source's.
    """
    family, row = ModuleState.of(source), write.run_of.beside
    if row is None and family is not None and wanted.name == source.format:
        if not write.run_of.name:
            row = family.beside
        elif family.beside is not None:  # a format that is a trainer's own has written them
            target.report.through([OF_RANKS], family)
    if source.origin and not wanted.own_sidecar:
        _leave_origin(source, target)
    files = {} if source.carried is None else source.carried.files
    if wanted.model_folder and wanted.adapter:
        taken = {*target.texts, *(file.path for file in target.files), *_OF_THE_MODEL}
        target.carried = {name: path for name, path in files.items() if name not in taken}
        target.report.through([GO_ALONG], target.carried)
    elif not wanted.model_folder:
        own = _place(source, target, wanted, _step_folder(file.path for file in target.files), row)
        place = PurePosixPath(target.described) if target.described else own
        if row is not None and family is not None:
            _beside_the_new_tag(source, family, target, row)
            if write.run_of.beside is not None and row.counters and _put_counters(source, target, row, write.like):
                files.pop(row.counters, None)
        described = source.family.config
        texts = {} if source.carried is None else dict(source.carried.texts)
        if described and described != (  # what the user gave, or what the run says now
            FormerFamily.of(source).config if source.carried is None else config_in(source.carried)
        ):
            files.pop(CONFIG, None)
            texts[CONFIG] = json.dumps(described, indent=2) + "\n"
        target.texts.update({str(place / name): text for name, text in texts.items()})
        target.carried = {str(place / name): path for name, path in files.items()}
        goes = source.of_run if wanted.family == MegatronState.names else ()
        of_run = {file.path: source.root / file.path for file in goes if file.reason is None}
        target.carried |= of_run
        target.report.through([GO_ALONG], {**files, **of_run})


def _beside_the_new_tag(source: Source, family: ModuleState, target: Target, row: RunFiles) -> None:
    """Put schedule, random states and counters where the run's trainer looks for them, beside the tag.

    Its own files of a tag of as many ranks are as they were; a run that is made new gets what its loader asks for.
    """
    trees, made = dict[str, object](), row is not family.beside
    if any(file.path == row.scheduler for file in source.files) or (made and is_of_one(source.state.scheduler)):
        trees[row.scheduler] = source.state.scheduler
    rng, of_each, world = family.rng, [rng_item(rank) for rank in range(len(family.rng))], target.parallel.world_size
    if world != len(rng) and made and source.optimizer is not None:
        at = source.state.iteration
        rng = new_states(at, world)
        target.report.through(
            [_NEW_STATES], {"ranks": of_ranks(world), "at": at, **({"of": of_each} if of_each else {})}
        )
    elif world != len(rng) and rng:
        target.report.through([_OTHER_WORLD], {"had": of_ranks(len(rng)), "ranks": of_ranks(world), "of": of_each})
        rng = ()
    trees |= {row.rng_name(rank, world): row.spelled(states) for rank, states in enumerate(rng)}
    target.report.through([_BESIDE_NEW], list(trees))
    target.files += tuple(TargetFile(name, partial(FileLayout.of_tree, tree)) for name, tree in trees.items())


_NEW_STATES: Rule[Values] = Rule(Fate.DERIVED, "rng: new states for {ranks}, from iteration {at}", dict)
_OTHER_WORLD: Rule[Values] = Rule(
    Fate.LOST, "random states of {had}: the tag becomes one of {ranks}, which begin with new ones", dict
)


def _put_counters(source: Source, target: Target, row: RunFiles, like: str | None) -> bool:
    """Put the run's counters beside the tag, unless those that go along are of this step; whether that was done."""
    before = NewCounters(source, row, {}).beside
    if before.get(STEP) == source.state.iteration:
        return False
    shown = read_counters(Path(like).expanduser(), row) if like is not None else {}
    found = NewCounters(source, row, shown or before)
    target.report.through(COUNTED, found)
    if before:
        target.report.add(Fate.DERIVED, f"{row.counters}: counted on to this step", Item(Kind.FILE, row.counters))
    target.texts[row.counters] = found.text()
    return True


def _place(source: Source, target: Target, wanted: Format, step: str, row: RunFiles | None) -> PurePosixPath:
    """Where files that go along lie beside a target's own."""
    if wanted.model_beside:
        return PurePosixPath(step, wanted.model_beside)
    if row is not None:
        return PurePosixPath()  # where the trainer itself has them
    own = source.carried is not None and source.carried.folder.name == _TOKENIZER and source.format == target.format
    return PurePosixPath(step, _TOKENIZER if own else FOLDER)


def _leave_origin(source: Source, target: Target) -> None:
    """Put what waits for the way back beside the target's files."""
    folder = _step_folder(file.path for file in target.files)
    texts, lost = Sidecar(origin=source.origin).texts(f"{folder}/" if folder else "")
    target.texts.update(texts)
    target.holds = {**target.holds, WAITING: source.origin}
    target.report.through(UNHELD, lost)


def _listed(paths: Iterable[str]) -> str:
    shown = list(paths)
    more = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f", and {more} more" if more > 0 else "")


GO_ALONG: Rule[Mapping[str, ReadablePath]] = Rule(Fate.KEPT, "{found}: byte for byte", _listed)
"""What is said of files that are taken over."""
_SCHEDULED: Rule[list[str]] = Rule(Fate.NOTE, "lr_scheduler: from {found}, beside the folder of the tag", _listed)
_OF_OTHERS: Rule[Mapping[str, str]] = Rule(
    Fate.LOST, "random states of {theirs} lie beside the folder of the tag, which is of {own}", lambda found: found
)
_BESIDE_NEW: Rule[list[str]] = Rule(Fate.KEPT, "beside the folder of the tag: {found}", _listed)
_BESIDE: Rule[list[str]] = Rule(Fate.NOTE, "the optimizer lies beside the weights, and is not read: {found}", _listed)
"""Of weights whose optimizer is there; what becomes of it is the account's to say."""


def _folder_of(source: Source, names: Sequence[str]) -> ReadablePath | None:
    """Where the files of a source that is no model's folder lie: beside the step's own, or above them."""
    inner = [PurePosixPath(file.path).parents for file in source.files[:1]]
    for place in (*(str(parent) for parents in inner for parent in parents), "."):
        for name in names:
            folder = source.root / place / name
            if folder.is_dir():
                return folder
    beside = source.root.parent / _VERL
    return beside if source.root.name == INNER and beside.is_dir() else None


def _beside_the_tag(source: Source, stubs: Sequence[str]) -> CarriedFiles | None:
    """What a trainer leaves beside the tag of a DeepSpeed run: config, tokenizer, what a script has registered.

    Sources: transformers 5.23.0, ``trainer.py`` (``_save_checkpoint``); accelerate 1.15.0, ``accelerator.py`` (``save_state``).
    """
    family = ModuleState.of(source)
    described = any((source.root / name).is_file() for name in (CONFIG, OF_ADAPTER))
    row = None if family is None else family.beside
    if not described and row is None:
        return None
    tags, own = _tags(source), {*_TRACKERS, *(file.path for file in source.files)}
    found = [i for i in leftovers(source.root, own, stubs) if PurePosixPath(i.path).parts[0] not in tags]
    if not described and row is not None:  # a folder of states alone: nothing in it is the model's
        found = [item for item in found if row.registered and PurePosixPath(item.path).match(row.registered)]
    return CarriedFiles(source.root, tuple(found)) if found else None


def _beside_the_iteration(source: Source, stubs: Sequence[str]) -> CarriedFiles | None:
    """What ms-swift leaves beside the only iteration of a step: its settings, the model as Hugging Face has it, tokenizer and weights."""
    megatron = MegatronState.of(source)
    located = None if megatron is None else megatron.located
    if located is None or located.iteration is None or not (located.root / SWIFT).is_file():
        return None
    if [one.name for one in located.root.glob("iter_*")] != [located.folder.name]:
        return None
    own = {TRACKER, *(file.path for file in source.files)}
    found = [
        item for item in leftovers(located.root, own, stubs) if not item.path.startswith(f"{located.folder.name}/")
    ]
    return CarriedFiles(located.root, tuple(found))


def _tags(source: Source) -> set[str]:
    return {path.parent.name for path in source.root.glob("*/*_states.pt")}


def _step_folder(paths: Iterable[str]) -> str:
    """The folder that all files of a target have in common: ``iter_0000050``, a tag's; empty where they lie at the top."""
    first = {PurePosixPath(path).parts[0] if "/" in path else "" for path in paths}
    return first.pop() if len(first) == 1 else ""

"""ModelOpt's state in its folder beside the checkpoint's own files; see :mod:`mcore_rlhf.families.megatron.modelopt`."""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule
from mcore_rlhf.families.megatron.folders import FoundIteration
from mcore_rlhf.families.megatron.modelopt import FOLDER, KEY, of_modules, without_modules
from mcore_rlhf.families.megatron.new_run import NewRun
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.base import FileLayout, TargetFile
from mcore_rlhf.storage.pt import Pt, read_pt
from mcore_rlhf.storage.record_file import StoredFile

from .folders import COMMON, CONFIG, CONFIG_TEXT, DistFolder

ITEM = Item(Kind.VALUE, KEY)


def modelopt_in(located: FoundIteration, options: ReadOptions) -> tuple[object | None, tuple[StoredFile, ...]]:
    """The state that lies in an iteration's folder, and its files; None where there is none.

    Args:
        located: The checkpoint.
        options: Further classes that may become inert stubs.

    Raises:
        CheckpointError: It is damaged, or asks for code.
    """
    folder = located.folder / FOLDER
    if not (folder / CONFIG).is_file() and not (folder / COMMON).is_file():
        return None, ()
    if not (folder / COMMON).is_file():  # as megatron-core writes such folders since 0.19
        opened = DistFolder.open(replace(located, folder=folder), options)
        return dict(opened.top), opened.files()
    pt = read_pt(located.root, (folder / COMMON).relative_to(located.root).as_posix(), stubs=options.stubs)
    return pt.materialize(pt.tree), (StoredFile.of_zip(pt.file, pt.directory),)


def modelopt_files(run: NewRun, folder: str) -> tuple[list[TargetFile], dict[str, str | bytes]]:
    """Its files in a new checkpoint: what is loaded, and the small one that says how it was written.

    Args:
        run: The checkpoint that is to be written.
        folder: Folder of its iteration.
    """
    state = run.source.state.other.get(KEY)
    if state is None:
        return [], {}
    path = f"{folder}/{FOLDER}"
    layout = FileLayout(Chunks(), (), Pt(lambda: without_modules(state)))
    return [TargetFile(f"{path}/{COMMON}", lambda: layout)], {f"{path}/{CONFIG}": CONFIG_TEXT}


def _state(run: NewRun) -> object:
    return run.source.state.other.get(KEY)


RULES: tuple[Rule[NewRun], ...] = (
    Rule(Fate.LOST, KEY + ": VPP {0.choices.parallel.vpp}: ModelOpt loads it from torch_dist with one model chunk per stage alone",
         lambda r: _state(r) is not None and r.choices.parallel.vpp > 1, [ITEM]),
    Rule(Fate.LOST, f"{KEY}: {{found}}: what belongs to single modules is in no torch_dist checkpoint; the rest is in {FOLDER}/",
         lambda r: r.choices.parallel.vpp == 1 and of_modules(_state(r)), [ITEM]),
    Rule(Fate.KEPT, f"{KEY}: in the folder {FOLDER}, where ModelOpt looks for it",
         lambda r: _state(r) is not None and r.choices.parallel.vpp == 1 and not of_modules(_state(r)), [ITEM]),
)  # fmt: skip
"""Where ModelOpt's state is, and what of it finds no place."""

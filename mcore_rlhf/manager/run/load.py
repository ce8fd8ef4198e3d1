"""Loading: which step a run resumes from, and that step, opened, checked and agreed on by all ranks.

It is installed with one undo for the whole run, and only then the first tensor is overwritten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.engines.base import LoadRequest, PreparedLoad
from mcore_rlhf.engines.stateful import Undo, torch_values
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, Problem, Problems, StorageError, Unreadable
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.paths import ReadablePath, cannot_open
from mcore_rlhf.storage.patience import patiently
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.store import StorePath

from ..rlhf.state import tensor_file_stems
from .candidates import Candidates, Resume, StepToTry
from .checks import check_file
from .options import LOG, ManagerOptions, Reporter
from .retention import left_behind
from .rng import Policy, RngKeeper, RngState, captured, put_back
from .snapshot import DATA_FILE, STATE_FILE, Components
from .steps import MANIFEST, RNG_FILE
from .world import World, raisable

T = TypeVar("T")

_HALF_FILLED = (
    "It was being copied: live tensors hold something of both. Load again, this step or another, before training on."
)


_MAY_BE_SOUND = (
    "The step may be sound, so no older one is taken for it. Try again; or name another step, or put this one in quarantine: "
    "mcore-rlhf steps {root} --quarantine {step}"
)


@dataclass(slots=True)
class StepLoad:
    """A step on its way into a run, on one rank.

    Args:
        folder: The step's folder, or a single model's.
        step: Its number, as far as it is known.
        parts: What the run consists of.
        world: The ranks.
        rng: What happens to RNG states where the layout is another one.
        optimizer: Whether optimizers are restored.
        mirrored: Whether it lies in the mirror of the root.
        went_back: Once it is loaded, on rank 0: whether there are newer steps in the root that is its own, or nobody can say.
    """

    folder: ReadablePath
    step: int
    parts: Components
    world: World
    rng: Policy
    optimizer: bool = True
    mirrored: bool = False
    went_back: bool = False
    report: Report = field(default_factory=Report)
    manifest: Manifest | None = None
    _models: dict[str, PreparedLoad] = field(default_factory=dict)
    _files: list[ReadablePath] = field(default_factory=list)
    _rng: RngState | None = None
    _data: dict[str, object] | None = None
    _state: tuple[str, dict[str, object]] | None = None

    def prepare(self) -> None:
        """Open everything and compare it with the run; nothing is changed.

        Raises:
            CheckpointError: All that does not fit, in one error.
            OSError: Something cannot be looked at.
        """
        self.report, self._models, self._files = Report(), {}, []
        if (self.folder / MANIFEST).is_file():
            self.manifest = _consistent(Manifest.read(self.folder / MANIFEST), self.parts.roles, self.folder / MANIFEST)
        problems = Problems()
        self._note_roles(problems)
        for role in self.parts.roles:
            self._collect(problems, partial(self._prepare_role, role), f"{role}: ")
        for prepare in (self._prepare_state, self._prepare_data, self._prepare_rng):
            self._collect(problems, prepare)
        problems.raise_if_any()

    def _collect(self, problems: Problems, action: Callable[[], None], whose: str = "") -> None:
        try:
            action()
        except CheckpointError as error:
            problems.add(type(error), f"{whose}{error}")

    @property
    def nbytes(self) -> int:
        """Length of the files that this rank reads from, as far as they are still there."""
        return sum(file.stat().st_size for file in dict.fromkeys(self._files) if file.is_file())

    def role_folder(self, role: str) -> ReadablePath:
        """Where a role's files are: a single model may also lie in the folder itself."""
        below = self.folder / role
        alone = len(self.parts.roles) == 1 and self.manifest is None and not below.is_dir()
        return self.folder if alone else below

    def _note_roles(self, problems: Problems) -> None:
        saved = {str(part["role"]) for part in self.manifest.parts} if self.manifest else set(self.parts.roles)
        missing = [role for role in self.parts.roles if role not in saved or not self.role_folder(role).is_dir()]
        if missing:
            there = ", ".join(sorted(saved - set(missing))) or "none"
            problems.add(
                Incomplete,
                f"{self.folder}: the run has the roles {', '.join(self.parts.roles)}; the step lacks {', '.join(missing)}",
                f"The step has: {there}. Resume from another step, or build the run without these roles.",
            )
        for role in sorted(saved - set(self.parts.roles)):
            self.report.add(Fate.NOTE, f"{role}: is in the step, and the run has no such role; it is not loaded")

    def _prepare_role(self, role: str) -> None:
        folder = self.role_folder(role)
        if not folder.is_dir():
            return
        prepared = self.parts.roles[role].prepare_load(LoadRequest(folder, role, self.step or None, self.optimizer))
        self._models[role] = prepared
        self._files += prepared.files
        self.report.extend((fate, f"{role}: {text}") for fate, text in prepared.report.lines)

    def _prepare_state(self) -> None:
        path = self.folder / STATE_FILE
        if self.parts.state is None:
            return
        if not path.is_file():
            self.report.add(
                Fate.LOST, "RLHF state: the step has none; counters, KL coefficient and statistics start anew"
            )
            return
        try:
            text = reading.read_text(path)
        except UnicodeDecodeError as error:
            raise Corrupt(f"{path}: is damaged: not UTF-8 text: {error}") from error
        tensors = {}
        for stem in tensor_file_stems(text, str(path)):
            pt = read_pt(path.parent, f"{stem}.pt")
            tensors[stem] = torch_values(pt.materialize(pt.tree))
            self._files.append(path.parent / f"{stem}.pt")
        self.parts.state.check_load(text, tensors, str(path))
        self._state = text, tensors
        self._files.append(path)
        self.report.add(Fate.KEPT, "RLHF state")

    def _prepare_data(self) -> None:
        path = self.folder / DATA_FILE
        if self.parts.data is None:
            return
        if not path.is_file():
            self.report.add(Fate.LOST, "data: the step has no data sampler; prompts start from the beginning")
            return
        pt = read_pt(path.parent, path.name)
        self._data = torch_values(pt.materialize(pt.tree))
        self._files.append(path)
        self.report.add(Fate.KEPT, "data sampler")

    def _prepare_rng(self) -> None:
        path = self.folder / RNG_FILE
        if not path.is_file():
            self._rng = self._models_rng()
            return
        pt = read_pt(path.parent, path.name)
        keeper = self._keeper()
        self._rng = keeper.chosen(torch_values(pt.materialize(pt.tree)), str(path), self.step, self.report)
        self._files.append(path)

    def _models_rng(self) -> RngState | None:
        """Another trainer's step: what its model files hold, as far as they hold any."""
        held = next((prepared.rng for prepared in self._models.values() if prepared.rng is not None), None)
        if held is None:
            text = "random states: the step has none of every rank; those of this run are left as they are"
            self.report.add(Fate.LOST, text)
            return None
        text = "random states: the step has none of every rank; those of the model's own files are taken"
        self.report.add(Fate.DERIVED, f"{text}: data-parallel ranks share one")
        return dict(held)

    def _keeper(self) -> RngKeeper:
        layout = self.world.layout(self.parts.layout)
        return RngKeeper(self.world.index, len(self.world.rank_names), layout, self.parts.rng, self.rng)

    def check_bytes(self, share: int, shares: int, whole: bool = False) -> None:
        """Verify this rank's share of the checksums of everything that any rank will read.

        Args:
            share, shares: Which share, of how many.
            whole: Whether everything that the manifest lists is verified, read or not.

        Raises:
            CheckpointError: Bytes are damaged; all damaged files are named.
        """
        listed = [self.folder / name for name in self.manifest.files] if whole and self.manifest else []
        mine = [str(file.path if isinstance(file, StorePath) else file) for file in (*self._files, *listed)]
        wanted = sorted({file for files in self.world.all_gather(mine) for file in files})
        problems = Problems()
        for path in wanted[share::shares]:
            self._collect(problems, partial(check_file, self._file(path), self.folder, self.manifest))
        problems.found.sort(key=_is_unread)  # what is known to be damaged comes first
        problems.raise_if_any()

    def _file(self, text: str) -> ReadablePath:
        """A file that another rank names."""
        here = self.folder
        return StorePath(here.store, PurePosixPath(text)) if isinstance(here, StorePath) else Path(text)

    def install(self, undo: Undo) -> None:
        """Do all that may refuse, of all roles, the data and the RNG states; no tensor of a model is filled yet.

        Args:
            undo: One for the whole run: told, before anything changes, how it is put back.

        Raises:
            CheckpointError: A part refused; it is named.
        """
        undo.note(partial(put_back, captured(self.parts.rng), self.parts.rng))
        for role, prepared in self._models.items():
            with _naming(role):
                prepared.install(undo)
        if self._data is not None and self.parts.data is not None:
            with _naming("data"):
                self.parts.data.install(self._data, undo)
        if self._state is not None and self.parts.state is not None:
            self.parts.state.check_load(*self._state, str(self.folder / STATE_FILE))
        with _naming("random states"):
            self._keeper().restore(self._rng)

    def fill(self) -> None:
        """What cannot refuse any more: the models' tensors, the RLHF state; and the RNG states, whoever drew from them.

        Raises:
            CheckpointError: A file that was sound cannot be read any more.
        """
        for role, prepared in self._models.items():
            with _naming(role, _HALF_FILLED):
                prepared.fill()
        if self._state is not None and self.parts.state is not None:
            self.parts.state.load_from(*self._state, str(self.folder / STATE_FILE))
        self._keeper().restore(self._rng)


def _is_unread(problem: Problem) -> bool:
    return problem.kind is Unreadable


@contextmanager
def _naming(what: str, advice: str = "Nothing of the run was changed: all of it was put back.") -> Iterator[None]:
    """Whose state it was, and what is to be thought of the run now."""
    try:
        yield
    except Exception as error:
        kind, text = (StorageError, str(error)) if isinstance(error, OSError) else raisable(error)
        raise kind(f"{what}: {text}\n{advice}") from error


def _consistent(manifest: Manifest, roles: Iterable[str], where: ReadablePath) -> Manifest:
    """The manifest, in which a role that has files is also named: nothing else tells a name that was damaged from another.

    Raises:
        Corrupt: It is not.
    """
    named = [part.get("role") for part in manifest.parts]
    nameless = [
        role for role in roles if role not in named and any(file.startswith(f"{role}/") for file in manifest.files)
    ]
    if nameless or not all(isinstance(name, str) for name in named):
        raise Corrupt(
            f"{where}: is damaged: it has files of {', '.join(nameless) or 'a role'}, and names the roles {named}"
        )
    return manifest


class _Damaged(Exception):
    """What makes an automatic resume try an older step. A model that does not fit is not damage: it would not fit that one."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class Resumer:
    """Finds a step and loads it, on all ranks together.

    Args:
        root: The folder of all steps.
        parts: What the run consists of.
        world: The ranks.
        options: The manager's.
        reporter: Hears of steps that are skipped, and of the one that is loaded.
        optimizer: Whether optimizers are restored.
    """

    root: Path
    parts: Components
    world: World
    options: ManagerOptions
    reporter: Reporter
    optimizer: bool
    _candidates: Candidates = field(init=False)

    def __post_init__(self) -> None:
        self._candidates = Candidates(self.root, self.options, self.reporter)

    def load(self, resume: Resume, must_exist: bool) -> StepLoad | None:
        """Load what was asked for.

        Returns:
            The step that was loaded; None where there was none and none had to be.

        Raises:
            CheckpointError: See :meth:`~.manager.CheckpointManager.load`.
        """
        if resume.kind == "none":
            return None
        started = time.monotonic()
        candidates = self._agreed(resume)
        tried: list[StepToTry] = []
        while todo := [candidate for candidate in candidates if candidate not in tried]:
            tried.append(todo[0])
            prepared = self._prepared(todo[0], skip=resume.kind == "auto")
            if prepared is not None:
                self._apply(prepared, started)
                return prepared
            if resume.kind == "auto" and (len(todo) == 1 or not self._is_still(todo[0])):
                candidates = self._agreed(resume)  # another run may meanwhile have replaced what was listed
        if must_exist or tried:
            raise self._candidates.nothing_intact()
        if self.world.rank == 0:
            self.reporter.say("load", None, f"nothing to resume in {self.root}: starting from the beginning")
        return None

    def _agreed(self, resume: Resume) -> list[StepToTry]:
        """What to try, in order, as rank 0 sees it."""
        look = partial(_read, self.root, partial(self._candidates.of, resume))
        found = self.world.on_all_ranks("resuming", lambda: look() if self.world.is_rank0 else [])
        return self.world.broadcast(found)

    def _is_still(self, candidate: StepToTry) -> bool:
        """Whether a step was not deleted, or saved again, meanwhile: as rank 0 sees it."""
        return self.world.broadcast(self._candidates.is_still(candidate))

    def _prepared(self, candidate: StepToTry, skip: bool) -> StepLoad | None:
        folder, mirrored = self._candidates.folder(candidate), not candidate.where
        load = StepLoad(folder, candidate.step, self.parts, self.world, self.options.rng, self.optimizer, mirrored)
        if candidate.unread is not None:
            candidate.unread.require_read()
        try:
            self._prepare(load)
        except (_Damaged, Unreadable) as failure:
            error = failure.error if isinstance(failure, _Damaged) else failure
            gone = skip and not self._is_still(candidate)
            if not gone and skip and error is failure:
                raise Unreadable(f"{error}\n{_MAY_BE_SOUND.format(root=self.root, step=candidate.step)}") from None
            if not skip:
                raise error from None
            why = "it was deleted, or saved again, while it was read" if gone else str(error)
            self.reporter.say("skip", candidate.step, f"{_called(load)} is not resumed from: {why}")
            return None
        return load

    def _prepare(self, load: StepLoad) -> None:
        """Whether a step that cannot be loaded is damaged, or does not fit, its checksums say: its text may say anything.

        Raises:
            _Damaged: It is damaged; on all ranks.
            Unreadable: On some rank it cannot be read; on all ranks.
            CheckpointError: It does not fit.
        """
        what = f"loading {load.folder.name}"
        try:
            self.world.on_all_ranks(what, partial(_read, load.folder, partial(patiently, load.prepare)))
        except Exception as error:
            self._stop_if_unread(error, what)
            self._check(load, whole=True)
            unread = isinstance(error, StorageError) or load.manifest is None  # on any one rank; now perhaps it can be
            if self.world.any_rank([unread])[0]:
                raise _Damaged(error) from error
            raise
        if self.options.check == "bytes":
            self._check(
                load, whole=self.world.is_one_of_several
            )  # worlds load one by one, and must come to the same step

    def _check(self, load: StepLoad, whole: bool) -> None:
        world, what = self.world, f"checking {load.folder.name}"
        check = partial(load.check_bytes, world.rank, world.size, whole)
        try:
            world.on_all_ranks(what, partial(_read, load.folder, check))
        except Exception as error:
            self._stop_if_unread(error, what)
            raise _Damaged(error) from error

    def _stop_if_unread(self, error: Exception, what: str) -> None:
        """An I/O error, on whichever rank, says nothing of the step: the next older one must not be taken for it."""
        self.world.raise_on_all(error if isinstance(error, Unreadable) else None, what)

    def _apply(self, load: StepLoad, started: float) -> None:
        """All ranks install, or none has; only then the first tensor is overwritten."""
        with Undo() as undo:
            self.world.on_all_ranks(f"restoring {load.folder.name}", partial(load.install, undo))
        self.world.on_all_ranks(f"copying {load.folder.name}", load.fill)
        try:
            self._tell(load, time.monotonic() - started)
        except (CheckpointError, OSError) as error:  # the state is live: whatever fails from here on is no failed load
            load.went_back = True  # for all that is known
            LOG.warning("rank=0 step=%d: after the load: %s", load.step, error)

    def _tell(self, load: StepLoad, seconds: float) -> None:
        if self.world.rank != 0:
            return
        for fate, text in load.report.lines:
            LOG.log(30 if fate is Fate.LOST else 20, "rank=0 step=%d event=load %s: %s", load.step, fate.value, text)
        text, speed = (
            f"resumed from {_called(load)}; next step {load.step + 1}",
            load.nbytes / max(seconds, 1e-9) / 1e9,
        )
        self.reporter.say("load", load.step, text, seconds=seconds, bytes=load.nbytes, gb_per_s=speed)
        own = load.mirrored or load.folder.parent == self.root
        newer = left_behind(self.root, load.step, ()) if own else []
        load.went_back = bool(newer)
        if newer and load.folder.parent == self.root and not self.options.read_only:
            LOG.warning(
                "rank=0 step=%d: newer steps are there (%s); the first save of this run puts them in quarantine, so that "
                "nothing resumes from what it leaves behind; this step stays while the run goes on, whatever the rules on keeping say",
                load.step,
                ", ".join(str(found.step) for found in newer),
            )


def _read(folder: ReadablePath, action: Callable[[], T]) -> T:
    """Read.

    Raises:
        CheckpointError: What the action raised, or what the file system refused.
    """
    try:
        return action()
    except OSError as error:
        raise cannot_open(error, Path(error.filename) if error.filename else folder) from error


def _called(load: StepLoad) -> str:
    return str(load.folder) if load.mirrored else load.folder.name

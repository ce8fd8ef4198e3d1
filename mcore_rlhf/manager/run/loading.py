"""Loading one step: opened, checked and agreed on by all ranks, installed with one undo for the whole run, and then filled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.engines.base import LoadRequest, PreparedLoad
from mcore_rlhf.engines.stateful import Undo
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, Problems, StorageError
from mcore_rlhf.storage import regular
from mcore_rlhf.storage.manifest import Manifest, crc_of_file
from mcore_rlhf.storage.ptfile import read_pt

from ..state import tensor_file_stems
from .components import Components
from .crew import Crew
from .own_checksums import check_itself
from .rng import FILE as RNG_FILE
from .rng import Policy, RngKeeper, RngState, captured, put_back
from .snapshot import DATA_FILE, STATE_FILE
from .steps import MANIFEST
from .world import told

T = TypeVar("T")


@dataclass(slots=True)
class StepLoad:
    """A step on its way into a run, on one rank.

    Args:
        folder: The step's folder, or a single model's.
        step: Its number, as far as it is known.
        parts: What the run consists of.
        crew: All ranks.
        rng: What happens to random states where the layout is another one.
        optimizer: Whether optimizers are restored.
    """

    folder: Path
    step: int
    parts: Components
    crew: Crew
    rng: Policy
    optimizer: bool = True
    report: Report = field(default_factory=Report)
    manifest: Manifest | None = None
    _models: dict[str, PreparedLoad] = field(default_factory=dict)
    _files: list[Path] = field(default_factory=list)
    _rng: RngState | None = None
    _data: dict[str, object] | None = None
    _state: tuple[str, dict[str, object]] | None = None

    def prepare(self) -> None:
        """Open everything and compare it with the run; nothing is changed.

        Raises:
            CheckpointError: All that does not fit, in one error.
        """
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

    def role_folder(self, role: str) -> Path:
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
            text = regular.read_text(path)
        except UnicodeDecodeError as error:
            raise Corrupt(f"{path}: is damaged: not UTF-8 text: {error}") from error
        tensors = {}
        for stem in tensor_file_stems(text, str(path)):
            pt = read_pt(path.parent, f"{stem}.pt")
            tensors[stem] = pt.materialize(pt.tree)
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
        self._data = pt.materialize(pt.tree)
        self._files.append(path)
        self.report.add(Fate.KEPT, "data sampler")

    def _prepare_rng(self) -> None:
        path = self.folder / RNG_FILE
        if not path.is_file():
            self._rng = self._models_rng()
            return
        pt = read_pt(path.parent, path.name)
        keeper = self._keeper()
        self._rng = keeper.chosen(pt.materialize(pt.tree), str(path), self.step, self.report)
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
        layout = self.crew.layout(self.parts.layout)
        return RngKeeper(self.crew.index, len(self.crew.names), layout, self.parts.rng, self.rng)

    def check_bytes(self, share: int, shares: int, whole: bool = False) -> None:
        """Verify this rank's share of the checksums of everything that any rank will read.

        Args:
            share, shares: Which share, of how many.
            whole: Whether everything that the manifest lists is verified, read or not.

        Raises:
            CheckpointError: Bytes are damaged; all damaged files are named.
        """
        listed = [self.folder / name for name in self.manifest.files] if whole and self.manifest else []
        wanted = sorted({str(file) for files in self.crew.world.gathered([*self._files, *listed]) for file in files})
        problems = Problems()
        for path in wanted[share::shares]:
            self._collect(problems, partial(self._check_file, Path(path)))
        problems.raise_if_any()

    def _check_file(self, path: Path) -> None:
        entry = self.manifest.files.get(path.relative_to(self.folder).as_posix()) if self.manifest else None
        if entry is None:
            return check_itself(path) if self.manifest is None else None
        found = crc_of_file(path)
        if found != entry.crc32:
            raise Corrupt(f"{path}: is damaged: CRC-32 {found:08x}, the manifest says {entry.crc32:08x}")
        return None

    def install(self, undo: Undo) -> None:
        """Do all that may refuse, of all roles, the data and the random states; no tensor of a model is filled yet.

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
        """What cannot refuse any more: the models' tensors, the RLHF state; and the random states, whoever drew from them.

        Raises:
            CheckpointError: A file that was sound cannot be read any more.
        """
        for role, prepared in self._models.items():
            with _naming(role, _HALF_FILLED):
                prepared.fill()
        if self._state is not None and self.parts.state is not None:
            self.parts.state.load_from(*self._state, str(self.folder / STATE_FILE))
        self._keeper().restore(self._rng)


_HALF_FILLED = (
    "It was being copied: live tensors hold something of both. Load again, this step or another, before training on."
)


@contextmanager
def _naming(what: str, advice: str = "Nothing of the run was changed: all of it was put back.") -> Iterator[None]:
    """Whose state it was, and what is to be thought of the run now."""
    try:
        yield
    except Exception as error:
        kind, text = (StorageError, str(error)) if isinstance(error, OSError) else told(error)
        raise kind(f"{what}: {text}\n{advice}") from error


def _consistent(manifest: Manifest, roles: Iterable[str], where: Path) -> Manifest:
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


def together(crew: Crew, what: str, action: Callable[[], T]) -> T:
    """Do something on every rank; if it fails on one, it fails on all.

    Raises:
        CheckpointError: This rank's own error, or that of the first rank that has one.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except OSError as failure:
        error = StorageError(f"{what}: {failure}")
    except Exception as failure:  # whatever it is, the others must not wait for this rank
        error = failure
    crew.world.raise_together(error, what)
    return result  # type: ignore[return-value]

"""Reading the weight files of a folder: one, or several with an index, safetensors or ``.bin``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import PurePosixPath

from mcore_rlhf.core.catalog import Chunk, Record
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, NotACheckpoint, Problems, Unsupported
from mcore_rlhf.families.inventory import Known, Unplaced
from mcore_rlhf.families.run_folders import SPLIT_WEIGHTS, is_split
from mcore_rlhf.families.trainer_files import numbered
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath, beneath, cannot_open
from mcore_rlhf.storage.pieces import PIECES_INDEX, PLACES, PLACES_VERSION, read_pieces
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.stored import StoredTensor

from .files import BIN, MODEL_STEM, file_name, index_name, shard_count

_OF_AN_INDEX: Known = {
    "weight_map": None, "metadata": dict.fromkeys(("total_size", "total_parameters", "format", "mergekit_version")),
}  # fmt: skip
"""What an index has, all of which follows from the files, or says who wrote it. Sources: transformers 5.23.0, ``modeling_utils.py``
(``save_pretrained``); mergekit, ``io/tensor_writer.py``."""
_AGAIN = "Download or copy the folder again; every file that the index names must be in it."


@dataclass(slots=True)
class Series:
    """The tensors of one state dict, in one file or several.

    Args:
        tensors: What it holds, by name.
        shared: Second names of the same stored elements: ``{alias: owner}``.
        files: Its files, the index included.
        notes: What a reader should know of it.
        unplaced: Texts of its files' headers, which nobody reads.
    """

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    files: list[StoredFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unplaced: Unplaced = field(default_factory=Unplaced)


def find_series(folder: ReadablePath, number: int = 0) -> tuple[str, str] | None:
    """Stem and ending of the model's weight files in a folder, or None where there are none; as transformers looks for them.

    Args:
        folder: Where they lie.
        number: Which of several models, as accelerate counts them.

    Source: transformers 5.23.0, ``modeling_utils.py`` (``_get_resolved_checkpoint_files``).
    """
    if number:
        stems = ((f"{stem}{numbered(number)}", ending) for ending, stem in MODEL_STEM.items())
        return next((found for found in stems if (folder / file_name(*found)).is_file()), None)
    for ending, stem in MODEL_STEM.items():
        if (folder / file_name(stem, ending)).is_file() or (folder / index_name(stem, ending)).is_file():
            return stem, ending
    return next(((stem, ending) for ending, stem in MODEL_STEM.items() if _loose(folder, stem, ending)), None)


def weights_folder(path: ReadablePath) -> ReadablePath:
    """The folder of the weights: the path itself, or what a role's folder of verl's has as such."""
    return path / SPLIT_WEIGHTS if is_split(path) and (path / SPLIT_WEIGHTS).is_dir() else path


@dataclass(frozen=True, slots=True)
class Scattered(StoredTensor):
    """A tensor that ranks have piece by piece; as a stored one it stands for its first piece, with the whole's shape.

    Args:
        chunks: Its pieces.
    """

    chunks: tuple[Chunk, ...] = ()


def read_parts(root: ReadablePath) -> Series:
    """Read the pieces of all ranks.

    Args:
        root: The folder.

    Raises:
        CheckpointError: See :func:`~mcore_rlhf.storage.pieces.read_pieces`.
    """
    series, found = Series(), read_pieces(root)
    for file in found.files:
        series.files.append(StoredFile(file.file, file.nbytes, file.records))
        series.unplaced.look(file.file, file.metadata, {PLACES: None, PLACES_VERSION: None}, "metadata")
    if (root / PIECES_INDEX).is_file():
        series.files.append(StoredFile.at(root, PIECES_INDEX))
    for name, tensor in found.tensors.items():
        first = tensor.pieces[0]
        series.tensors[name] = Scattered(first.record, first.start, tensor.global_shape, first.strides, tensor.pieces)
    return series


def read_series(root: ReadablePath, stem: str, ending: str, stubs: tuple[str, ...] = ()) -> Series:
    """Open the files of a state dict; no tensor is read.

    Args:
        root: The checkpoint's folder.
        stem: What the files' names begin with; may have a folder before it.
        ending: ``safetensors`` or ``bin``.
        stubs: Further pickled classes that may become inert stubs, in ``.bin`` files.

    Raises:
        CheckpointError: Files are missing, damaged, or not what the index says; all problems together.
    """
    reading = _SeriesReader(root, ending, stubs)
    whole, index = file_name(stem, ending), index_name(stem, ending)
    if beneath(root, whole).is_file():
        reading.read([whole])
    elif beneath(root, index).is_file():
        reading.read_indexed(index)
    else:
        reading.read(_complete(root, stem, ending))
        reading.series.notes.append(f"{index} is not there; the names of the files say that all are")
    reading.problems.raise_if_any()
    return reading.series


def read_json(root: ReadablePath, file: str) -> dict[str, object]:
    """A JSON object in the checkpoint's folder.

    Raises:
        NotACheckpoint: There is no such file.
        Corrupt: It is no JSON, or no object.
        StorageError: It cannot be read.
    """
    path = beneath(root, file)
    try:
        found = reading.read_json(path)
    except OSError as error:
        raise cannot_open(error, path) from error
    except ValueError as error:
        raise Corrupt(f"{path}: is no JSON: {error}\nCopy the file again from where it came from.") from None
    if not isinstance(found, dict):
        raise Unsupported(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def _loose(root: ReadablePath, stem: str, ending: str) -> list[str]:
    """Shards without an index."""
    folder = root / PurePosixPath(stem).parent
    found = sorted(folder.glob(f"{PurePosixPath(stem).name}-*-of-*.{ending}"))
    return [path.relative_to(root).as_posix() for path in found if shard_count(path.name) is not None]


def _complete(root: ReadablePath, stem: str, ending: str) -> list[str]:
    """All shards, where their names say how many there are."""
    found = _loose(root, stem, ending)
    if not found:
        raise NotACheckpoint(f"{root}: has neither {file_name(stem, ending)} nor {index_name(stem, ending)}")
    count = shard_count(found[0]) or 1
    expected = (file_name(stem, ending, number, count) for number in range(1, count + 1))
    missing = list(
        islice((name for name in expected if name not in found), 5)
    )  # their names may say that there are a billion
    if missing or len(found) > count:
        odd = f"{', '.join(missing)} missing" if missing else f"{len(found)} files instead of {count}"
        raise Incomplete(f"{root}: {index_name(stem, ending)} is not there, and of its files: {odd}\n{_AGAIN}")
    return found


_OF_A_DELTA = ("delta_encoding", "base_version")
"""What the index of a difference between two versions of weights says; its files have compressed bytes under the weights' names.

Source: slime 624b824, ``slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py`` (``_write_delta_files``).
"""


@dataclass
class _SeriesReader:
    root: ReadablePath
    ending: str
    stubs: tuple[str, ...]
    series: Series = field(default_factory=Series)
    problems: Problems = field(default_factory=Problems)
    places: dict[Record, dict[tuple[object, ...], str]] = field(default_factory=dict)

    def read(self, files: Iterable[str]) -> dict[str, str]:
        """Read files; returns which tensor is in which."""
        where: dict[str, str] = {}
        for file in files:
            try:
                tensors = self._tensors(file)
            except CheckpointError as error:
                self.problems.add_error(error)
                continue
            for name, tensor in tensors.items():
                if name in where:
                    self.problems.add(Corrupt, f"{self.root}: {name} is in {where[name]} and again in {file}")
                where[name] = file
                self._add(name, tensor)
        return where

    def read_indexed(self, index: str) -> None:
        """Read the files that an index names, and hold it against them."""
        text = read_json(self.root, index)
        weights = text.get("weight_map")
        if not isinstance(weights, dict) or not weights or not all(isinstance(file, str) for file in weights.values()):
            raise Unsupported(f"{self.root / index}: expected a weight_map of names and files, found {weights!r:.80}")
        about = text.get("metadata")
        marks = [key for key in _OF_A_DELTA if isinstance(about, dict) and key in about]
        if marks:
            raise Unsupported(
                f"{self.root / index}: its metadata has {', '.join(marks)}: the files hold what changed since another version, "
                "and are no model\nGive the run's checkpoint, or the folder of whole weights to which the differences were applied."
            )
        self._note_file(index)
        self.series.unplaced.look(index, text, _OF_AN_INDEX)
        folder = PurePosixPath(index).parent
        named = {name: (folder / file).as_posix() for name, file in weights.items()}
        files = list(dict.fromkeys(named.values()))
        missing = [file for file in files if not beneath(self.root, file).is_file()]
        for file in missing:
            count = sum(other == file for other in named.values())
            self.problems.add(
                Incomplete, f"{self.root / file}: is not there; {index} says that {count} tensors are in it", _AGAIN
            )
        found = self.read(file for file in files if file not in missing)
        if not self.problems:
            self._compare(index, named, found)

    def _compare(self, index: str, named: Mapping[str, str], found: Mapping[str, str]) -> None:
        for name, file in named.items():
            if found.get(name) != file:
                really = f"it is in {found[name]}" if name in found else "none of the files has it"
                self.problems.add(
                    Incomplete, f"{self.root / index}: says that {name} is in {file}, but {really}", _AGAIN
                )
        for name, file in found.items():
            if name not in named:
                self.problems.add(Corrupt, f"{self.root / file}: holds {name}, which {index} does not name", _AGAIN)

    def _tensors(self, file: str) -> Mapping[str, StoredTensor]:
        from mcore_rlhf.storage.containers import open_tensors  # who only asks what a folder is opens none

        opened = open_tensors(self.root, file, self.stubs)
        self.series.files.append(StoredFile(file, opened.nbytes, opened.records))
        self.series.unplaced.look(file, opened.metadata, {}, "metadata")
        return opened.tensors

    def _add(self, name: str, tensor: StoredTensor) -> None:
        """Note a tensor; one that lies exactly where another does is its second name."""
        place = (tensor.start, tensor.shape, tensor.strides)
        owner = self.places.setdefault(tensor.record, {}).setdefault(place, name) if self.ending == BIN else name
        if owner == name or 0 in tensor.shape:
            self.series.tensors[name] = tensor
        else:
            self.series.shared[name] = owner

    def _note_file(self, file: str) -> None:
        self.series.files.append(StoredFile.at(self.root, file))

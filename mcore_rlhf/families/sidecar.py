"""``mcore_rlhf/state.json``: what a checkpoint's format has no place for, beside the step's own files, so that no way back loses it.

Every format has it in the same place, under the same names, as typed JSON (:mod:`mcore_rlhf.storage.exact_json`); long arrays lie in
``mcore_rlhf/state.safetensors``. No framework's loader looks into the folder. A field that says nothing is left out::

    {"format": "mcore_rlhf.state", "version": 1, "iteration": 50, "origin": {"iteration": 50, "args": {…}, "spelling": "local"}}

Which fields there are is the format's matter: Hugging Face's folders and torch's DCP have a place for tensors alone, DeepSpeed's have
none for Megatron's arguments and scheduler, Megatron's none for DeepSpeed's client state, and peft's none for a base model. What a
conversion from one family to another leaves for the way back (:class:`FormerFamily`) is the field ``origin``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import DType
from mcore_rlhf.core.facts import ANY, Fate, Item, Rule
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, Problems, Unsupported
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath, beneath, cannot_open
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.records import check_of, convert, record_of, told

from .inventory import item_in
from .module import ModuleState
from .source import Source, TrainingState

if TYPE_CHECKING:
    from mcore_rlhf.models.huggingface.table import Spelling
    from mcore_rlhf.storage.exact_json import LongArray

FOLDER = "mcore_rlhf"
STATE, ARRAYS = f"{FOLDER}/state.json", f"{FOLDER}/state.safetensors"
_FORMAT, _VERSION = "mcore_rlhf.state", 1

_PASSED_OVER: ContextVar[bool] = ContextVar("passed over", default=False)


@contextmanager
def passed_over() -> Iterator[None]:
    """Open checkpoints as a framework's loader sees them, which does not look into the folder."""
    token = _PASSED_OVER.set(True)
    try:
        yield
    finally:
        _PASSED_OVER.reset(token)


def _item_of(where: str) -> Item:
    """The item of which a part could not be kept: ``other/replay/0 (Queue)`` is of the value ``replay``."""
    section, *keys = where.partition(" (")[0].split("/")
    at = 2 if section == "groups" else 0  # groups/0/fields/lr
    return item_in("optimizer" if section == "values" else section, keys[at] if len(keys) > at else ANY)


UNHELD: Sequence[Rule[Sequence[str]]] = [
    Rule(Fate.LOST, "{what}: no JSON can hold it", lambda lost: [{"what": what, "of": [_item_of(what)]} for what in lost])
]  # fmt: skip
"""What becomes of what :meth:`Sidecar.texts` could not keep."""


@dataclass(frozen=True, slots=True)
class _Own:
    """What is neither the training state nor a module's."""

    optimizer: str = ""
    states: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    origin: Mapping[str, object] = field(default_factory=dict)
    base: Mapping[str, object] = field(default_factory=dict)
    fused: int = 0
    parallel: Mapping[str, object] = field(default_factory=dict)
    ranks: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Sidecar(_Own):
    """Everything that is carried beside. The fields of ``state`` and ``module`` are keys of the file, as all others are.

    Args:
        optimizer: What kind of optimizer wrote the states.
        states: Names of the optimizer's tensor states that lie in files of their own.
        frozen: Parameters that are not trained, without buffers.
        dtypes: Types in which the model computes, by parameter, where the files hold fp32 masters.
        origin: What waits for the way back to another family; see :attr:`~.source.Source.origin`.
        base: The model that an adapter belongs to.
        fused: Groups of heads that share keys and values, where these are one parameter of the optimizer with their queries; 0 elsewhere.
        parallel: The degrees of the run, where its files are of whole tensors and say none.
        ranks: What is of single ranks and no tensor, their random states above all, rank by rank.
        state: The training state.
        module: What formats under a module's own names keep besides; its ``optimizer`` is ``values`` in the file.
    """

    state: TrainingState = field(default_factory=lambda: TrainingState(0))
    module: ModuleState = field(default_factory=ModuleState)

    @classmethod
    def of(
        cls, state: TrainingState, module: ModuleState, specs: Sequence[ParamSpec], origin: Mapping[str, object], **more: Any
    ) -> Sidecar:  # fmt: skip
        """All that a checkpoint under a module's names has besides tensors.

        Args:
            state: Its training state.
            module: What such formats keep besides.
            specs: Its parameters.
            origin: What waits in it.
            more: Further fields.
        """
        still = tuple(s.name for s in specs if not s.trainable and s.name not in module.buffers)
        module = replace(module, rng=(), beside=None)  # which are files' of their own, or lost by name
        return cls(state=state, module=module, frozen=still, origin=origin, **more)

    def _by_key(self) -> dict[str, object]:
        """What stands under each key of the file."""
        own = told(self, sparse=True)
        state, module = own.pop("state"), own.pop("module")
        values = {"values": module["optimizer"]} if "optimizer" in module else {}
        parts = {**state, **{key: value for key, value in module.items() if key in _OF_MODULE}}
        return {
            **own,
            **{key: value for key, value in parts.items() if value or key not in ("iteration", "tag")},
            **values,
        }

    def texts(self, folder: str = "") -> tuple[dict[str, str | bytes], list[str]]:
        """The files by path, and what could not be put into them, by place: ``other/replay/0 (Queue)``.

        Args:
            folder: The step's, with a ``/`` at the end; empty at the top.
        """
        from mcore_rlhf.storage.exact_json import Encoder

        arrays: dict[str, LongArray] = {}
        encoder = Encoder(arrays=arrays)
        content = encoder.encode({"format": _FORMAT, "version": _VERSION, **self._by_key()}, "")
        texts: dict[str, str | bytes] = {folder + STATE: json.dumps(content, indent=1, allow_nan=False) + "\n"}
        if arrays:
            texts[folder + ARRAYS] = _safetensors(arrays)
        return texts, [what.removeprefix("/") for what in encoder.lost]

    def told(self) -> object:
        """The same for a JSON of a format's own; what no JSON can hold is left out of it."""
        from mcore_rlhf.storage.exact_json import Encoder

        return Encoder().encode(self._by_key(), "")

    @classmethod
    def of_told(cls, told: object, where: str) -> Sidecar:
        """From :meth:`told`.

        Args:
            told: That.
            where: The file, for messages.

        Raises:
            CheckpointError: It is something else.
        """
        from mcore_rlhf.storage.exact_json import decode

        return _read(decode(told, where), where)

    @classmethod
    def kept(cls, folder: ReadablePath, stubs: Sequence[str], notes: Report) -> Sidecar | None:
        """The same for who can do without: where it is damaged, what it keeps is lost by name.

        Args:
            folder, stubs: See :meth:`read`.
            notes: Told so.
        """
        try:
            return cls.read(folder, stubs)
        except CheckpointError as error:
            notes.add(Fate.LOST, f"what {STATE} keeps: {error}")
            return None

    @classmethod
    def read(cls, folder: ReadablePath, stubs: Sequence[str] = (), *, needed: bool = False) -> Sidecar | None:
        """What lies beside a step's files, or None where nothing does, or :func:`passed_over`.

        Args:
            folder: The step's folder.
            stubs: Further classes that may become inert stubs.
            needed: Whether the format's own files are not understood without it: nobody passes over it then.

        Raises:
            Corrupt: It is not what :meth:`texts` makes.
            Unsupported: A newer version wrote it.
            Untrusted: It names classes that are not allowed.
            StorageError: It cannot be read.
        """
        if _PASSED_OVER.get() and not needed:
            return None
        path = folder / STATE
        try:
            content = reading.read_json(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise cannot_open(error, path) from error
        except ValueError as error:
            raise Corrupt(f"{path}: is no JSON: {error}\nCopy the file again from where it came from.") from None
        from mcore_rlhf.storage.exact_json import decode  # most checkpoints have no such file
        from mcore_rlhf.storage.safetensors import read_safetensors

        _check_version(content, path)
        arrays = read_safetensors(folder, ARRAYS) if (folder / ARRAYS).is_file() else None

        def array(name: str) -> bytes:
            stored = arrays.tensors[name].record if arrays is not None else None
            if stored is None:
                raise KeyError(name)
            with reading.opened(beneath(folder, ARRAYS)) as data:
                return data.read(stored.byte_offset, stored.nbytes)

        own = {name: value for name, value in content.items() if name not in ("format", "version")}
        try:
            return _read(decode(own, f"{path}: ", stubs, array), f"{path}: ")
        except (Corrupt, Incomplete) as error:
            raise type(error)(f"{error}\nCopy the file again, or convert again.") from None


_OF_STATE = frozenset(item.name for item in fields(TrainingState))
_OF_MODULE = frozenset(item.name for item in fields(ModuleState)) - {
    "optimizer",
    "packs_experts",
    "laid_out",
    "rng",
    "beside",
    "spelled",
    "place",
}
"""Keys of the file that are fields of a part. What two of a module's others say waits in ``origin``, or is of one format's files."""


def _read(found: object, where: str) -> Sidecar:
    """The fields, each of the type that it should have, or all that are not."""
    if not isinstance(found, Mapping):
        return record_of(Sidecar, found, where.removesuffix(": "))
    problems = Problems()

    def part(kind: Any, keys: Collection[str], **needed: object) -> Any:
        return check_of(kind, True)({**needed, **{k: v for k, v in found.items() if k in keys}}, where, problems)

    values = convert(found.get("values", {}), Mapping[str, object], (where, "values"), problems)
    own = part(_Own, found.keys() - _OF_STATE - _OF_MODULE - {"values"})
    state = part(TrainingState, _OF_STATE, iteration=0)
    module = part(ModuleState, _OF_MODULE, tag="", packs_experts=True)
    problems.raise_if_any()
    kept = {item.name: getattr(own, item.name) for item in fields(_Own)}
    return Sidecar(**kept, state=state, module=replace(module, optimizer=values))


def sidecar_files(root: ReadablePath, folder: str = "") -> list[StoredFile]:
    """The files that there are.

    Args:
        root: The checkpoint's.
        folder: The step's, relative to it, with a ``/`` at the end; empty at the top.
    """
    there = (folder + name for name in (STATE, ARRAYS))
    return [StoredFile.at(root, file) for file in there if (root / file).is_file()]


def _check_version(content: object, path: ReadablePath) -> None:
    if not isinstance(content, dict):
        raise Unsupported(f"{path}: expected a JSON object, found {type(content).__name__}")
    if content.get("format") != _FORMAT:
        raise Unsupported(
            f"{path}: was not written by mcore_rlhf; another program's {path.parent.name} folder is not read"
        )
    if content.get("version") != _VERSION:
        raise Unsupported(
            f"{path}: version {content.get('version')!r}; this release reads {_VERSION}\nUpgrade mcore_rlhf."
        )


def _safetensors(arrays: Mapping[str, LongArray]) -> bytes:
    """A file of small arrays, in memory."""
    header: dict[str, object] = {}
    at = 0
    for name, array in arrays.items():
        header[name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [at, at + len(array.data)]}
        at += len(array.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *(array.data for array in arrays.values())))


ORIGIN = "mcore_rlhf_origin"
"""The key of ``config.json`` under which arguments wait that nobody declares, and once of client state, for everything."""
WAITS = f"waits in {STATE} for the way back"


@dataclass(frozen=True, slots=True)
class FormerFamily:
    """What is there; empty for a run that was never another family's.

    Args:
        values: Of Megatron's: ``iteration``, ``config``, ``args``, ``spelling``, ``experts``, ``mtp``, ``scheduler``, ``by_steps``,
            ``other``; of a module's: ``iteration``, ``module``, ``laid_out``.
    """

    values: Mapping[str, object]

    @classmethod
    def of(cls, source: Source) -> FormerFamily:
        """That of a source."""
        return cls(source.origin)

    @property
    def args(self) -> dict[str, object]:
        """Megatron's arguments, as far as they are plain values."""
        return self._section("args")

    @property
    def config(self) -> dict[str, object]:
        """The model's description."""
        return self._section("config")

    @property
    def other(self) -> dict[str, object]:
        """Counters."""
        return self._section("other")

    def scheduler(self, iteration: int) -> dict[str, object] | None:
        """The scheduler's state, unless the run went on since."""
        return self._section("scheduler") or None if self.values.get("iteration") == iteration else None

    @property
    def by_steps(self) -> bool:
        """Whether that counts steps."""
        return self.values.get("by_steps") is True

    def spelling(self, implementation: str | None) -> Spelling:
        """Whose names Megatron's side is to have.

        Args:
            implementation: What the user asked for, or None. Transformer Engine's experts are one ``TEGroupedMLP``, as in
                all runs with ``--moe-grouped-gemm``, unless the run had others.
        """
        from mcore_rlhf.models.huggingface import table  # all architectures, which opening a source needs not

        said = self.values.get("spelling")
        engine = implementation or (said if isinstance(said, str) else table.TRANSFORMER_ENGINE)
        experts = table.SEQUENTIAL if engine == table.LOCAL else table.GROUPED
        if engine == said:
            experts = str(self.values.get("experts") or experts)
        return table.Spelling(engine, experts, str(self.values.get("mtp") or table.MTP_MODEL_LAYER))

    @property
    def laid_out(self) -> dict[str, object]:
        """How the keys of its DCP folder were made, whatever step it is at now."""
        return self._section("laid_out")

    def module(self, iteration: int) -> dict[str, object]:
        """What a run under a module's names had, unless the run went on since."""
        return self._section("module") if self.values.get("iteration") == iteration else {}

    def _section(self, name: str) -> dict[str, object]:
        found = self.values.get(name)
        return dict(found) if isinstance(found, Mapping) else {}


def origin_of_megatron(source: Source, config: Mapping[str, object], spelling: Spelling) -> dict[str, object]:
    """What a Megatron source leaves.

    Args:
        source: It.
        config: The model's description.
        spelling: Whose names its parameters have.
    """
    old = source.state
    return {
        "iteration": old.iteration, "config": dict(config), "args": plain(old.args), "spelling": spelling.implementation,
        "experts": spelling.experts, "mtp": spelling.mtp, "scheduler": dict(old.scheduler or {}), "other": plain(old.other),
        **({"by_steps": True} if old.by_steps else {}),
    }  # fmt: skip


def origin_of_module(source: Source, family: ModuleState) -> dict[str, object]:
    """What a source under a module's own names leaves: client state, scheduler, loss scaler, settings; nothing for a model alone.

    Args:
        source: It.
        family: What it has besides.
    """
    old = source.state
    held = {
        "args": old.args, "scheduler": old.scheduler, "grad_scaler": old.grad_scaler, "other": old.other,
        "optimizer": dict(family.optimizer),
    }  # fmt: skip
    left = {key: value for key, value in held.items() if value}
    if not left:
        return {}
    made: dict[str, object] = {"iteration": old.iteration, "module": {**left, "tag": family.tag}}
    return {**made, "laid_out": dict(family.laid_out)} if family.laid_out else made


def plain(values: Mapping[str, object]) -> dict[str, object]:
    """Those of the values that any reader understands: numbers, texts, lists and dictionaries of them."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)

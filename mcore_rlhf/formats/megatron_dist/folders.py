"""Which folders are ``torch_dist`` checkpoints, and what they hold, by the key that Megatron gave it.

What all ranks share lies in ``common.pt``; since 0.19 it is an object among the others, and ``metadata.json`` names no backend for it.

Sources: megatron-core 0.16.1, ``dist_checkpointing/core.py`` (``CheckpointingConfig``, ``maybe_load_config``) and
``dist_checkpointing/strategies/common.py`` (``COMMON_STATE_FNAME``); megatron-core 0.19.2, ``dist_checkpointing/serialization.py``
(``load_common_state_dict``: the file where there is one), ``optimizer/layer_wise_optimizer.py`` (``sharded_state_dict``: its members'
states are ``chained_0.optimizer.state.…``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mcore_rlhf.core.catalog import MASTER, PARAM, Shape
from mcore_rlhf.core.facts import same
from mcore_rlhf.errors import Corrupt, Incomplete, Problems, Unsupported, UsageError
from mcore_rlhf.families.megatron.adapted import BesideIteration
from mcore_rlhf.families.megatron.folders import FoundIteration, locate
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.run_folders import (
    ADAPTED,
    ADAPTED_MODEL,
    ADAPTED_OPTIMIZER,
    INNER,
    SPLIT_BESIDE,
    SPLIT_MODEL,
    adapted_step,
    is_bridged,
    is_split,
    split_beside,
    split_role,
)
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.links import enclose
from mcore_rlhf.storage.paths import ReadablePath, absolute, beneath
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.stored import NAMESPACES

if TYPE_CHECKING:
    from mcore_rlhf.storage.dcp.folder import DcpFolder, DcpObject, DcpTensor

CONFIG = "metadata.json"
COMMON = "common.pt"
SHARED = "common_state"
"""The object that takes the place of ``common.pt`` since 0.19."""
_OF_PART = "content_metadata"
"""Of it, what says how its optimizer is stored. Source: megatron-core 0.16.1, ``dist_checkpointing/serialization.py`` (``save``)."""
_CALLED = ("iter_", "release", INNER, ADAPTED_MODEL, ADAPTED_OPTIMIZER)
"""How the names of folders begin that are looked into where ``metadata.json`` is not there, or cannot be read."""
_OF_FSDP = (b"rng_state.(", b"optimizer.param_to_group_meta.")
"""What ``.metadata`` names in a checkpoint of Megatron-FSDP: random states by ``(pp, tp)``, param groups by parameter.

Source: megatron-core 0.19.2, ``training/checkpointing.py`` (``get_rng_state``), ``optimizer/distrib_optimizer.py``
(``sharded_param_state_fsdp_dtensor``)."""
_OF_TORCH_DCP = (b"checkpoint_version", b"args")
"""What it names in one of ``--ckpt-format torch_dcp``: the keys of a legacy file. Source: the same, ``generate_state_dict``."""
INTEGRITY = "integrity.json"
_INTEGRITY_ADVICE = (
    "Copy the file again from where it was written. Without it the folder is read and its sums are not checked."
)
BACKEND = "torch_dist"
CONFIG_TEXT = json.dumps(
    {"sharded_backend": BACKEND, "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
)
"""The content of ``metadata.json``."""


def is_dist_folder(path: ReadablePath) -> bool:
    """Whether a folder directly holds such a checkpoint, or what is left of one."""
    if "sharded_backend" in _config(path):
        return True
    if path.name.startswith(_CALLED) and (path / METADATA_FILE).is_file():
        named = reading.read_bytes(path / METADATA_FILE)
        marks = (f"{SHARED}/shard_".encode(), *_OF_FSDP)
        return (path / COMMON).is_file() or any(one in named for one in marks) or _is_torch_dcp(named)
    return (path / COMMON).is_file() and ((path / METADATA_FILE).is_file() or any(path.glob("__*_*.distcp")))


def role_part(path: ReadablePath) -> ReadablePath | None:
    """Where the model lies in a role's folder of verl's, or of one whose weights are Hugging Face's files the optimizer; None elsewhere."""
    for found in (path, *path.glob("iter_*")) if adapted_step(path) or (path / ADAPTED).is_file() else ():
        parts = [part for part in (found / ADAPTED_MODEL, found / ADAPTED_OPTIMIZER) if is_dist_folder(part)]
        if parts:
            return parts[0]
    split = ([path / SPLIT_MODEL, *([path / SPLIT_BESIDE[0]] if is_bridged(path) else ())]) if is_split(path) else ()
    return next((part for part in (path / INNER, *split) if is_dist_folder(part)), None)


def is_fsdp_folder(path: ReadablePath) -> bool:
    """Whether a folder is one of Megatron-FSDP."""
    there = not _config(path) and (path / METADATA_FILE).is_file()
    return there and any(name in reading.read_bytes(path / METADATA_FILE) for name in _OF_FSDP)


def is_torch_dcp_folder(path: ReadablePath) -> bool:
    """Whether a folder is one of ``--ckpt-format torch_dcp``."""
    there = not _config(path) and not (path / COMMON).is_file() and (path / METADATA_FILE).is_file()
    return there and not is_fsdp_folder(path) and _is_torch_dcp(reading.read_bytes(path / METADATA_FILE))


def _is_torch_dcp(named: bytes) -> bool:
    return all(one in named for one in _OF_TORCH_DCP)


def locate_dist(path: ReadablePath, step: int | None) -> FoundIteration:
    """Find the checkpoint that a path means, and look at its ``metadata.json``.

    Raises:
        NotACheckpoint: There is none.
        UsageError: Several, and nothing says which; or an optimizer without its model.
        Incomplete: Its save was not finished.
        Unsupported: It is one of another backend of Megatron-core's, or has no arguments.
    """
    located = _in_role(locate(role_part(path) or path, step, is_dist_folder, f"{CONFIG} and {METADATA_FILE}"), path)
    folder = located.folder
    config = _config(folder)
    if is_fsdp_folder(folder) or is_torch_dcp_folder(folder):
        return located
    if not config:
        raise Incomplete(
            f"{folder / CONFIG}: missing or empty; Megatron writes it last: the save was not finished\n"
            "Use an older step, or copy the folder again if it was whole where it came from."
        )
    backend = config.get("sharded_backend")
    if backend != BACKEND:
        raise Unsupported(
            f"{folder / CONFIG}: sharded_backend is {backend!r}, expected {BACKEND!r}\n"
            "Load it with the Megatron that wrote it, and save it with --ckpt-format torch_dist or torch."
        )
    _check_version(folder / CONFIG, config)
    if not (folder / METADATA_FILE).is_file():
        raise Incomplete(
            f"{folder / METADATA_FILE}: missing (a plain ls or cp * passes over it)\nCopy the folder again, or use an older step."
        )
    return located


def _in_role(located: FoundIteration, given: ReadablePath) -> FoundIteration:
    """The same, relative to the role's folder where that has the optimizer in a folder of its own.

    Args:
        located: A folder.
        given: What it was found by.

    Raises:
        UsageError: It is that folder: it holds no model.
    """
    role = split_role(located.folder)
    if role is None:
        step = adapted_step(located.folder)
        return (
            located
            if step is None
            else FoundIteration(step, step / absolute(located.folder).relative_to(absolute(step)), None)
        )
    part = absolute(located.folder).relative_to(role).as_posix()
    if part in SPLIT_BESIDE and absolute(given) != role:
        raise UsageError(f"{located.folder}: holds no model, only what belongs to one\nGive {role}, which has both.")
    enclose(role)  # whoever named the model's part alone gets the others with it
    return FoundIteration(role, role / part, None)


def _beside(located: FoundIteration) -> tuple[str, ...]:
    """The parts of a role beside its model, relative to the root.

    Raises:
        Incomplete: One is missing.
    """
    role = split_role(located.folder)
    parts = () if role is None else split_beside(role)
    if adapted_step(located.folder) is not None and (other := located.folder.parent / ADAPTED_OPTIMIZER).is_dir():
        parts = (other.relative_to(located.root).as_posix(),)
    there = [part for part in parts if located.root / part != located.folder]
    problems = Problems()
    for part in there:
        folder = located.root / part
        whole = {METADATA_FILE: (folder / METADATA_FILE).is_file(), CONFIG: bool(_config(folder))}
        for name in (name for name, there in whole.items() if not there):
            text = f"{folder / name}: missing or empty; the checkpoint has a folder for it, or says so"
            problems.add(Incomplete, text, "Copy the folder again, or use an older step.")
    problems.raise_if_any()
    return tuple(there)


def _check_version(file: ReadablePath, config: dict[str, object]) -> None:
    """Megatron-core registers its strategies by backend and version, and knows version 1 alone; so does this."""
    for key in ("sharded_backend_version", "common_backend_version"):
        if config.get(key, 1) != 1:
            raise Unsupported(
                f"{file}: {key} is {config[key]!r}, and only 1 is known\n"
                "A later Megatron wrote it: save it there with --ckpt-format torch, or use a later mcore_rlhf."
            )


def digests_in(located: FoundIteration) -> dict[str, str]:
    """SHA-256 of the files of a folder by path, as its ``integrity.json`` lists them; none where there is no such list.

    Source: megatron-core 0.19.2, ``dist_checkpointing/validation.py``
    (``save_integrity_manifest``; ``--verify-integrity``, since 0.17.1): ``{"algorithm": "sha256",
    "files": {name: hexadecimal}}``, of everything beside it.

    Raises:
        Corrupt: The list cannot be read.
        Incomplete: Files that it names are not there.
        Unsupported: Its sums are of another kind.
    """
    file, folder = located.folder / INTEGRITY, located.folder
    if not file.is_file():
        return {}
    try:
        listed = reading.read_json(file)
    except ValueError as error:
        raise Corrupt(f"{file}: cannot be read: {error}\n{_INTEGRITY_ADVICE}") from error
    sums = listed.get("files") if isinstance(listed, dict) else None
    if not isinstance(sums, dict) or not all(isinstance(value, str) for value in sums.values()):
        raise Corrupt(f"{file}: expected sums of files by name\n{_INTEGRITY_ADVICE}")
    if listed.get("algorithm") != "sha256":
        raise Unsupported(
            f"{file}: sums are by {listed.get('algorithm')!r}, and only 'sha256' is known\n{_INTEGRITY_ADVICE}"
        )
    problems = Problems()
    for name in sums:
        if not beneath(folder, name).is_file():
            problems.add(Incomplete, f"{folder / name}: missing; {INTEGRITY} lists it", "Copy the folder again.")
    problems.raise_if_any()
    return {(folder / name).relative_to(located.root).as_posix(): value.lower() for name, value in sums.items()}


def integrity_of(sums: Mapping[str, str]) -> str:
    """The content of ``integrity.json``, from the sums of the files beside it by name; see :func:`digests_in`."""
    return json.dumps({"algorithm": "sha256", "files": dict(sorted(sums.items()))}, indent=2)


def _config(path: ReadablePath) -> dict[str, object]:
    """What ``metadata.json`` says; empty where there is none that can be read."""
    file = path / CONFIG
    try:
        config = reading.read_json(file) if file.is_file() else {}
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


MASTERS = {"fully_reshardable": "param", "fully_sharded_model_space": "fp32_param", None: "fp32_param"}
"""What fp32 copies are called, by the kind of sharding; None is the plain optimizer."""

_STATE = re.compile(r"(?:chained_\d{1,18}\.)?optimizer\.state\.(\w+)\.(?:module\.)*(.+)")
_FLAT = re.compile(
    r"(?:chained_(\d{1,18})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,18})\.gbuf_idx_(\d{1,18})\.dtype_.*\.bucket_idx_(\d{1,18})\.(\w+)"
)
_GROUP = re.compile(r"(?:chained_(\d{1,18})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,18})\.(\w+)")
_SHARD = re.compile(r"(?:module\.)*(.+)/shard_(\d{1,18}(?:\.\d{1,18})*)_(\d{1,18}(?:\.\d{1,18})*)")
_SMALL = 1 << 16


@dataclass(frozen=True, slots=True)
class FlatKey:
    """Which bucket of which flat buffer a tensor holds.

    Args:
        member: Number of the chained optimizer.
        group: The data-parallel group that shares it: ranks that differ in nothing but that.
        buffer: Number of the buffer.
        bucket: Number of the bucket.
        state: What it holds: ``param``, ``exp_avg``, …
    """

    member: int
    group: int
    buffer: int
    bucket: int
    state: str


@dataclass(frozen=True, slots=True)
class ShardKey:
    """A part of an object that is in as many parts as ``shape`` says.

    Args:
        key: The object's key.
        index: Which part.
        shape: How many there are.
    """

    key: str
    index: Shape
    shape: Shape


@dataclass(slots=True)
class DistFolder:
    """A checkpoint that was opened; no byte of a tensor was read.

    Args:
        located: Where it is.
        common_file: What holds that which all ranks share, for messages.
        top: That: its content.
        dcp: The sharded rest.
        zips: Files beside those of ``dcp``.
        beside: Files of other folders of the same checkpoint.
        tensors: By state (``param`` for the weight, ``master``, ``exp_avg``, …) and key.
        flat: Buckets of the distributed optimizer, where it is stored in those.
        objects: What is not a tensor.
        groups: ``(chained optimizer, data-parallel group)`` → what that optimizer keeps besides tensors, by key.
        around: What lies in files of their own beside the iteration.
        apart: What another place says otherwise of what all ranks share, which is not taken: its key and the place.
    """

    located: FoundIteration
    common_file: str
    top: Mapping[str, Any]
    dcp: DcpFolder
    zips: tuple[StoredFile, ...] = ()
    beside: tuple[StoredFile, ...] = ()
    tensors: dict[str, dict[str, DcpTensor]] = field(default_factory=dict)
    flat: dict[FlatKey, DcpTensor] = field(default_factory=dict)
    objects: dict[ShardKey, DcpObject] = field(default_factory=dict)
    groups: dict[tuple[int, int], dict[str, DcpObject]] = field(default_factory=dict)
    around: BesideIteration = field(default_factory=BesideIteration)
    apart: tuple[str, ...] = ()
    _values: dict[bytes, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for fqn, tensor in self.dcp.tensors.items():
            self._add_tensor(fqn, tensor)
        for fqn, item in self.dcp.objects.items():
            self._add_object(fqn, item)

    @classmethod
    def open(cls, located: FoundIteration, options: ReadOptions) -> DistFolder:
        """Open a folder.

        Raises:
            CheckpointError: It is incomplete, damaged, or asks for code.
        """
        whole = cls._open(located, located.folder.relative_to(located.root).as_posix(), options)
        for part in _beside(located):
            whole.join(cls._open(located, part, options))
        if adapted_step(located.folder) is not None:
            whole.around = BesideIteration.of(located.root, options)
            whole.top, whole.beside = {**whole.top, **whole.around.top}, (*whole.beside, *whole.around.files)
        return whole

    @classmethod
    def _open(cls, located: FoundIteration, name: str, options: ReadOptions) -> DistFolder:
        """Open one folder of those that a checkpoint lies in."""
        from mcore_rlhf.storage.dcp.folder import DcpFolder  # who only asks what a folder is needs none of it
        from mcore_rlhf.storage.pt import read_pt

        folder = located.root / name
        dcp, zips = DcpFolder.open(folder, located.root, options.stubs), list[StoredFile]()
        apart: tuple[str, ...] = ()
        shared = next((item for fqn, item in dcp.objects.items() if fqn.startswith(f"{SHARED}/")), None)
        if (folder / COMMON).is_file():  # Megatron-core 0.19 prefers it, too: ``serialization.py``
            pt = read_pt(located.root, f"{name}/{COMMON}", stubs=options.stubs)
            file, top = pt.file, pt.materialize(pt.tree)
            zips.append(StoredFile.of_zip(file, pt.directory))
            apart = () if shared is None else _apart(top, unwrapped(shared), f"{dcp.path(shared.place.file)}: {SHARED}")
        else:
            if shared is None:
                raise Unsupported(
                    f"{folder}: has neither {COMMON} nor {SHARED}, and so not the run's arguments: it is not known how to read such a "
                    "folder\nIf a copy left it out, copy it as well."
                )
            file, top = f"{dcp.path(shared.place.file)}: {SHARED}", unwrapped(shared)
        if not isinstance(top, dict):
            raise Unsupported(f"{file}: expected a dictionary, found {type(top).__name__}")
        if folder.name == ADAPTED_OPTIMIZER and adapted_step(folder) is not None:
            top = {"optimizer": top}  # which is saved by itself there, and not as a part
        return cls(located, file, top, dcp, tuple(zips), apart=apart)

    def join(self, other: DistFolder) -> None:
        """Let it have what another folder of the same checkpoint has; of what both have, its own counts."""
        self.apart = (*self.apart, *other.apart, *_apart(self.top, other.top, other.common_file))
        self.top = {**other.top, **self.top}
        self.tensors = {
            state: {**other.tensors.get(state, {}), **self.tensors.get(state, {})}
            for state in (*self.tensors, *other.tensors)
        }
        self.flat = {**other.flat, **self.flat}
        self.objects = {**other.objects, **self.objects}
        self.groups = {
            where: {**other.groups.get(where, {}), **self.groups.get(where, {})}
            for where in (*self.groups, *other.groups)
        }
        self.beside = (*self.beside, *other.files())

    @property
    def model(self) -> Mapping[str, DcpTensor]:
        """The model's own tensors by key."""
        return self.tensors.get(PARAM, {})

    def files(self) -> tuple[StoredFile, ...]:
        """All files with their checksums."""
        return (*self.zips, *self.dcp.files(), *self.beside)

    def value(self, item: DcpObject) -> object:
        """An object's value. Most are small and equal, and are taken apart once.

        Raises:
            CheckpointError: It is damaged, or asks for code.
        """
        if item.place.length > _SMALL:
            return unwrapped(item)
        data = item.data()
        if data not in self._values:
            self._values[data] = unwrapped(item)
        return self._values[data]

    def _add_tensor(self, fqn: str, tensor: DcpTensor) -> None:
        flat, state = _FLAT.fullmatch(fqn), _STATE.fullmatch(fqn)
        if flat is not None:
            member, group, buffer, bucket, name = flat.groups()
            self.flat[FlatKey(int(member or 0), int(group), int(buffer), int(bucket), name)] = tensor
        elif state is not None:
            name = MASTER if state.group(1) in MASTERS.values() else state.group(1)
            self.tensors.setdefault(name, {})[state.group(2)] = tensor
        else:
            self.tensors.setdefault(PARAM, {})[without_wrapper(fqn)] = tensor

    def _add_object(self, fqn: str, item: DcpObject) -> None:
        match = _SHARD.fullmatch(fqn)
        if match is not None and match.group(1) == SHARED:
            return
        if match is None:
            self.objects[ShardKey(fqn, (), ())] = item
            return
        key, index, shape = match.group(1), _numbers(match.group(2)), _numbers(match.group(3))
        group = _GROUP.fullmatch(key)
        if group is not None:
            where = (int(group.group(1) or 0), int(group.group(2)))
            self.groups.setdefault(where, {})[group.group(3)] = item
        else:
            self.objects[ShardKey(key, index, shape)] = item


def _apart(taken: object, other: object, where: str) -> tuple[str, ...]:
    """What two places both say of a checkpoint, and not alike; how each part was stored is its own."""
    if not isinstance(taken, Mapping) or not isinstance(other, Mapping):
        return ()
    both = sorted(str(key) for key in taken.keys() & other.keys() - {_OF_PART})
    return tuple(f"{key} in {where}" for key in both if not same(_values(taken[key]), _values(other[key])))


def _values(value: object) -> object:
    return vars(value) if isinstance(value, NAMESPACES) else value  # in which a NaN is itself


def unwrapped(item: DcpObject) -> object:
    """What an object holds: Megatron-core saves a list of the shards that a rank has under one key.

    Source: megatron-core 0.16.1, ``dist_checkpointing/strategies/torch.py`` (``mcore_to_pyt_state_dict``).

    Raises:
        Unsupported: It is no such list.
    """
    stored = item.load()
    if not isinstance(stored, list) or len(stored) != 1:
        raise Unsupported(f"{item.fqn}: expected a list of one value, found {type(stored).__name__}")
    value: object = stored[0]
    return value


def without_wrapper(fqn: str) -> str:
    """A key without the ``module.`` of a wrapped model, as NeMo writes it."""
    while fqn.startswith("module."):
        fqn = fqn.removeprefix("module.")
    return fqn


def _numbers(text: str) -> Shape:
    return tuple(map(int, text.split(".")))

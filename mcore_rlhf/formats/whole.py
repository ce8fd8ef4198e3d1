"""Formats of whole tensors: one relation says where they lie, for reading and for writing, and files, account and sidecar follow from it.

Under whose names they are, Megatron's or a module's own, the format says (:attr:`~mcore_rlhf.families.source.Names.family`); what follows
from the names nobody has to say, and nobody can say it wrong. What such a format is written with can be had from here.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from errno import ENOENT
from functools import partial
from itertools import zip_longest
from os import strerror
from typing import Any

from mcore_rlhf.core.catalog import (
    FLOATING,
    MASTER,
    PARAM,
    Box,
    Chunk,
    DType,
    Record,
    Shape,
    TensorEntry,
    TensorName,
    dtype_of,
    row_major,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    LayoutMismatch,
    NotACheckpoint,
    Unsupported,
    Untrusted,
    shown,
)
from mcore_rlhf.families.fsdp.model import model_config, num_layers
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, Arguments, check_against_arguments
from mcore_rlhf.families.megatron.complete import refuse_part, require_complete
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.sidecar import FOLDER, STATE, Sidecar, plain, sidecar_files
from mcore_rlhf.families.source import Family, ParamGroup, Source, TrainingState
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.megatron import EMBEDDING, Traits, layer_of, partition_of
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath, beneath
from mcore_rlhf.storage.reading import ByteSource, opened, parse_json
from mcore_rlhf.storage.record_file import Container, Raw, StoredFile

from .base import FileLayout, Format, Target, TargetFile
from .believing import SURPRISES
from .beside import of_ranks_in, run_of, told_run, weights_alone, whole_sidecar, with_degrees
from .places import entry_of, lay, parts_of_ranks, require_places, row_of, rows_of_ranks
from .readback import Written, by_file, differences, placed, surprised

__all__ = [
    "PARAM", "Box", "Chunk", "Container", "DType", "ModuleState", "ParamGroup", "Raw", "ReadablePath", "Record", "Shape", "Sidecar",
    "Source", "StoredFile", "Takes", "TensorEntry", "TensorName", "Tensors", "TrainingState", "WholeFormat", "WriteOptions",
    "dtype_of", "entry_of", "head_of", "lay", "opened", "parse_json", "parts_of_ranks", "plain", "read_head", "read_json",
    "records_of", "row_major", "row_of", "rows_of_ranks", "run_of", "told_run",
]  # fmt: skip


Tensors = Sequence[tuple[TensorName, Shape, DType]]
"""Name, shape and type of all that a folder is to hold."""


class WholeFormat(Format):
    """A format that says where each tensor lies, in any number of parts and files.

    Args:
        markers: Files of its own that every folder has: its index, say.
        weights_alone: Whether its files keep weights, and of a run nothing else.
    """

    own_sidecar = True
    takes: tuple[Takes, ...] = (Takes.DTYPE, Takes.RNG)
    weights_alone: bool = False

    def __init_subclass__(cls) -> None:
        if cls.family not in _OPTIMIZER:
            raise TypeError(f"{cls.__name__}: family is {cls.family!r}; it is one of {', '.join(_OPTIMIZER)}")

    @abstractmethod
    def stored(self, path: ReadablePath, role: str) -> Iterable[TensorEntry]:
        """Every tensor, and where its parts lie.

        Args:
            path: The folder.
            role: Whose model is read; of a folder with several, others' tensors are passed over.
        """

    @abstractmethod
    def laid(self, tensors: Tensors, source: Source, options: WriteOptions) -> Iterable[TensorEntry]:
        """The same of a folder that is to be: which parts lie in which file; where in it, the container says.

        Args:
            tensors: Name, shape and type of all that it is to hold.
            source: Whose they are.
            options: What the user wants of it.
        """

    def texts(self, entries: Sequence[TensorEntry], source: Source) -> dict[str, str | bytes]:
        """Small files, by path: an index, say.

        Args:
            entries: What :meth:`laid` says, with the places in the files.
            source: Whose they are, with the degrees and random states that are to be.
        """
        return {}

    def container(self, file: str, entries: Sequence[TensorEntry], source: Source) -> Container:
        """What kind of file one is: a head, and the records one after the other.

        Args:
            file: Its path.
            entries: The tensors of which it has parts, with these parts.
            source: As :meth:`texts` is given it, for a file that says everything itself.
        """
        return Raw(records_of(entries), self.head(records_of(entries)))

    def head(self, records: Sequence[Record]) -> bytes:
        """What stands before the records in a file that has no other container.

        Args:
            records: They.
        """
        return b""

    def file(self, path: ReadablePath, file: str) -> StoredFile:
        """A file with the checksums in it: none.

        Args:
            path: The folder.
            file: The file's path in it.
        """
        return StoredFile.at(path, file)

    def run(self, path: ReadablePath, entries: Sequence[TensorEntry]) -> Sidecar | None:
        """What files of the format's own say besides tensors, where nothing of ours lies beside; None where they say nothing.

        Args:
            path: The folder.
            entries: What of it is read.
        """
        return None

    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder has one of the files that mark it."""
        return any((path / name).is_file() for name in self.markers)

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open a folder."""
        if not self.detect(path):
            raise NotACheckpoint(f"{path}: has no {' or '.join(self.markers)}")
        role = options.role or "actor"
        others = [other for other in self.roles(path) if other != role]
        entries = [
            entry
            for entry in self.stored(path, role)
            if (options.optimizer or entry.name.state == PARAM) and entry.name.role not in others
        ]
        named = dict.fromkeys((*(record.file for record in records_of(entries)), *self.markers))
        beside = (record.file for other in others for record in records_of(self.stored(path, other)))
        there = (file for file in dict.fromkeys(beside) if file not in named and beneath(path, file).is_file())
        files = tuple(self.file(path, _require_file(path, file)) for file in (*named, *there))
        own, kept = self.run(path, entries), Sidecar.read(path, options.stubs, needed=True)
        if own is not None and kept is not None:
            _refuse_other(path, own, kept)
        return whole_source(self, path, entries, files, options, kept or own)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new folder."""
        report, alone = source.notes.for_target(), self.weights_alone
        view, tensors = whole_tensors(source, replace(options, no_optimizer=options.no_optimizer or alone))
        source = source if alone else with_degrees(source, options, report)
        beside, held = ({}, weights_alone(source, options, report)) if alone else whole_sidecar(source, report)
        kept = replace(source, state=replace(source.state, groups=())) if options.no_optimizer or alone else source
        with surprised(self.name):
            entries = [*self.laid(tensors, source, options)]
            self._refuse_deaf(entries, tensors, source, options)
            containers = {file: self.container(file, of, kept) for file, of in by_file(entries).items()}
            layouts = {file: container.layout(file) for file, container in containers.items()}
            entries = [placed(entry, layouts) for entry in entries]
            made = Written(self.name, entries, layouts, self.texts(entries, kept))
            made.hold_against(tensors, kept, partial(self._again, [*layouts], source.role), report)
        files = (TargetFile(file, partial(_layout, of, containers[file])) for file, of in by_file(entries).items())
        return Target(self.name, view, tuple(files), report, source.parallel, {**made.texts, **beside}, held)

    def _refuse_deaf(
        self, entries: Sequence[TensorEntry], tensors: Tensors, source: Source, options: WriteOptions
    ) -> None:
        """A degree that is asked for is gone by: where the files are those of degree 1, nobody would find it in them."""
        etp = 1 if source.parallel.etp == source.parallel.tp else source.parallel.etp
        for axis, degree, single, degrees in (
            ("tp", options.tp, replace(options, tp=1), {"tp": 1, "etp": etp}),
            ("pp", options.pp, replace(options, pp=1), {"pp": 1, "vpp": 1, "pipeline_layout": None}),
            ("dp", options.dp, replace(options, dp=1), {"dp": 1}),
        ):
            if degree not in (None, 1) and self._lays(entries, tensors, source, single, degrees):
                raise Unsupported(
                    f"--{axis} {degree}: format {self.name} lays the same files with --{axis} 1, for this model\n"
                    "Leave it out. Where larger models are laid the same, too, laid has to go by it, or takes has to be without it."
                )

    def _lays(
        self, entries: Sequence[TensorEntry], tensors: Tensors, source: Source, options: WriteOptions, degrees: Mapping[str, Any]
    ) -> bool:  # fmt: skip
        """Whether other degrees give the same files; it ends at the first tensor that they lay otherwise, or not at all."""
        with suppress(CheckpointError, *SURPRISES):
            source = replace(source, parallel=replace(source.parallel, **degrees))
            return all(one == other for one, other in zip_longest(entries, self.laid(tensors, source, options)))
        return False

    def _again(self, files: Sequence[str], role: str, path: ReadablePath) -> tuple[list[TensorEntry], Sidecar | None]:
        """What the reader makes of what the writer lays out."""
        if not self.detect(path):
            raise NotACheckpoint(f"nothing of it is called {' or '.join(self.markers)}")
        entries = [*self.stored(path, role)]
        for file in files:
            found, there = self.file(path, file), StoredFile.at(path, file)
            if (found.path, found.nbytes) != (file, there.nbytes):
                raise Corrupt(
                    f"file says {shown(found.path)} of {found.nbytes} bytes, and it is {file} of {there.nbytes}"
                )
        return entries, self.run(path, entries)


def _require_file(root: ReadablePath, file: str) -> str:
    """A file of the format's own is one, and none of ours."""
    if file.startswith(f"{FOLDER}/"):
        raise Untrusted(f"{root}: tensors are said to lie in {shown(file)}, which is no file of the format's own")
    if not beneath(root, file).is_file():
        raise FileNotFoundError(ENOENT, strerror(ENOENT), str(root / file))
    return file


def _refuse_other(root: ReadablePath, own: Sidecar, kept: Sidecar) -> None:
    """What stands twice in a folder is the same: its framework may have written its own files since, which knows nothing of ours."""
    if other := differences(own, kept)[-1]:
        listed = "".join(
            f"\n  - {item}: {there} in the format's own files, {here} in {STATE}" for item, there, here in other
        )
        raise LayoutMismatch(
            f"{root}: two places say different things:{listed}\n"
            f"Where the run went on since, its own files are right: take {FOLDER}/ away. Otherwise one of the two was edited."
        )


def _layout(entries: Sequence[TensorEntry], container: Container) -> FileLayout:
    return FileLayout(Chunks.of(entries), records_of(entries), container)


def read_json(path: ReadablePath) -> Any:
    """What an index holds that is JSON.

    Raises:
        Corrupt: It is none.
    """
    try:
        return reading.read_json(path)
    except ValueError as error:
        raise Corrupt(f"{path}: is no JSON: {error}\nCopy the file again from where it came from.") from None


def records_of(entries: Iterable[TensorEntry]) -> list[Record]:
    """The records in which parts of tensors lie, each once, in order."""
    return list(dict.fromkeys(chunk.record for entry in entries for chunk in entry.chunks))


def head_of(value: object) -> bytes:
    """The head of a file as most formats of raw tensors have one: the length of a JSON in 8 bytes, little end first, and the JSON."""
    text = json.dumps(value).encode()
    return len(text).to_bytes(_LENGTH, "little") + text


def read_head(file: ByteSource, start: int = 0) -> tuple[Any, int]:
    """The value in such a head, and where what follows begins.

    Args:
        file: The file.
        start: Where in it the head begins.

    Raises:
        Incomplete: The file ends before.
        ValueError: It is no JSON.
    """
    length, begin = int.from_bytes(file.read(start, _LENGTH), "little"), start + _LENGTH
    if length > file.nbytes - begin:
        raise Incomplete(
            f"{file.path}: says that its head has {length} bytes, and the file has {file.nbytes}: it is cut off, or another kind of file"
        )
    return parse_json(file.read(begin, length)), begin + length


_LENGTH = 8


def whole_source(
    form: Format, root: ReadablePath, entries: Sequence[TensorEntry], files: tuple[StoredFile, ...], options: ReadOptions,
    own: Sidecar | None = None,
) -> Source:  # fmt: skip
    """A source of whole tensors.

    How others cut a parameter, which layers, words and experts there are follows from the names, and from the run's arguments or the
    model's description, which lie in what :func:`whole_sidecar` wrote beside; or the format's own files say it.

    Args:
        form: The format: what it is called, and whose names it has.
        root: The folder.
        entries: Every tensor, whole, under those names, with its state.
        files: All files of the format's own, its index too.
        options: The user's: whose model it is, how many words there are.
        own: What is no tensor, as the format's own files say it; None where :func:`whole_sidecar` keeps it.

    Raises:
        Incomplete: There are no arguments, or states of an optimizer without param groups; a file ends before a tensor does; a part of
            a tensor, or a layer's, or a master beside others, is missing; there is no tensor, or none of the role.
        Corrupt: A tensor is there twice, or a part of one lies outside of it, or of its record, or is of another type; two parts are of
            the same elements, or lie in the same bytes.
        Untrusted: A tensor lies in a file that is not listed, or before its beginning.
        LayoutMismatch: The arguments are those of another model.
        Unsupported: A name is none of Megatron's.
    """
    beside, role = own or Sidecar(), options.role or "actor"
    lengths = {file.path: file.nbytes for file in files}
    if others := {entry.name.role for entry in entries} - {role}:
        raise Incomplete(f"{root}: is read as {role}, and has tensors of {', '.join(map(shown, sorted(others)))}")
    if not entries:
        raise Incomplete(f"{root}: has no tensor of {role}")
    require_places(root, entries, lengths)
    states = tuple(dict.fromkeys(entry.name.state for entry in entries if entry.name.state != PARAM))
    if states and not beside.state.groups:
        raise Incomplete(
            f"{root}: has {', '.join(states)} of an optimizer, and no param groups, without which no run can load them"
        )
    trained = {entry.name.param for entry in entries if entry.name.state != PARAM}
    weights = [entry for entry in entries if entry.name.state == PARAM]
    _require_masters(root, entries)
    of = _of_megatron if form.family == MegatronState.names else _of_module
    model, family = of(root, weights, trained, beside, options)
    parallel, family = of_ranks_in(beside, family, str(root))
    return Source(
        format=form.name,
        root=root,
        role=role,
        model=model,
        catalog=Chunks.of(entries),
        parallel=parallel,
        state=beside.state,
        files=(*files, *sidecar_files(root)),
        states=states,
        optimizer=(beside.optimizer or _OPTIMIZER[form.family]) if states else None,
        origin=beside.origin,
        family=family,
    )


def _require_masters(root: ReadablePath, entries: Sequence[TensorEntry]) -> None:
    """Of weights of one type whose optimizer has the same states besides, all have a master or none: it is more than its weight says.

    Raises:
        Incomplete: One has none.
    """
    types, states = dict[str, DType](), defaultdict[str, set[str]](set)
    for entry in entries:
        if entry.name.state == PARAM:
            types[entry.name.param] = entry.dtype
        else:
            states[entry.name.param].add(entry.name.state)
    with_master = {(types.get(param), frozenset(of - {MASTER})) for param, of in states.items() if MASTER in of}
    for param, of in states.items():
        if MASTER not in of and (types.get(param), frozenset(of)) in with_master:
            raise Incomplete(
                f"{root}: {shown(param)} has {', '.join(sorted(of))} and no {MASTER}, which others of its kind have: a row of the index is "
                "missing, or a file\nCopy the folder again from where it came from."
            )


_OPTIMIZER = {MegatronState.names: DISTRIBUTED, ModuleState.names: "torch"}
"""What kind it is taken for where nobody said."""


def _of_megatron(
    root: ReadablePath, weights: Sequence[TensorEntry], trained: Collection[str], beside: Sidecar, options: ReadOptions
) -> tuple[ModelSpec, Family]:  # fmt: skip
    if not beside.state.args:
        raise Incomplete(f"{root}: no arguments of the run are stored, and by them Megatron's tensors are known")
    args = Arguments(beside.state.args)
    traits, specs = Traits(args.gated, args.transformer_engine, args.values), list[ParamSpec]()
    for entry in weights:
        name, partition = entry.name.param, partition_of(entry.name.param, traits)
        if partition is None and len(entry.global_shape) > 1:
            raise Unsupported(f"{root}: {name} is none of Megatron's names: how others cut it is not known")
        still = bool(trained) and name not in trained
        specs.append(ParamSpec(name, entry.global_shape, entry.dtype, partition or REPLICATED, not still))
    names = [spec.name for spec in specs]
    require_complete(str(root), names, args)
    layers = 1 + max((layer for name in names if (layer := layer_of(name)) is not None), default=-1)
    rows = next((spec.global_shape[0] for spec in specs if spec.name == EMBEDDING), None)
    words = options.vocab_size or args.vocab_size
    model = ModelSpec(tuple(specs), layers, args.tied, args.mtp_layers, args.num_experts, words, rows)
    of_model = Arguments(
        {key: value for key, value in args.values.items() if key != "padded_vocab_size"}
    )  # the rows say it
    where = STATE if (root / STATE).is_file() else "the format's own files"
    check_against_arguments(of_model, where, model, None, ParallelConfig())
    return model, MegatronState(None, args, [], names, [])


def _of_module(
    root: ReadablePath, weights: Sequence[TensorEntry], trained: Collection[str], beside: Sidecar, options: ReadOptions
) -> tuple[ModelSpec, Family]:  # fmt: skip
    still, module = {*beside.frozen, *beside.module.buffers}, beside.module
    specs = tuple(
        ParamSpec(
            (name := entry.name.param), entry.global_shape, entry.dtype, REPLICATED,
            name in trained if trained else entry.dtype in FLOATING and name not in still,
        )
        for entry in weights
    )  # fmt: skip
    buffers = {*module.buffers, *(spec.name for spec in specs if spec.dtype not in FLOATING)}
    names = [spec.name for spec in specs]
    model = ModelSpec(specs, num_layers(names), bool(module.shared), vocab_size=options.vocab_size)
    own = tuple(name for name in names if name in buffers)
    return model, replace(
        module, order=module.order or tuple(names), buffers=own, config=module.config or model_config(root)
    )


def whole_tensors(source: Source, options: WriteOptions) -> tuple[Chunks, list[tuple[TensorName, Shape, DType]]]:
    """The catalogue for files of whole tensors, and name, shape and type of everything that they are to hold.

    A weight is among them also where the source stores its fp32 master alone.

    Args:
        source: What is written.
        options: Whether with the optimizer, and what type weights get.

    Raises:
        Unsupported: It is a part of a model of Megatron's.
    """
    if (family := MegatronState.of(source)) is not None:
        refuse_part(source, family.args, "a file of whole tensors")
    dtype, wanted = dtype_of(options.dtype) if options.dtype else None, list[tuple[TensorName, Shape, DType]]()
    for spec in source.model.params:
        cast = dtype if dtype is not None and spec.dtype in FLOATING else spec.dtype
        wanted.append((TensorName(source.role, spec.name, PARAM), spec.global_shape, cast))
        for state in () if options.no_optimizer else source.states:
            if (entry := source.catalog.get(TensorName(source.role, spec.name, state))) is not None:
                wanted.append((entry.name, entry.global_shape, entry.dtype))
    return source.catalog.cast(dtype), wanted

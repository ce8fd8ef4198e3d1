"""The weights of any checkpoint one after the other, as inference engines take them: without a conversion, and without a copy on a disk.

vLLM's and SGLang's models have ``load_weights(pairs)``, which takes (name, tensor) pairs under Hugging Face's names, in any order, and cuts
each tensor itself. Source: vLLM 00b5ad0, ``vllm/model_executor/model_loader/default_loader.py`` (``DefaultModelLoader.load_weights``).
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from math import lcm
from pathlib import Path
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Literal, NamedTuple

from mcore_rlhf.consolidate import memory_layout, torch_tensor
from mcore_rlhf.convert import Job, write_target
from mcore_rlhf.core.catalog import FLOATING, PARAM, Box, Record, TensorName, dtype_of
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.errors import CheckpointError, Problems, Unsupported, UsageError, log_of
from mcore_rlhf.execution.run import Progress
from mcore_rlhf.families.complete import gaps, refuse_left_out
from mcore_rlhf.families.crossing.description import description, known_description
from mcore_rlhf.families.crossing.packing import repacked
from mcore_rlhf.families.crossing.to_megatron import related, to_megatron
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.families.passes import CONVERTED, Passage, through
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import Target, TargetFile
from mcore_rlhf.formats.hf.files import WrittenTensor
from mcore_rlhf.formats.hf.writer import Weights
from mcore_rlhf.formats.registry import format_named, open_checkpoint
from mcore_rlhf.models.huggingface.relation import Link
from mcore_rlhf.models.torchtitan import OWN_EMBEDDING
from mcore_rlhf.storage.in_memory import Bytes, MemoryFiles
from mcore_rlhf.storage.patience import read_patiently
from mcore_rlhf.storage.threads import begin
from mcore_rlhf.storage.urls import checkpoint_path

if TYPE_CHECKING:
    import torch

_log = log_of("mcore_rlhf.weights")
_VOCABULARY_MULTIPLE = 64
"""vLLM and SGLang pad vocabularies to a multiple of that before they cut them, and newer vLLMs to one of the ranks as well.

Source: vLLM 00b5ad0, ``vllm/model_executor/layers/vocab_parallel_embedding.py`` (``VocabParallelEmbedding._get_indices``)."""
_TAKE_IT_WHOLE = "Take the weights whole, with tp_size=1, and cut them as your engine does."
_WAITING = 1
"""Tensors that are ready before they are asked for; one more is being read, and one is whoever asks's."""
_LOOK_S = 0.2
_NEARLY_ALL = 0.96
"""Of a record's bytes. The rest, such as what lies between tensors, is read to check it: a rank reads no more than 1.05 of its own."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is read of a checkpoint.

    Args:
        whole: All files that are read, as one source.
        seen: The source under the names that are asked for.
        view: Where the tensors come from.
        parts: The tensors.
        boxes: The part of each; None for the whole.
    """

    whole: Source
    seen: Source
    view: Chunks
    parts: list[WrittenTensor]
    boxes: list[Box | None]


class TensorCut(NamedTuple):
    """How a tensor is dealt to tensor-parallel ranks.

    Args:
        dim: Along which dimension.
        words: Whether that counts words.
        copies: How many ranks in turn have the same.
    """

    dim: int
    words: bool = False
    copies: int = 1


@dataclass(frozen=True, slots=True)
class TensorRank:
    """Whose part of tensors is wanted; see :func:`iter_weights`."""

    tp_rank: int
    tp_size: int
    padded_vocab_size: int | None

    def part(self, tensor: WrittenTensor, cut: TensorCut, problems: Problems) -> Box:
        """What of a tensor it has.

        Args:
            tensor: It.
            cut: How it is dealt.
            problems: Takes what cannot be cut.
        """
        there, ranks = tensor.shape[cut.dim], self.tp_size // cut.copies
        size = self._padded(there) if cut.words else there
        if size % ranks:
            text = f"{tensor.names[0]}: dimension {cut.dim} of {tensor.shape}, {size:,} long, cannot be cut into {ranks} equal parts"
            problems.add(Unsupported, text, _TAKE_IT_WHOLE)
        elif size < there:
            problems.add(
                UsageError, f"padded_vocab_size: expected at least {there:,}, as {tensor.names[0]} has, found {size:,}"
            )
        offset, shape, each = [0] * len(tensor.shape), list(tensor.shape), size // ranks
        offset[cut.dim] = min(there, self.tp_rank // cut.copies * each)
        shape[cut.dim] = min(there, offset[cut.dim] + each) - offset[cut.dim]
        return Box(tuple(offset), tuple(shape))

    def _padded(self, words: int) -> int:
        if self.padded_vocab_size is not None:
            return self.padded_vocab_size
        multiple = lcm(_VOCABULARY_MULTIPLE, self.tp_size)
        return -(-words // multiple) * multiple


def iter_weights(
    path: str | Path,
    *,
    spelling: Literal["hf", "native"] = "hf",
    dtype: str | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    padded_vocab_size: int | None = None,
    names: str = "*",
    reference_config: str | None = None,
    read: ReadOptions | None = None,
    write: WriteOptions | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a checkpoint, a pair of name and tensor at a time; no optimizer state is read.

    Records are read whole, and checked by their checksums when the last of each has been read: what was taken is to be used once the
    iteration has ended. Of a record of which a tensor-parallel rank has a part nothing else is read, and it is not checked. Three tensors
    are in memory at most.

    Args:
        path: A root, a step, a role's folder or whatever else ``mcore-rlhf inspect`` takes; a URL of a store as well.
        spelling: ``hf``: Hugging Face's names, vocabularies cut to their true size. ``native``: the checkpoint's own.
        dtype: Element type of floating-point tensors, such as ``bfloat16``; None for that of each.
        tp_rank: Of which tensor-parallel rank the part is wanted.
        tp_size: How many there are. A part is what Megatron and vLLM cut for that rank: rows of a column-parallel layer, columns of a
            row-parallel one, words of the vocabulary; what is not cut comes whole. Of more ranks than key and value heads several have the
            same, as in vLLM. Of ``hf`` names only.
        padded_vocab_size: Of so many words each rank has an equal part, and of those the ones that there are: the last ranks may have
            fewer, or none. None for vLLM's and SGLang's, the next multiple of 64; Megatron's stands in its arguments.
        names: A pattern with ``*`` for the names that are wanted.
        reference_config: The folder, or file, of the model's ``config.json``, where nothing in the checkpoint describes it.
        read: How the checkpoint is opened: ``role``, ``step``, ``follow_links`` and so on.
        write: What is made of it on the way, as by ``convert``: ``merge_adapter`` with ``base_model``, ``dequantize``, ``ignore_fields``.

    Yields:
        Name and tensor on the CPU, in the module's order. The tensor is the caller's own.

    Raises:
        UsageError: ``tp_rank`` is none of ``tp_size``, no name fits, or there are more words than ``padded_vocab_size``.
        Unsupported: The names are not known, or a tensor cannot be cut in so many parts.
        CheckpointError: The checkpoint is incomplete or damaged; or weights that were not trained were left out when it was saved, and
            ``read`` does not say ``exclude_frozen``, which takes what was trained.
    """
    if type(tp_size) is not int or type(tp_rank) is not int or not 0 <= tp_rank < tp_size:
        raise UsageError(f"tp_rank: expected a number from 0 to tp_size - 1, found {tp_rank!r} of {tp_size!r}")
    if spelling not in ("hf", "native"):
        raise UsageError(f"spelling: expected 'hf' or 'native', found {spelling!r}")
    how = write or WriteOptions()
    how = replace(
        how, no_optimizer=True, dtype=_checked(dtype), reference_config=reference_config or how.reference_config
    )
    asked = replace(read or ReadOptions(), optimizer=False)
    rank, where = TensorRank(tp_rank, tp_size, padded_vocab_size), checkpoint_path(Path(path))

    def opened() -> tuple[Wanted, list[str]]:
        source = open_checkpoint(where, asked, partial=True)
        return _wanted(source, spelling, asked, how, rank, names), [f"{source.root}: {text}" for text in gaps(source)]

    wanted, lacking = read_patiently(where, opened)
    for text in lacking:  # once, however often the disk was asked
        _log.warning("%s", text)
    return _streamed(wanted)


def _checked(dtype: str | None) -> str | None:
    """A floating-point type, under its own name."""
    try:
        found = None if dtype is None else dtype_of(dtype)
    except ValueError as error:
        raise UsageError(f"dtype: {error}") from None
    if found is not None and found not in FLOATING:
        raise UsageError(f"dtype: expected a floating-point type, such as bfloat16, found {dtype!r}")
    return None if found is None else found.name


def _wanted(
    opened: Source, spelling: str, read: ReadOptions, write: WriteOptions, rank: TensorRank, pattern: str
) -> Wanted:
    whole, seen = opened, opened
    if spelling == "hf":
        passage = Passage(opened, format_named("hf"), write, read, open_checkpoint)
        seen = through(CONVERTED, passage)
        whole = passage.whole
        if any(spec.name == OWN_EMBEDDING for spec in seen.model.params):
            raise Unsupported(
                f"{opened.root}: has torchtitan's own names, and nothing in it describes the model\n"
                "Give reference_config, the folder with its config.json; or spelling='native'."
            )
        weights = Weights(seen, ModuleState.needed(seen, "hf"), passage.write, described=True)
        view, parts = weights.view, weights.parts()
    else:
        if read.only is None and not read.exclude_frozen:
            refuse_left_out(seen, known_description(seen, write))
        view = seen.catalog.cast(None if write.dtype is None else dtype_of(write.dtype))
        parts = list(_native(seen, view))
    parts = [
        replace(part, names=named)
        for part in parts
        if (named := tuple(name for name in part.names if fnmatchcase(name, pattern)))
    ]
    if not parts:
        raise UsageError(f"names: no weight of {opened.root} is called so: {pattern}")
    boxes = _cut(seen, spelling, write, parts, rank)
    return Wanted(whole, seen, view, parts, boxes)


def _native(source: Source, view: Chunks) -> Iterator[WrittenTensor]:
    for spec in source.model.params:
        name = TensorName(source.role, spec.name, PARAM)
        if (entry := view.get(name)) is not None:
            yield WrittenTensor(name, spec.global_shape, entry.dtype, (spec.name,))


def _cut(
    seen: Source, spelling: str, write: WriteOptions, parts: list[WrittenTensor], rank: TensorRank
) -> list[Box | None]:
    """A rank's part of each tensor; None for the whole."""
    if rank.tp_size == 1:
        return [None] * len(parts)
    if spelling != "hf":
        raise Unsupported("tp_size: parts are made of Hugging Face's names alone\nLeave out spelling='native'.")
    cuts, problems = _cuts(seen, write, rank.tp_size), Problems()
    found = [rank.part(one, cuts[one.source.param], problems) if one.source.param in cuts else None for one in parts]
    problems.raise_if_any()
    return found


def _cuts(seen: Source, write: WriteOptions, tp_size: int) -> dict[str, TensorCut]:
    """Of every Hugging Face tensor that is cut, how: along the dimension along which Megatron cuts what it is part of.

    Where there are more ranks than key and value heads, some have the same one, as in vLLM and SGLang. Source: vLLM 00b5ad0,
    ``vllm/model_executor/layers/linear.py`` (``QKVParallelLinear``: ``num_kv_head_replicas``).

    Raises:
        Unsupported: The model's names are not known, or its heads cannot be dealt to so many ranks.
    """
    config = description(seen, write)
    relation = related(repacked(seen, config, packs_experts=False), config, write)
    sizes = relation.sizes
    problems, cuts = Problems(), dict[str, TensorCut]()
    copies = tp_size // sizes.groups if sizes.groups and not tp_size % sizes.groups else 1
    for heads, what in (
        (sizes.heads, "heads"),
        (sizes.groups * copies, "key and value heads"),
        (sizes.delta_keys, "key heads of linear attention"),
    ):
        if heads % tp_size:
            problems.add(Unsupported, f"tp_size: {heads} {what} cannot be dealt to {tp_size} ranks", _TAKE_IT_WHOLE)
    problems.raise_if_any()
    specs = to_megatron(seen, write).model
    for link in relation.links:
        spec = specs.get(link.other)
        if spec is None or spec.partition.dim is None:
            continue
        if spec.partition.parts or spec.partition.own_copies or link.huggingface_box.step is not None:
            text = f"{link.huggingface}: a tensor-parallel rank's part of it is more than one run of rows"
            problems.add(Unsupported, text, _TAKE_IT_WHOLE)
        dim = _dim(link, spec.partition.dim)
        shared = copies if _KEYS_VALUES.search(link.huggingface) and ".linear_qkv." in link.other else 1
        cuts[link.huggingface] = TensorCut(dim, spec.partition.vocabulary, shared)
    problems.raise_if_any()
    return cuts


_KEYS_VALUES = re.compile(r"\.[kv]_proj\.(weight|bias)$")


def _dim(link: Link, dim: int) -> int:
    """Which dimension of Hugging Face's tensor a dimension of Megatron's is."""
    return dim if link.axes is None else link.axes.index(dim)


def _streamed(wanted: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
    """Read on a thread, a tensor ahead of who takes them."""
    stream, failed = _Stream(), list[BaseException]()

    def run() -> None:
        try:
            read(wanted, MemoryFiles(complete=stream.put))
        except BaseException as error:
            failed.append(error)
        finally:
            stream.ended.set()

    thread = begin("mcore_rlhf weights", run)
    try:
        for name, data in stream:
            part, box = wanted.parts[int(name)], wanted.boxes[int(name)]
            shape = part.shape if box is None else box.shape
            tensor = torch_tensor(data, part.dtype, shape)
            yield from ((alias, tensor) for alias in part.names)
    finally:
        stream.closed.set()
        thread.join()
    if failed:
        raise failed[0]


@dataclass(slots=True)
class _Stream:
    """What is read, on its way from one thread to another."""

    ended: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)
    _ready: Queue[tuple[str, Bytes]] = field(default_factory=lambda: Queue(_WAITING))

    def put(self, name: str, data: Bytes) -> None:
        """Hand one over, once there is room.

        Raises:
            CheckpointError: Nobody takes it any more.
        """
        while not self.closed.is_set():
            with suppress(Full):
                return self._ready.put((name, data), timeout=_LOOK_S)
        raise CheckpointError("the weights are not asked for any more")

    def __iter__(self) -> Iterator[tuple[str, Bytes]]:
        while True:
            over = self.ended.is_set()
            try:
                yield self._ready.get(timeout=0 if over else _LOOK_S)
            except Empty:
                if over:
                    return


def read(wanted: Wanted, memory: MemoryFiles) -> None:
    """Plan every tensor, and read them in their order.

    Records are read whole, and checked. Where a tensor-parallel rank's part is wanted, those are of which nearly all is; of others, such as
    the one in which a Megatron rank keeps all that it has, of which another rank wants the norms, nothing else is read.

    Args:
        wanted: What.
        memory: Takes the bytes of each under its number.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged.
    """
    files = tuple(
        TargetFile(str(number), partial(memory_layout, part, str(number), box))
        for number, (part, box) in enumerate(zip(wanted.parts, wanted.boxes, strict=True))
    )
    target = Target("weights", wanted.view, files, wanted.seen.notes)
    job, problems = Job(wanted.whole, target, seen=None if wanted.seen is wanted.whole else wanted.seen), Problems()
    records, asked = dict[tuple[str, str], Record](), Counter[tuple[str, str]]()
    for file in files:
        for copy in job.plan(file, problems)[1].copies:
            place = copy.source.file, copy.source.key
            records[place] = copy.source
            asked[place] += copy.numel * copy.source.dtype.itemsize
    problems.raise_if_any()
    least = 0.0 if all(box is None for box in wanted.boxes) else _NEARLY_ALL
    checked = {place for place, record in records.items() if asked[place] >= least * record.nbytes}
    stored = tuple(
        replace(file, records=tuple(r for r in file.records if (file.path, r[0]) in checked), whole=None)
        for file in wanted.whole.files
    )
    job.source = replace(wanted.whole, catalog=Chunks.of(()), files=stored)
    how = ConvertOptions(to="hf", write=WriteOptions(no_optimizer=True), workers=1, fsync=False, trust_replicas=True)
    write_target(job, memory, how, Progress())

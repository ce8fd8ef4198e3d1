"""Beside or instead of a DCP folder: RLinf's plain weights, ``model_state_dict/full_weights.pt``, and its ``local_shard`` files, one of
every rank: bare local tensors, which nobody can put together and which must be sound all the same.

Source: RLinf, ``hybrid_engines/fsdp/strategy/base.py`` (``save_checkpoint``) and ``strategy/checkpoint.py`` (``Checkpoint.state_dict``)
at a3816b5: ``{"model": …, "optimizers": …, "lr_schedulers": …, "rng": …}``, each rank its own. RLinf resumes from them alone; the whole
weights beside them are for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import NoReturn

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import FLOATING, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Incomplete, Problems, Unsupported, Untrusted
from mcore_rlhf.families.fsdp.model import model_config, num_layers
from mcore_rlhf.families.fsdp.tied import find_aliases, stored_identity
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source, TrainingState
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec
from mcore_rlhf.storage.dcp.rankfile import Local, read_rank_file
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.stored import StoredTensor, whole_entry
from mcore_rlhf.storage.torchzip import read_directory

from .folders import FULL_WEIGHTS, LOCAL_SHARDS, DcpFolders

_MODEL = "model"
_ADVICE = "Each node writes the files of its own ranks: bring those of all nodes together, or use another step."


def plain_source(located: DcpFolders, options: ReadOptions) -> Source:
    """RLinf's plain weights as a source of weights alone.

    Args:
        located: The actor's folder.
        options: Which role, which stubs.

    Raises:
        CheckpointError: They are damaged, or there are only rank files without offsets; or those lie beside them, and the optimizer, which
            is in them, is wanted.
    """
    if located.weights is None or (located.shards and options.optimizer):
        _refuse_shards(located)
    opened = read_pt(located.root, located.weights, stubs=options.stubs)
    if not isinstance(opened.tree, dict) or not all(isinstance(v, StoredTensor) for v in opened.tree.values()):
        raise Unsupported(f"{opened.directory.path}: expected a dictionary of tensors, found something else in it")
    notes = Report()
    notes.add(Fate.LOST, f"the optimizer and all else: {located.root} holds only the weights of {located.weights}")
    tensors: dict[str, StoredTensor] = opened.tree
    role = options.role or "actor"
    config, shapes = model_config(located.root), {name: stored.shape for name, stored in tensors.items()}
    aliases = find_aliases(shapes, (), config, lambda name: stored_identity([(opened.directory, tensors[name])]), notes)
    own = {name: stored for name, stored in tensors.items() if name not in aliases}
    specs = [ParamSpec(n, t.shape, t.record.dtype, REPLICATED, t.record.dtype in FLOATING) for n, t in own.items()]
    buffers = tuple(spec.name for spec in specs if not spec.trainable)
    module = ModuleState(order=tuple(tensors), buffers=buffers, shared=aliases, config=config)
    entries = {name: whole_entry(TensorName(role, name), stored) for name, stored in own.items()}
    return Source(
        format="dcp",
        root=located.root,
        role=role,
        model=ModelSpec(tuple(specs), num_layers(tensors), bool(aliases), vocab_size=options.vocab_size),
        parallel=ParallelConfig(),
        catalog=Chunks.of(entries.values()),
        state=TrainingState(located.step or 0),
        files=(StoredFile.of_zip(opened.file, opened.directory), *_shard_files(located, tensors, options.stubs)),
        states=(),
        optimizer=None,
        notes=notes,
        family=module,
    )


def _refuse_shards(located: DcpFolders) -> NoReturn:
    """Say that an optimizer, or a whole run, lies in files that cannot be put together.

    Raises:
        Unsupported: Always.
    """
    where, also = f"{located.root / LOCAL_SHARDS}: holds", ""
    if located.weights is None:
        also = f"; or copy {FULL_WEIGHTS} beside it, to convert the weights alone"
    else:
        where += " the optimizer in"
    raise Unsupported(
        f"{where} {len(located.shards)} rank files with bare local tensors, which do not say what part of which tensor they are\n"
        f"Save the run with RLinf's checkpoint_format: dcp{also}."
    )


def _shard_files(
    located: DcpFolders, weights: Mapping[str, StoredTensor], stubs: Collection[str]
) -> tuple[StoredFile, ...]:
    """The rank files, so that whoever checks the source checks them.

    Args:
        located: Has them.
        weights: The whole tensors beside them.
        stubs: Names that the user allows as inert stubs.

    Raises:
        Incomplete: A rank's file is missing: its number is, or all files together have fewer elements of a tensor than it has.
        Corrupt: One is damaged.
    """
    _check_numbers(located)
    together: Counter[str] = Counter()
    for name in located.shards:
        together.update(dict(_elements(located, name, stubs)))
    short = [name for name, whole in weights.items() if 0 < together[name] < prod(whole.shape)]
    if short:
        first = short[0]
        raise Incomplete(
            f"{located.root / LOCAL_SHARDS}: the files of {len(located.shards)} ranks have {together[first]} elements of {first}, which "
            f"has {prod(weights[first].shape)}: those of other ranks are missing\n{_ADVICE}"
        )
    return tuple(StoredFile.of_zip(name, read_directory(located.root / name)) for name in located.shards)


def _check_numbers(located: DcpFolders) -> None:
    problems, there = Problems(), set(located.shards)
    for rank in range(len(there)):
        name = f"{LOCAL_SHARDS}/checkpoint_rank_{rank}.pt"
        if name not in there:
            problems.add(
                Incomplete, f"{located.root / name}: missing; ranks of higher numbers have written theirs", _ADVICE
            )
    problems.raise_if_any()


def _elements(located: DcpFolders, name: str, stubs: Collection[str]) -> Iterator[tuple[str, int]]:
    """How many elements of every tensor of the model a rank has; nothing where its objects are of classes that are not known."""
    try:
        tree = read_rank_file(located.root, name, stubs).tree
    except (Unsupported, Untrusted):
        return
    model = tree.get(_MODEL) if isinstance(tree, Mapping) else None
    for key, value in model.items() if isinstance(model, Mapping) else ():
        stored = value.stored if isinstance(value, Local) else value
        if isinstance(stored, StoredTensor):
            yield str(key), prod(stored.shape)

"""RLinf's ``local_shard`` files, one of every rank: bare local tensors, which nobody can put together and which must be sound all the same.

Source: RLinf, ``hybrid_engines/fsdp/strategy/base.py`` (``save_checkpoint``) and ``strategy/checkpoint.py`` (``Checkpoint.state_dict``)
at a3816b5: ``{"model": …, "optimizers": …, "lr_schedulers": …, "rng": …}``, each rank its own. RLinf resumes from them alone; the whole
weights beside them are for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import NoReturn

from mcore_rlhf.errors import Incomplete, Problems, Unsupported, Untrusted
from mcore_rlhf.families.source import StoredFile
from mcore_rlhf.storage.dcp.rankfile import Local, read_rank_file
from mcore_rlhf.storage.stored import StoredTensor
from mcore_rlhf.storage.torchzip import read_directory

from .folders import FULL_WEIGHTS, LOCAL_SHARDS, Located

_MODEL = "model"
_ADVICE = "Each node writes the files of its own ranks: bring those of all nodes together, or use another step."


def refuse_shards(located: Located) -> NoReturn:
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


def shard_files(
    located: Located, weights: Mapping[str, StoredTensor], stubs: Collection[str]
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


def _check_numbers(located: Located) -> None:
    problems, there = Problems(), set(located.shards)
    for rank in range(len(there)):
        name = f"{LOCAL_SHARDS}/checkpoint_rank_{rank}.pt"
        if name not in there:
            problems.add(
                Incomplete, f"{located.root / name}: missing; ranks of higher numbers have written theirs", _ADVICE
            )
    problems.raise_if_any()


def _elements(located: Located, name: str, stubs: Collection[str]) -> Iterator[tuple[str, int]]:
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

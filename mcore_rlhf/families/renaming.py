"""A source seen under other names, or without some of its tensors: nothing is read, and everything follows the names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from mcore_rlhf.core.catalog import Catalog
from mcore_rlhf.core.views import Renamed

from .source import NewNames, ParamGroup, Source, StoredFile

Rename = Callable[[str], "str | None"]
"""What a tensor is called from now on; None leaves it out."""


def renamed(source: Source, rename: Rename) -> Source:
    """The source with other names, or fewer tensors; its report is its own and may be added to.

    A tied tensor whose owner is left out becomes the owner. An optimizer of which nothing is left is gone.

    Args:
        source: An opened checkpoint.
        rename: The new name of a tensor.
    """
    names = _names(source, rename)
    specs = [
        replace(spec, name=new) for new, old in names.owners.items() if (spec := source.model.get(old)) is not None
    ]
    model = replace(source.model.having(specs), tied=source.family.tied(names, source.model.tied))
    trained = any(spec.trainable for spec in model.params)
    groups = tuple(_groups(source.state.groups, names.new())) if trained else ()
    view = Renamed(source.catalog, source.role, names.owners)
    return replace(
        source, model=model, catalog=view, state=replace(source.state, groups=groups), files=_touched(source, view),
        states=source.states if trained else (), optimizer=source.optimizer if trained else None,
        notes=source.notes.copy(), family=source.family.renamed(names),
    )  # fmt: skip


def _names(source: Source, rename: Rename) -> NewNames:
    owners = {new: spec.name for spec in source.model.params if (new := rename(spec.name)) is not None}
    first = {old: new for new, old in owners.items()}
    shared: dict[str, str] = {}
    for alias, owner in source.family.shared.items():
        new = rename(alias)
        if new is not None and owner in first:
            shared[new] = first[owner]
        elif new is not None:
            owners[new] = owner
            first[owner] = new
    return NewNames(rename, owners, shared)


def _groups(groups: Iterable[ParamGroup], new: Mapping[str, list[str]]) -> Iterator[ParamGroup]:
    """Groups that have members left; where members are not stored, a group is kept."""
    for group in groups:
        members = tuple(name for old in group.params for name in new.get(old, ()))
        if members or not group.params:
            yield replace(group, params=members)


def _touched(source: Source, view: Catalog) -> tuple[StoredFile, ...]:
    """The files, without the checksums of records that hold nothing but what is left out: nobody need read them."""
    kept = _records(view)
    gone = _records(source.catalog) - kept
    return tuple(
        replace(file, records=tuple(r for r in file.records if (file.path, r[0]) not in gone)) for file in source.files
    )


def _records(catalog: Catalog) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for name in catalog:
        entry = catalog.get(name)
        found.update((chunk.record.file, chunk.record.key) for chunk in (entry.chunks if entry is not None else ()))
    return found

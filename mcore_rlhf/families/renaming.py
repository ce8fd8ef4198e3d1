"""A source seen under other names, or without some of its tensors: nothing is read, and everything follows the names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from mcore_rlhf.core.catalog import Catalog
from mcore_rlhf.core.views import Renamed
from mcore_rlhf.families.megatron.native import MegatronNative
from mcore_rlhf.models.spec import ModelSpec, ParamSpec

from .module import ModuleState
from .source import ParamGroup, Source, StoredFile

Rename = Callable[[str], "str | None"]
"""What a tensor is called from now on; None leaves it out."""


@dataclass(frozen=True, slots=True)
class _Names:
    """Who is who: names of owners, and of the tied tensors that are others' second names."""

    owners: Mapping[str, str]
    shared: Mapping[str, str]

    def new(self) -> dict[str, list[str]]:
        """For every old name, what has become of it."""
        found: dict[str, list[str]] = {}
        for new, old in self.owners.items():
            found.setdefault(old, []).append(new)
        return found


def renamed(source: Source, rename: Rename) -> Source:
    """The source with other names, or fewer tensors; its report is its own and may be added to.

    A tied tensor whose owner is left out becomes the owner. An optimizer of which nothing is left is gone.

    Args:
        source: An opened checkpoint.
        rename: The new name of a tensor.
    """
    names = _names(source, rename)
    model = _model(source.model, names, isinstance(source.native, ModuleState))
    trained = any(spec.trainable for spec in model.params)
    groups = tuple(_groups(source.state.groups, names.new())) if trained else ()
    view = Renamed(source.catalog, source.role, names.owners)
    return replace(
        source, model=model, catalog=view, state=replace(source.state, groups=groups), files=_touched(source, view),
        states=source.states if trained else (), optimizer=source.optimizer if trained else None,
        notes=source.notes.copy(), native=_native(source.native, names, rename),
    )  # fmt: skip


def _names(source: Source, rename: Rename) -> _Names:
    owners = {new: spec.name for spec in source.model.params if (new := rename(spec.name)) is not None}
    first = {old: new for new, old in owners.items()}
    shared: dict[str, str] = {}
    tied = source.native.shared if isinstance(source.native, ModuleState) else {}
    for alias, owner in tied.items():
        new = rename(alias)
        if new is not None and owner in first:
            shared[new] = first[owner]
        elif new is not None:
            owners[new] = owner
            first[owner] = new
    return _Names(owners, shared)


def _model(model: ModelSpec, names: _Names, of_module: bool) -> ModelSpec:
    specs: list[ParamSpec] = []
    for new, old in names.owners.items():
        spec = model.get(old)
        if spec is not None:
            specs.append(replace(spec, name=new))
    tied = bool(names.shared) if of_module else model.tied
    return replace(model.having(specs), tied=tied)


def _groups(groups: Iterable[ParamGroup], new: Mapping[str, list[str]]) -> Iterator[ParamGroup]:
    """Groups that have members left; where members are not stored, a group is kept."""
    for group in groups:
        members = tuple(name for old in group.params for name in new.get(old, ()))
        if members or not group.params:
            yield replace(group, params=members)


def _native(native: object, names: _Names, rename: Rename) -> object:
    """The format's own view, without what only its own files would say of the tensors that are left out."""
    if isinstance(native, MegatronNative):
        there = set(names.owners.values())
        modules = {name.rpartition(".")[0] for name in there}
        order = [name for name in native.order if name in there or _is_opaque_of(name, modules)]
        return replace(native, order=order, unknown=[name for name in native.unknown if name in there])
    if not isinstance(native, ModuleState):
        return native
    kept = {*names.owners, *names.shared}
    new = names.new()
    return replace(
        native.base(), shared=names.shared,
        order=tuple(name for old in native.order if (name := rename(old)) in kept and name is not None),
        buffers=tuple(name for old in native.buffers for name in new.get(old, ())),
        keys={name: native.keys[old] for name, old in names.owners.items() if old in native.keys},
    )  # fmt: skip


def _is_opaque_of(name: str, modules: set[str]) -> bool:
    return name.endswith("._extra_state") and name.rpartition(".")[0] in modules


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

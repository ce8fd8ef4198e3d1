"""A source seen under other names, or without some of its tensors, as ``--only`` and ``--exclude-frozen`` ask: nothing is read, and
everything follows the names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Rule, Values
from mcore_rlhf.errors import LayoutMismatch, Unsupported, UsageError
from mcore_rlhf.storage.record_file import StoredFile

from .megatron.state import MegatronState
from .module import ModuleState
from .options import ReadOptions
from .source import NewNames, ParamGroup, Source

_WILDCARDS = "*?["
_NOT = "!"
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Selection:
    """What ``--only`` means for one model.

    An attribute (``policy``, ``actor.model``) takes the tensors below it, and its name off theirs. Patterns (with ``*``,
    ``?``, ``[``), several terms with commas, and exclusions (``!value_head``) keep names as they are.

    Args:
        attribute: The attribute whose tensors are taken, or empty.
        wanted: Patterns or prefixes, of which one must fit; none fits all.
        unwanted: Patterns or prefixes, none of which may fit.
    """

    attribute: str = ""
    wanted: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()

    @classmethod
    def parse(cls, only: str) -> Selection:
        """Understand the option.

        Raises:
            UsageError: It is empty, or one of its terms is.
        """
        terms = [term.strip() for term in only.split(",")]
        if any(term in ("", _NOT) for term in terms):
            raise UsageError(
                f"--only {only!r}: expected an attribute such as policy, or patterns such as 'model.*,!*.bias'"
            )
        if len(terms) == 1 and not is_pattern(only):
            return cls(attribute=terms[0].rstrip("."))
        return cls(
            "", tuple(term for term in terms if term[0] != _NOT), tuple(t[1:] for t in terms if t[0] == _NOT)
        )  # fmt: skip

    def rename(self, name: str) -> str | None:
        """What a tensor is called in the part that is taken, or None where it is not in it."""
        if self.attribute:
            return name.removeprefix(f"{self.attribute}.") if name.startswith(f"{self.attribute}.") else None
        chosen = not self.wanted or any(_fits(name, term) for term in self.wanted)
        return name if chosen and not any(_fits(name, term) for term in self.unwanted) else None


def is_pattern(only: str) -> bool:
    """Whether the option is made of patterns, and names no role or attribute."""
    return any(character in only for character in (*_WILDCARDS, _NOT, ","))


def with_role(options: ReadOptions, roles: Collection[str]) -> ReadOptions:
    """The options with the role that ``--only`` begins with taken out of it: ``actor.policy`` is ``policy`` of ``actor``.

    Args:
        options: As given.
        roles: The models of a step, by role.
    """
    if options.only is None or options.role is not None or is_pattern(options.only):
        return options
    role, _, attribute = options.only.partition(".")
    return replace(options, role=role, only=attribute or None) if role in roles else options


def selected(source: Source, options: ReadOptions) -> Source:
    """The part of a source that was asked for: the source itself where nothing was.

    Args:
        source: An opened checkpoint.
        options: ``only`` and ``exclude_frozen``.

    Raises:
        UsageError: No tensor is in the part; the attributes that there are.
        Unsupported: The attribute of a Megatron model, whose names are those of its place in the pipeline.
    """
    if options.only is not None and not _is_role(source, options.only):
        source = _only(source, options.only)
    return _without_frozen(source) if options.exclude_frozen else source


def _is_role(source: Source, only: str) -> bool:
    """Whether the option names the model's role, and no attribute of it that is called like that."""
    return only == source.role and not any(_fits(name, only) for name in _all_names(source))


def _only(source: Source, only: str) -> Source:
    chosen = _resolved(source, only)
    if chosen.attribute and MegatronState.of(source) is not None:
        raise Unsupported(
            f"--only {only}: {source.root} is Megatron's, whose layers are found by their whole names\n"
            f"Give patterns, which keep names: --only '{chosen.attribute}.*', or --only '!output_layer.*' to leave a head out."
        )
    part = renamed(source, chosen.rename)
    gone = Counter(_attribute(spec.name) for spec in source.model.params if chosen.rename(spec.name) is None)
    left_out = ", ".join(f"{name} ({count})" for name, count in gone.most_common(_SHOWN)) or "nothing"
    without = f", without {chosen.attribute}. in front of their names" if chosen.attribute else ""
    has, had = len(part.model.params), len(source.model.params)
    part.notes.through([_ONLY], {"only": only, "has": has, "had": had, "without": without, "left_out": left_out})
    return part


def _resolved(source: Source, only: str) -> Selection:
    """An attribute may have the role in front, and may be one tensor."""
    chosen = Selection.parse(only)
    names = _all_names(source)
    role, _, rest = only.partition(".")
    there = chosen.attribute in names or any(chosen.rename(name) for name in names)
    if not there and role == source.role and rest and not is_pattern(only):
        chosen = Selection.parse(rest)
    if chosen.attribute in names:
        chosen = Selection(wanted=(chosen.attribute,))
    if not any(chosen.rename(name) for name in names):
        raise UsageError(_no_such(source, only, names))
    return chosen


def _no_such(source: Source, only: str, names: Sequence[str]) -> str:
    depth = 1 if len({_attribute(name) for name in names}) > 1 else 2
    there = Counter(_attribute(name, depth) for name in names)
    listed = ", ".join(f"{name} ({count})" for name, count in there.most_common(_SHOWN))
    return (
        f"--only {only!r}: no tensor of {source.root} ({source.role}) is in it\n"
        f"Its attributes, with the number of tensors below them: {listed}{', …' if len(there) > _SHOWN else ''}"
    )


def _without_frozen(source: Source) -> Source:
    if MegatronState.of(source) is not None:
        raise Unsupported(
            f"--exclude-frozen: {source.root} is Megatron's, which loads no model with parameters missing\n"
            "Convert it --to hf, dcp, universal or deepspeed, and leave them out there, or leave names out with --only."
        )
    buffers = source.family.buffers
    frozen = [spec.name for spec in source.model.params if not spec.trainable and spec.name not in buffers]
    source.notes.through([_NONE_FROZEN], frozen)
    if not frozen:
        return source
    gone = frozenset(frozen)
    part = renamed(source, lambda name: None if name in gone else name)
    module = ModuleState.of(part)
    part.family = part.family if module is None else replace(module, without_frozen=True, left_out=True)
    part.notes.through([_FROZEN], frozen)
    return part


_ONLY: Rule[Values] = Rule(Fate.CHANGED, "--only {only}: {has} of {had} tensors{without}; left out: {left_out}", dict)
_NONE_FROZEN: Rule[list[str]] = Rule(
    Fate.NOTE, "--exclude-frozen: no parameter is known to be frozen", lambda frozen: not frozen
)
_FROZEN: Rule[list[str]] = Rule(
    Fate.LOST,
    "--exclude-frozen: {count} frozen parameters such as {names:1}; who loads this has them from elsewhere, and must allow them to be "
    "missing (DeepSpeed: load_module_strict=False)", lambda frozen: {"count": len(frozen), "names": frozen},
)  # fmt: skip


def _all_names(source: Source) -> list[str]:
    return [*(spec.name for spec in source.model.params), *source.family.shared]


def _attribute(name: str, depth: int = 1) -> str:
    return ".".join(name.split(".")[:depth])


def _fits(name: str, term: str) -> bool:
    """Whether a name is that of a term, lies below it, or is like its pattern."""
    if any(character in term for character in _WILDCARDS):
        return fnmatchcase(name, term)
    return name == term or name.startswith(f"{term}.")


Rename = Callable[[str], "str | None"]
"""What a tensor is called from now on; None leaves it out."""


def renamed(source: Source, rename: Rename) -> Source:
    """The source with other names, or fewer tensors; its report is its own and may be added to.

    A tied tensor whose owner is left out becomes the owner. An optimizer of which nothing is left is gone.

    Args:
        source: An opened checkpoint.
        rename: The new name of a tensor.

    Raises:
        LayoutMismatch: Two tensors would have one name.
    """
    names = _names(source, rename)
    _check_apart(source, rename)
    specs = [
        replace(spec, name=new) for new, old in names.owners.items() if (spec := source.model.get(old)) is not None
    ]
    tied = source.model.tied if ModuleState.of(source) is None else bool(names.shared)
    model = replace(source.model.having(specs), tied=tied)
    trained = any(spec.trainable for spec in model.params)
    groups = tuple(_groups(source.state.groups, names.new())) if trained else ()
    view = source.catalog.renamed(source.role, names.owners)
    return replace(
        source, model=model, catalog=view, state=replace(source.state, groups=groups), files=_touched(source, view),
        states=source.states if trained else (), optimizer=source.optimizer if trained else None,
        notes=source.notes.copy(), family=source.family.renamed(names),
    )  # fmt: skip


def _check_apart(source: Source, rename: Rename) -> None:
    """One of two tensors of one name would be lost without a word."""
    first: dict[str, str] = {}
    for spec in source.model.params:
        new = rename(spec.name)
        if new is not None and first.setdefault(new, spec.name) != spec.name:
            raise LayoutMismatch(f"{source.root}: {first[new]} and {spec.name} are both {new}; expected one of them")


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


def _touched(source: Source, view: Chunks) -> tuple[StoredFile, ...]:
    """The files, without the checksums of records that hold nothing but what is left out: nobody need read them."""
    kept = _records(view)
    gone = _records(source.catalog) - kept
    return tuple(
        replace(file, records=tuple(r for r in file.records if (file.path, r[0]) not in gone)) for file in source.files
    )


def _records(catalog: Chunks) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for entry in catalog.entries():
        found.update((chunk.record.file, chunk.record.key) for chunk in entry.chunks)
    return found

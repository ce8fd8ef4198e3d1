"""The inventory of an opened source: everything in it, item by item, with its value, and what nobody knows; see
:mod:`mcore_rlhf.core.account`.

A reader takes what it knows out of a file's tree. It also says what it knows, as the same tree with ``None`` where everything
below is read or follows from something else; all other keys are found here (:class:`Unplaced`), so that none of them is dropped
without a word: they are items of the account, lost by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate, Item, Kind, Reason, Rule, same

from .options import WriteOptions
from .source import Source, TrainingState

_RNG = (
    "rng",
    "rng_state",
    "random_rng_state",
    "np_rng_state",
    "torch_rng_state",
    "cuda_rng_state",
    "rng_tracker_states",
)
"""Keys of random states, at the top of Megatron's files and of RLinf's DCP folders."""


OF_OPTIMIZER: tuple[Item, ...] = (Item(Kind.GROUP), Item(Kind.OPTIMIZER), Item(Kind.SCALER), Item(Kind.TENSOR))
"""Everything that an optimizer has, for who leaves it out."""
OPAQUE: Item = Item(Kind.MODEL, "values that are no parameters")
"""What a state dict has under a parameter's name though it is no tensor: ``_extra_state``."""
ELEMENTS: Item = Item(Kind.TENSOR, "elements")
"""All elements of the tensors that are planned: who cuts rows says so."""
WAITING = Item(Kind.VALUE, "mcore_rlhf_origin")
"""What waits in a checkpoint for the way back to another family of formats."""
LEFT_OUT = "the optimizer: left out, as --no-optimizer asks"
LEAVES_OUT: Sequence[Rule[WriteOptions]] = [Rule(Fate.LOST, LEFT_OUT, lambda o: o.no_optimizer, OF_OPTIMIZER)]
"""What every target says whose framework trains on with an optimizer."""
UNUSED: Sequence[Rule[Source]] = [
    Rule(Reason.OF_ENGINE, of=(Item(Kind.GROUP), Item(Kind.OPTIMIZER), Item(Kind.SCALER)))
]
"""What becomes of an optimizer's settings where none of its states is left, and nobody asked for that."""
FROM_ZERO3 = "parameters: rounded from their fp32 masters, since stage 3 does not store them"
COPIED_MASTERS = "fp32 master parameters: copies of the parameters"
OF_WEIGHTS_ALONE = "scheduler, counters and client state: a folder of weights has no place for them"
NEVER_MADE = "zeros for states that were never made: {found:3}; they count the steps of their group"


_KINDS: Mapping[str, Kind] = {
    "args": Kind.ARGUMENT, "scheduler": Kind.SCHEDULER, "grad_scaler": Kind.SCALER, "groups": Kind.GROUP, "optimizer": Kind.OPTIMIZER,
    "scalars": Kind.OPTIMIZER, "config": Kind.CONFIG, "shared": Kind.MODEL, "buffers": Kind.MODEL, "per_rank": Kind.MODEL,
    "keys": Kind.MODEL,
}  # fmt: skip
"""Fields of a training state and of families, and what their items are, one for each key; of any other they are values."""
_WHOLE = ("shared", "buffers", "per_rank", "keys")
"""Those that are one item, where there is anything in them."""


def item_in(field: str, key: str) -> Item:
    """The item that a key of a field is; random states are a kind of their own.

    Args:
        field: Its name in a training state, or a family.
        key: Of what is in it.
    """
    kind = _KINDS.get(field, Kind.VALUE)
    return Item(Kind.RNG if kind is Kind.VALUE and key in _RNG else kind, field if field in _WHOLE else key)


def items_in(holder: object, *names: str) -> Iterator[tuple[Item, object]]:
    """The items of some fields, with their values: each key of a dictionary, anything else as a whole.

    Args:
        holder: Whose fields they are.
        names: Of the fields.
    """
    for name in names:
        value = getattr(holder, name)
        if isinstance(value, Mapping) and name not in _WHOLE:
            yield from ((item_in(name, str(key)), item) for key, item in value.items())
        elif value is not None and (value or name not in _WHOLE):
            yield item_in(name, "state"), value


def inventory_of(source: Source) -> dict[Item, object]:
    """Everything that a source has but for its tensors, which are accounted by the plan.

    Args:
        source: An opened checkpoint, or one that is seen under another family's names.
    """
    items = {**source.family.inventory(), **dict(state_items(source.state))}
    return items if not source.origin else {**items, WAITING: source.origin}


def random_states(source: Source) -> list[Item]:
    """The random states of a source; none where it has none."""
    return [item for item in inventory_of(source) if item.kind is Kind.RNG]


def state_items(state: TrainingState) -> Iterator[tuple[Item, object]]:
    """The items of a training state: every argument, every field of the param groups, every key."""
    yield Item(Kind.VALUE, "iteration"), state.iteration
    yield from items_in(state, "args")
    for name in dict.fromkeys(name for group in state.groups for name in group.fields):
        yield item_in("groups", name), tuple(group.fields.get(name) for group in state.groups)
    yield from items_in(state, "scheduler", "grad_scaler", "other")


def value_items(values: Mapping[str, object]) -> Iterator[tuple[Item, object]]:
    """Further values by key."""
    return ((item_in("other", str(key)), value) for key, value in values.items())


def state_dict_of(stored: object, key: str, notes: Report) -> Mapping[str, object] | None:
    """A scheduler's state dict; anything else in its place is lost, since no format has a place for it, and is said.

    Args:
        stored: What the files have.
        key: Under which key.
        notes: Told of a loss.
    """
    if isinstance(stored, Mapping):
        return stored
    if stored is not None:
        notes.add(Fate.LOST, f"{key}: a {type(stored).__name__}, where a scheduler's state dict is expected")
    return None


EACH = "*"
"""In what is known: any key that has no entry of its own."""
Known = Mapping[str, "Known | None"]


UNLIKE = ", where the file that is taken has something else"
"""How the names of values end that are known, and of which ranks do not say the same: those of the first are taken."""


@dataclass(slots=True)
class Unplaced:
    """Values of which no reader knows what they are, or of which ranks do not say the same, with the files that hold them."""

    files: dict[str, list[str]] = field(default_factory=dict)
    unlike: dict[str, list[str]] = field(default_factory=dict)

    def look(self, file: str, tree: object, known: Known, inside: str = "") -> None:
        """Note every key of a tree that is not known.

        Args:
            file: Where it is from.
            tree: Dictionaries, and lists whose members are alike.
            known: The keys that are placed.
            inside: The path of the tree in its file.
        """
        for path in _unknown(tree, known, inside):
            self.files.setdefault(path, []).append(file)

    def compare(self, file: str, mine: Mapping[str, object], first: Mapping[str, object], inside: str = "") -> None:
        """Note values of a rank that another rank has not: those of the first are taken for all."""
        for key in dict.fromkeys([*first, *mine]):
            if not same(mine.get(key), first.get(key)):
                self.unlike.setdefault(_joined(inside, key), []).append(file)

    @property
    def names(self) -> tuple[str, ...]:
        """Each value once, with its file."""
        return (*map(_with_files, self.files.items()), *(_with_files(one) + UNLIKE for one in self.unlike.items()))


def _with_files(value: tuple[str, list[str]]) -> str:
    path, files = value
    return f"{path} in {files[0]}" + (f" and {len(files) - 1} more files" if len(files) > 1 else "")


UNPLACED: Sequence[Rule[Source]] = [
    Rule(Fate.LOST, "{name}: not known, and not carried", lambda s: _each([one for one in s.unplaced if not one.endswith(UNLIKE)])),
    Rule(Fate.LOST, "{name}: not carried", lambda s: _each([one for one in s.unplaced if one.endswith(UNLIKE)])),
]  # fmt: skip
"""What is said of both."""


def _each(names: Sequence[str]) -> list[dict[str, object]]:
    return [{"name": name, "of": [Item(Kind.VALUE, name)]} for name in names]


def of_torch(inner: object) -> Known:
    """What torch's optimizers have in their state dict: groups, and states by the numbers in these.

    Source: torch 2.13.0, ``optim/optimizer.py`` (``state_dict``).
    """
    groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
    listed = [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
    numbers = {str(number) for group in listed for number in group.get("params") or ()}
    return {"param_groups": None, "state": dict.fromkeys(numbers)}


def _unknown(tree: object, known: Known, path: str) -> Iterator[str]:
    if isinstance(tree, list | tuple):
        yield from dict.fromkeys(found for item in tree for found in _unknown(item, known, path))
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            entry = str(key) if str(key) in known else EACH
            if entry not in known:
                yield _joined(path, key)
            elif (inner := known[entry]) is not None:
                yield from _unknown(value, inner, _joined(path, key))


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)

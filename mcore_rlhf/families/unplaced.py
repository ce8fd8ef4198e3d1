"""What a source's files hold beside what their format is known to have: items of the account, lost by name.

A reader takes what it knows out of a file's tree. It also says what it knows, as the same tree with ``None`` where everything
below is read or follows from something else; all other keys are found here, so that none of them is dropped without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mcore_rlhf.core.account import same

EACH = "*"
"""In what is known: any key that has no entry of its own."""
Known = Mapping[str, "Known | None"]


@dataclass(slots=True)
class Unplaced:
    """Values of which no reader knows what they are, with the files that hold them."""

    files: dict[str, list[str]] = field(default_factory=dict)

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
                self.files.setdefault(_joined(inside, key), []).append(file)

    @property
    def names(self) -> tuple[str, ...]:
        """Each value once, with its file."""
        more = {path: f" and {len(of) - 1} more files" if len(of) > 1 else "" for path, of in self.files.items()}
        return tuple(f"{path} in {of[0]}{more[path]}" for path, of in self.files.items())


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

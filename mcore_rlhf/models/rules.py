"""The user's own rules for parameters that no table knows: value heads, adapters, new layers."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from mcore_rlhf.core.yaml_text import MAX_NBYTES, check_yaml
from mcore_rlhf.errors import UsageError, shown

from .spec import COLUMN, GATED, REPLICATED, ROW, VOCABULARY, Partition

_NAMED = {"replicated": REPLICATED, "column": COLUMN, "row": ROW, "gated": GATED, "vocabulary": VOCABULARY}


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a rules file.

    Args:
        pattern: Shell-style pattern on the global name, ``*value_head.weight``.
        partition: How such a parameter is cut, or None to leave that to the tables.
        wd_mult: Weight-decay multiplier of the optimizer group it belongs to, or None to derive it.
        trainable: Whether the optimizer has states for it, or None to find out.
    """

    pattern: str
    partition: Partition | None = None
    wd_mult: float | None = None
    trainable: bool | None = None

    def matches(self, name: str) -> bool:
        """Whether the rule speaks of that global name."""
        return fnmatchcase(name, self.pattern)


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules, first match first."""

    rules: tuple[Rule, ...] = ()

    def partition(self, name: str) -> Partition | None:
        """How the rules say that a parameter is cut."""
        return next((r.partition for r in self.rules if r.partition is not None and r.matches(name)), None)

    def wd_mult(self, name: str) -> float | None:
        """The weight-decay multiplier that the rules give a parameter."""
        return next((r.wd_mult for r in self.rules if r.wd_mult is not None and r.matches(name)), None)

    def trainable(self, name: str) -> bool | None:
        """Whether the rules say that a parameter is trained."""
        return next((r.trainable for r in self.rules if r.trainable is not None and r.matches(name)), None)


def read_rules(path: Path) -> Rules:
    """Read a rules file: YAML, a list under ``rules`` of ``pattern``, ``partition``, ``wd_mult``, ``trainable``.

    ``partition`` is one of the names replicated, column, row, gated, vocabulary, or a mapping ``{dim: 0, blocks: 3}``.

    Raises:
        UsageError: The file cannot be read or says something unknown.
    """
    import yaml

    try:
        text = _text(path)
        check_yaml(text)
        document = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot read the rules: {error.strerror}\nGive --rules the path of a YAML file."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the rules are not valid YAML: {error}") from None
    entries = document.get("rules") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise UsageError(f"{path}: expected a mapping with a list under 'rules', found {type(document).__name__}")
    return Rules(tuple(_rule(path, number, entry) for number, entry in enumerate(entries, 1)))


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is no regular file\nGive --rules the path of a YAML file.")
    with path.open("rb") as file:
        data = file.read(MAX_NBYTES + 1)
    if len(data) > MAX_NBYTES:
        raise UsageError(f"{path}: has more than {MAX_NBYTES:,} bytes, which no rules need")
    return data.decode("utf-8")


def _rule(path: Path, number: int, entry: object) -> Rule:
    where = f"{path}, rule {number}"
    if not isinstance(entry, dict) or not isinstance(entry.get("pattern"), str):
        raise UsageError(f"{where}: expected a mapping with a 'pattern', found {shown(entry)}")
    unknown = sorted(map(str, set(entry) - {"pattern", "partition", "wd_mult", "trainable"}))
    if unknown:
        raise UsageError(f"{where}: unknown {', '.join(unknown)}; known: pattern, partition, wd_mult, trainable")
    trainable, wd_mult = entry.get("trainable"), entry.get("wd_mult")
    if not isinstance(trainable, bool | None) or not isinstance(wd_mult, int | float | None):
        raise UsageError(f"{where}: 'trainable' must be true or false, and 'wd_mult' a number")
    return Rule(entry["pattern"], _partition(where, entry.get("partition")), wd_mult, trainable)


def _partition(where: str, value: object) -> Partition | None:
    if value is None:
        return None
    if isinstance(value, str) and value in _NAMED:
        return _NAMED[value]
    if isinstance(value, dict) and {"dim"} <= set(value) <= {"dim", "blocks"}:
        dim, blocks = value["dim"], value.get("blocks", 1)
        if type(dim) is int and type(blocks) is int and dim >= 0 and blocks >= 1:
            return Partition(dim, blocks)
    raise UsageError(f"{where}: partition {shown(value)} is not one of {', '.join(_NAMED)} or {{dim: N, blocks: N}}")

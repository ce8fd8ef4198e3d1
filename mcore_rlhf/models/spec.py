"""ModelSpec and ParamSpec: what a model is, independent of how it is cut and stored; and the user's own rules for parameters that no
table knows: value heads, adapters, new layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from mcore_rlhf.core.catalog import DType, Shape, dtype_of
from mcore_rlhf.core.yaml_text import MAX_NBYTES, check_yaml, wrong_yaml
from mcore_rlhf.errors import UsageError, shown

OF_WRAPPER = ("v_head.summary.weight", "v_head.summary.bias")
"""What TRL's value head has after the model that it is put upon, whose names in a state dict are its own.

Source: trl 0.24.0, ``models/modeling_value_head.py`` (``ValueHead``, ``AutoModelForCausalLMWithValueHead.state_dict``); LLaMA-Factory's
reward models and PPO are of that class.
"""


@dataclass(frozen=True, slots=True)
class Partition:
    """How one tensor is cut over tensor-parallel (or expert-tensor-parallel) ranks.

    Args:
        dim: The dimension that is cut, or None for a tensor that every rank holds whole.
        blocks: The dimension is made of that many equal blocks, and each rank holds its part of *each* block:
            2 for a fused ``[gate; up]``.
        vocabulary: The dimension counts words, and is padded to a size that depends on the degree.
        stacked: The stored dimension along which the local experts lie stacked (``GroupedMLP``). The tensor is then
            seen as ``(experts, *shape of one expert)``, and ``dim`` counts in that view.
        parts: The dimension is made of blocks of unequal size instead: name and elements of each, of the whole tensor.
        own_copies: Every rank has a copy of its own, which the others' need not equal. The tensor is seen as all of
            them, one behind the other, and exists at its own degree only.
    """

    dim: int | None = None
    blocks: int = 1
    vocabulary: bool = False
    stacked: int | None = None
    parts: tuple[tuple[str, int], ...] = ()
    own_copies: bool = False

    def __str__(self) -> str:
        if self.dim is None:
            return "replicated"
        if self.own_copies:
            return "a copy of its own on every rank"
        if self.parts:
            return f"split({self.dim}) in {', '.join(f'{name} {size}' for name, size in self.parts)}"
        kind = "vocabulary" if self.vocabulary else "split"
        return f"{kind}({self.dim})" + (f" in {self.blocks} blocks" if self.blocks > 1 else "")


REPLICATED = Partition()
COLUMN = Partition(0)
ROW = Partition(1)
GATED = Partition(0, blocks=2)
VOCABULARY = Partition(0, vocabulary=True)


FP8 = frozenset(map(dtype_of, ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")))
SCALE = re.compile(r"(.*)(_scale_inv|(?<=weight)_scale)")
"""A scale, and the weight that is to be multiplied with it."""
OTHERWISE_QUANTIZED = re.compile(
    r".*(\.qweight|\.qzeros|\.g_idx|weight_packed|weight_zero_point|weight_g_idx|weight_global_scale|weight_scale_2|\.absmax"
    r"|\.quant_map|\.quant_state\..*|\.SCB|\.W_q|_blocks)"
)
"""Names that stand for other ways to quantize: GPTQ, AWQ, compressed-tensors, ModelOpt, bitsandbytes, HQQ, MXFP4."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One tensor of a model.

    Args:
        name: Global name: layer and expert numbers count over the whole model.
        global_shape: Shape before any cut. Stacked experts are seen as ``(experts, *shape of one)``.
        dtype: Element type of the parameter as the model computes with it.
        partition: How it is cut.
        trainable: Whether the optimizer has states for it; False for buffers and frozen parameters.
    """

    name: str
    global_shape: Shape
    dtype: DType
    partition: Partition
    trainable: bool = True

    @property
    def quantized(self) -> bool:
        """Whether its elements are no values by themselves, or are what others are to be multiplied with."""
        return self.dtype in FP8 or any(names.fullmatch(self.name) for names in (SCALE, OTHERWISE_QUANTIZED))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model.

    Args:
        params: In registration order.
        num_layers: Decoder layers, multi-token-prediction layers not counted.
        tied: Whether the output layer shares the word embedding's weight.
        mtp_layers: Multi-token-prediction layers.
        num_experts: Routed experts per mixture layer; 0 for a dense model.
        vocab_size: True number of words, or None where nobody said.
        padded_vocab_size: Rows of the embedding as stored.
        unused: Parameters that the framework stores in some layouts only, and never uses.
    """

    params: tuple[ParamSpec, ...]
    num_layers: int
    tied: bool
    mtp_layers: int = 0
    num_experts: int = 0
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    unused: frozenset[str] = frozenset()
    _index: dict[str, ParamSpec] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._index.update((param.name, param) for param in self.params)

    def get(self, name: str) -> ParamSpec | None:
        """The parameter of that global name, or None."""
        return self._index.get(name)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The global shape of every parameter."""
        return {param.name: param.global_shape for param in self.params}

    @property
    def quantized(self) -> bool:
        """Whether some of its tensors are no values by themselves."""
        return any(param.quantized for param in self.params)

    def with_vocabulary(self, rows: int | None) -> dict[str, int]:
        """Every parameter whose rows are words, with that number of rows; none for None."""
        return {} if rows is None else {spec.name: rows for spec in self.params if spec.partition.vocabulary}

    def having(self, params: Iterable[ParamSpec]) -> ModelSpec:
        """The same model with other parameters."""
        return replace(self, params=tuple(params), _index={})


_NAMED = {"replicated": REPLICATED, "column": COLUMN, "row": ROW, "gated": GATED, "vocabulary": VOCABULARY}


@dataclass(frozen=True, slots=True)
class ParamRule:
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

    rules: tuple[ParamRule, ...] = ()

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
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: the rules are not valid YAML: {error}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: the rules are not valid YAML: {wrong_yaml(error)}") from None
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


def _rule(path: Path, number: int, entry: object) -> ParamRule:
    where = f"{path}, rule {number}"
    if not isinstance(entry, dict) or not isinstance(entry.get("pattern"), str):
        raise UsageError(f"{where}: expected a mapping with a 'pattern', found {shown(entry)}")
    unknown = sorted(map(str, set(entry) - {"pattern", "partition", "wd_mult", "trainable"}))
    if unknown:
        raise UsageError(f"{where}: unknown {', '.join(unknown)}; known: pattern, partition, wd_mult, trainable")
    trainable, wd_mult = entry.get("trainable"), entry.get("wd_mult")
    if not isinstance(trainable, bool | None) or not isinstance(wd_mult, int | float | None):
        raise UsageError(f"{where}: 'trainable' must be true or false, and 'wd_mult' a number")
    return ParamRule(entry["pattern"], _partition(where, entry.get("partition")), wd_mult, trainable)


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

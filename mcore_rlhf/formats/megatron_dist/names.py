"""The relation between Megatron's own names and the keys of ``torch_dist``, rows of a table, read both ways; and the parameters of a
checkpoint, whole shapes and cuts, in the order in which Megatron registers them: it is not stored, and flat buffers depend on it.

A key has no numbers: the layers (and experts) of a model lie stacked in one tensor, in front of the parameter's own dimensions.
Models with layers of several kinds keep the layer's number in the key. Separate norms go by the name of the linear layer behind
them, as if Transformer Engine had fused them.

Sources: megatron-core 0.16.1, ``transformer/transformer_block.py`` (``sharded_state_dict``), ``models/gpt/gpt_layer_specs.py``
(``sharded_state_dict_keys_map``), ``transformer/moe/experts.py``, ``transformer/mlp.py`` (``apply_swiglu_sharded_factory``),
``extensions/transformer_engine.py`` (``_sharded_state_dict_grouped``); 0.19.2, ``models/hybrid/hybrid_block.py``,
``ssm/mamba_mixer.py``, ``ssm/gated_delta_net/common.py`` (``sharded_state_dict``). Of the order: 0.16.1,
``models/gpt/gpt_model.py``, ``transformer/{transformer_layer,attention,multi_latent_attention,mlp,multi_token_prediction}.py``,
``transformer/moe/{moe_layer,router,experts,shared_experts}.py``; Transformer Engine,
``pytorch/module/{layernorm_linear,grouped_linear}.py``.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, product

from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.models.hybrid import DELTA_CONV, DELTA_IN, MAMBA_CONV, MAMBA_IN, since_0_19
from mcore_rlhf.models.megatron import (
    expert_of,
    renumbered,
)
from mcore_rlhf.models.spec import ParamSpec

_NUMBER = "{n}"


class Experts(Enum):
    """How a model names its routed experts."""

    SEQUENTIAL = "local_experts.3.linear_fc1.weight"
    GROUPED = "linear_fc1.weight3"
    PACKED = "weight1"


@dataclass(frozen=True, slots=True)
class KeySpelling:
    """What decides which keys a model has.

    Args:
        separate_norms: Whether norms that are modules of their own go by the name of the linear layer behind them: the local
            layer specification without multi-latent attention.
        experts: How routed experts are named.
        stacked: Whether all layers are of one kind, and lie in one tensor.
        singleton: Whether experts, and the halves of a gated matrix, have keys of their own (``singleton_local_shards``).
        conv_parameters: Whether Mamba's convolution is parameters of the mixer itself, and no module of its own.
        inner_layer: Whether the layer in a GPT model's multi-token prediction is ``mtp_model_layer``, as since 0.17; its key stayed.
    """

    separate_norms: bool
    experts: Experts
    stacked: bool
    singleton: bool = False
    conv_parameters: bool = False
    inner_layer: bool = False


@dataclass(frozen=True, slots=True)
class Home:
    """Where a parameter lies: at an index of a key's tensor.

    Args:
        key: The key.
        index: Layer and expert numbers, for the leading dimensions of the tensor.
        transposed: Whether the last two dimensions change places: ``GroupedMLP`` has its matrices the other way round.
        part: Which of the parameter's parts it is, from its first rows to its last; None for the whole parameter.
    """

    key: str
    index: Shape = ()
    transposed: bool = False
    part: int | None = None

    def turned(self, values: Shape) -> Shape:
        """One value for each of the parameter's dimensions, in the order in which the key has them; or the other way."""
        return (*values[:-2], values[-1], values[-2]) if self.transposed else values


@dataclass(frozen=True, slots=True)
class _Row:
    """A part of a name, and the same part of a key; ``{n}`` is a number, which the key has as well, or in its index."""

    name: str
    key: str
    transposed: bool = False

    @property
    def stacks(self) -> bool:
        """Whether the number becomes an index."""
        return _NUMBER in self.name and _NUMBER not in self.key

    def in_name(self, text: str) -> re.Match[str] | None:
        """Where the row's part stands in a name."""
        return _pattern(self.name).search(text)

    def in_key(self, text: str) -> re.Match[str] | None:
        """Where the row's part stands in a key."""
        return _pattern(self.key).search(text)


_PATTERNS: dict[str, re.Pattern[str]] = {}


def _pattern(template: str) -> re.Pattern[str]:
    """The template as a whole part of a dotted name: it begins behind a dot, and ends with one, or where the name does."""
    if template not in _PATTERNS:
        end = "" if template.endswith((".", "_")) else "$"
        text = re.escape(template).replace(re.escape(_NUMBER), r"(\d{1,18})")
        _PATTERNS[template] = re.compile(rf"(?<![^.]){text}{end}")
    return _PATTERNS[template]


_LAYERS = _Row("decoder.layers.{n}.", "decoder.layers.")
_NORMS = (
    _Row("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    _Row("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
_EXPERTS = {
    Experts.SEQUENTIAL: (_Row("mlp.experts.local_experts.{n}.", "mlp.experts.experts."),),
    Experts.GROUPED: tuple(
        _Row(f"mlp.experts.{layer}.{kind}{{n}}", f"mlp.experts.experts.{layer}.{kind}")
        for layer in ("linear_fc1", "linear_fc2")
        for kind in ("weight", "bias", "_extra_state")
    ),
    Experts.PACKED: (
        _Row("mlp.experts.weight1", "mlp.experts.experts.linear_fc1.weight", transposed=True),
        _Row("mlp.experts.weight2", "mlp.experts.experts.linear_fc2.weight", transposed=True),
    ),
}
_CONV = tuple(_Row(f"mixer.conv1d_{kind}", f"mixer.conv1d.{kind}") for kind in ("weight", "bias"))
_INNER = (_Row("mtp.layers.{n}.mtp_model_layer.", "mtp.layers.{n}.transformer_layer."),)
"""Source: megatron-core 0.17.1 to 0.19.2, ``transformer/multi_token_prediction.py`` (``sharded_state_dict``); hybrid models keep it."""
_SINGLETON_EXPERTS = {
    Experts.SEQUENTIAL: (_Row("mlp.experts.local_experts.{n}.", "mlp.experts.experts.{n}."),),
    Experts.GROUPED: tuple(
        replace(row, key=row.key.replace(".experts.experts.", ".experts.experts.{n}."))
        for row in _EXPERTS[Experts.GROUPED]
    ),
}
_HALVES = "wv"
_HALF = re.compile(rf"(.*\blinear_fc1\.(?:weight|bias)\d*)_([{_HALVES}])")
_BLOCKS = tuple(
    (re.compile(rf"((?:.*\.)?{whole})(?:\.(\w+))?"), fused.blocks)
    for whole, fused in (
        (r"mixer\.in_proj\.weight", MAMBA_IN),
        (r"mixer\.conv1d\.(?:weight|bias)", MAMBA_CONV),
        (r"self_attention\.in_proj\.weight", DELTA_IN),
        (r"self_attention\.conv1d\.(?:weight|bias)", DELTA_CONV),
    )
)
"""Keys of tensors that are made of blocks, each of which has a key of its own, and what the blocks are called."""
EXPERT_STATES = ("mlp.experts.experts.linear_fc1._extra_state", "mlp.experts.experts.linear_fc2._extra_state")
"""Keys that every mixture layer has, also where its module keeps no such state, or one for all experts."""


def rows_of(spelling: KeySpelling) -> tuple[_Row, ...]:
    """The rows that hold for a model, in the order in which they are read from name to key."""
    layers = (_LAYERS,) if spelling.stacked else ()
    norms = _NORMS if spelling.separate_norms else ()
    experts = _EXPERTS[spelling.experts]
    if spelling.singleton:
        experts = _SINGLETON_EXPERTS.get(spelling.experts, experts)
    inner = _INNER if spelling.inner_layer else ()
    return (*layers, *inner, *norms, *experts, *(_CONV if spelling.conv_parameters else ()))


def home_of(name: str, spelling: KeySpelling) -> Home:
    """The key of a parameter, and its index there.

    Args:
        name: Its global name.
        spelling: What decides.
    """
    index: list[int] = []
    transposed = False
    for row in rows_of(spelling):
        match = row.in_name(name)
        if match is None:
            continue
        transposed = transposed or row.transposed
        if row.stacks:
            index += map(int, match.groups())
        name = name[: match.start()] + row.key.replace(_NUMBER, "".join(match.groups())) + name[match.end() :]
    return Home(name, tuple(index), transposed)


def blocks_of(key: str) -> tuple[str, ...]:
    """What the blocks of a key are called, where each has a key of its own, behind a dot."""
    found = ((pattern.fullmatch(key), blocks) for pattern, blocks in _BLOCKS)
    return next((blocks for match, blocks in found if match and match.group(2) is None), ())


def _whole_of(key: str, spelling: KeySpelling) -> tuple[str, int | None]:
    """The key of the whole parameter, and which part of it lies at this one; None for all of it."""
    halved = _HALF.fullmatch(key) if spelling.singleton else None
    if halved:
        return halved.group(1), _HALVES.index(halved.group(2))
    for pattern, blocks in _BLOCKS:
        match = pattern.fullmatch(key)
        if match and match.group(2) in blocks:
            return match.group(1), blocks.index(match.group(2))
    return key, None


def stacked_axes(key: str, spelling: KeySpelling) -> int:
    """How many leading dimensions of a key's tensor count layers and experts."""
    return sum(1 for row in rows_of(spelling) if row.stacks and row.in_key(key) is not None)


def name_at(key: str, index: Shape, spelling: KeySpelling) -> str:
    """The name of the parameter that lies at an index of a key's tensor: :func:`home_of`, read the other way."""
    numbers, name = list(index), key
    for row in reversed(rows_of(spelling)):
        match = row.in_key(name)
        if match is None:
            continue
        number = str(numbers.pop()) if row.stacks else "".join(match.groups())
        name = name[: match.start()] + row.name.replace(_NUMBER, number) + name[match.end() :]
    return name


def extents(home: Home, spelling: KeySpelling, layers: int, experts: int) -> Shape:
    """How many layers and experts lie along each index of a home.

    Args:
        home: A parameter's home.
        spelling: What decides.
        layers: Decoder layers of the model.
        experts: Its routed experts.
    """
    stacked = spelling.stacked and _LAYERS.in_key(home.key) is not None
    counts = (layers, experts) if stacked else (experts,)
    return counts[: len(home.index)]


def homes_of(spec: ParamSpec, spelling: KeySpelling) -> list[tuple[Home, int, int]]:
    """Where a parameter lies, with the first row and the number of rows at each place: its blocks have keys of their own.

    Raises:
        Unsupported: It is not known which keys they have.
    """
    home, rows = home_of(spec.name, spelling), (*spec.global_shape, 1)[0]
    if ".linear_qkv_down_proj." in home.key:
        # Source: megatron-core 0.19.2, transformer/multi_latent_attention.py, FusedMLASelfAttention.sharded_state_dict
        raise Unsupported(
            f"{spec.name}: torch_dist has what --mla-down-proj-fusion joins under the names of the two projections, and that is "
            "not written\nConvert to megatron (--ckpt-format torch), which has it as one."
        )
    blocks = blocks_of(home.key)
    if spelling.singleton and spec.partition.blocks == len(_HALVES) and _HALF.fullmatch(f"{home.key}_{_HALVES[0]}"):
        half = rows // len(_HALVES)
        return [(replace(home, key=f"{home.key}_{name}"), at * half, half) for at, name in enumerate(_HALVES)]
    if not blocks:
        return [(home, 0, rows)]
    if tuple(name for name, _ in spec.partition.parts) != blocks:
        raise Unsupported(
            f"{spec.name}: torch_dist has its blocks {', '.join(blocks)} one by one, and how long they are is not known: it is "
            f"{spec.partition}\nLeave out the rule that says how it is cut."
        )
    starts = accumulate((size for _, size in spec.partition.parts), initial=0)
    found = zip(spec.partition.parts, starts, strict=False)
    return [(replace(home, key=f"{home.key}.{name}"), start, size) for (name, size), start in found]


def stacked(spec: ParamSpec, spelling: KeySpelling, layers: int, experts: int) -> Iterator[tuple[Home, Shape]]:
    """Where a parameter lies, with the whole shape of the tensor at each place.

    Args:
        spec: The parameter.
        spelling: What decides.
        layers: Decoder layers of the model.
        experts: Its routed experts.
    """
    for home, _, rows in homes_of(spec, spelling):
        shape = (rows, *spec.global_shape[1:])[: len(spec.global_shape)]
        yield home, (*extents(home, spelling, layers, experts), *home.turned(shape))


def names_in(key: str, shape: Shape, spelling: KeySpelling) -> Iterator[tuple[str, Home]]:
    """All parameters of which a key's tensor holds something.

    Args:
        key: The key.
        shape: Shape of its tensor.
        spelling: What decides.
    """
    whole, part = _whole_of(key, spelling)
    transposed = any(row.transposed and row.in_key(whole) is not None for row in rows_of(spelling))
    for index in product(*map(range, shape[: stacked_axes(whole, spelling)])):
        yield name_at(whole, index, spelling), Home(key, index, transposed, part)


def spelling_of_keys(keys: Iterable[str], args: Arguments) -> KeySpelling:
    """What decides, for a checkpoint: its keys, and where they do not tell, its arguments.

    Args:
        keys: Of the model's tensors.
        args: The run's arguments.
    """
    local = not args.transformer_engine and not args.flag("multi_latent_attention")
    inner = args.pattern is None and "hybrid_layer_pattern" in args.values  # which came with 0.17 as well
    found = KeySpelling(
        local, _experts_of(args), stacked=True, conv_parameters=since_0_19(args.values), inner_layer=inner
    )
    return as_keys_are(found, keys)


def as_keys_are(spelling: KeySpelling, keys: Iterable[str]) -> KeySpelling:
    """What decides, with what keys themselves tell: whether layers, experts and halves of gated matrices are one by one.

    Args:
        spelling: What decides otherwise.
        keys: Of the model's tensors, or of states of theirs.
    """
    listed = list(keys)
    numbered = any(re.match(r"decoder\.layers\.\d+\.", key) for key in listed)
    return replace(spelling, stacked=not numbered, singleton=any(_HALF.fullmatch(key) for key in listed))


def without_holes(spelling: KeySpelling, states: Mapping[str, Hashable]) -> KeySpelling:
    """What decides where layers, or experts of a layer, differ in their states: those have keys of their own.

    A state of stacked layers is one tensor, and Megatron saves none that has holes. Source: megatron-core 0.19.2,
    ``dist_checkpointing/validation.py`` (``_validate_sharding_for_key``).

    Args:
        spelling: What decides otherwise.
        states: Those of each parameter, by name.
    """
    apart = replace(spelling, stacked=False)
    for found in (spelling, apart):
        stacks: dict[str, Hashable] = {}
        if all(stacks.setdefault(home_of(name, found).key, own) == own for name, own in states.items()):
            return found
    return replace(apart, singleton=True)


def _experts_of(args: Arguments) -> Experts:
    """Which module holds the experts.

    Source: megatron-core 0.16.1, ``models/backends.py``, ``extensions/transformer_engine_spec_provider.py``
    (``grouped_mlp_modules``).
    """
    if args.pattern is not None:  # a hybrid model's specification has no other
        return Experts.GROUPED
    if not args.flag("moe_grouped_gemm"):
        return Experts.SEQUENTIAL
    packed = not args.transformer_engine or args.flag("moe_use_legacy_grouped_gemm")
    return Experts.PACKED if packed else Experts.GROUPED


def spelling_of_names(names: Iterable[str], args: Arguments) -> KeySpelling:
    """What decides, for a model that is to be written: its names, and of its layers also the arguments.

    Args:
        names: All its parameters.
        args: The run's arguments.
    """
    kinds: dict[str, set[str]] = {}
    inner = False
    for name in names:
        inner = inner or (args.pattern is None and ".mtp_model_layer." in name)
        match = _LAYERS.in_name(name)
        if match is not None:
            kinds.setdefault(match.group(1), set()).add(_unnumbered(name[match.end() :]))
    suffixes = set().union(*kinds.values())
    separate = {"input_layernorm.weight", "self_attention.linear_qkv.weight"} <= suffixes
    experts = Experts.SEQUENTIAL
    if "mlp.experts.weight1" in suffixes:
        experts = Experts.PACKED
    elif "mlp.experts.linear_fc1.weight0" in suffixes:
        experts = Experts.GROUPED
    same = len({frozenset(kind) for kind in kinds.values()}) <= 1
    conv = any(suffix.startswith("mixer.conv1d_") for suffix in suffixes)
    return KeySpelling(separate, experts, same and not _several_kinds(args), conv_parameters=conv, inner_layer=inner)


def _unnumbered(suffix: str) -> str:
    """A layer's parameter as that of expert 0."""
    return renumbered(suffix, 0, -(expert_of(suffix) or 0))


def _several_kinds(args: Arguments) -> bool:
    """Whether Megatron takes the layers to be of several kinds, whatever they are.

    Source: megatron-core 0.16.1, ``transformer/transformer_block.py`` (``non_homogeneous_layers``); Megatron-LM
    core_v0.16.1, ``megatron/training/arguments.py``.
    """
    for name in ("moe_layer_freq", "linear_attention_freq"):
        value = args.values.get(name)
        if isinstance(value, list) or (isinstance(value, int) and value > 1):
            return True
    several = ("heterogeneous_layers_config_path", "hetereogenous_dist_checkpoint")
    return args.pattern is not None or any(args.values.get(name) for name in several)

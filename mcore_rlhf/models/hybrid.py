"""HybridModel: the pattern that says what every layer is, and the blocks of which the fused tensors of its mixers are made.

Sources: megatron-core 0.19.2, ``models/hybrid/hybrid_layer_allocation.py`` (``Symbols``, ``parse_hybrid_pattern``),
``ssm/mamba_mixer.py`` (``MambaMixer.__init__``, ``sharded_state_dict``), ``ssm/gated_delta_net/gdn.py`` (``_setup_variant_attrs``),
``ssm/gated_delta_net/common.py`` (``sharded_state_dict``). 0.16.1 has the same blocks (``ssm/gated_delta_net.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mcore_rlhf.errors import LayoutMismatch, Unsupported, shown

from .meaning.bounds import MOST_LETTERS
from .spec import Partition

_KINDS = {
    "M": "Mamba", "G": "gated delta net", "*": "attention", "D": "sparse attention", "+": "latent attention",
    "-": "feed-forward", "E": "experts",
}  # fmt: skip
"""What a symbol of the pattern stands for."""
STAGE, NEXT_TOKENS = "|", "/"

_MARKS = {
    "M": ".mixer.", "G": ".self_attention.in_proj.", "*": ".self_attention.linear_qkv.", "D": ".self_attention.",
    "+": ".self_attention.", "-": ".mlp.linear_fc1.", "E": ".mlp.router.",
}  # fmt: skip
"""What the names of such a layer's parameters have in them."""


def unlike(symbol: str, names: Iterable[str]) -> str:
    """What a layer is by the pattern's symbol, where the names of its parameters say otherwise; empty where they agree.

    Args:
        symbol: One of the pattern's.
        names: Of the layer's parameters.
    """
    return "" if any(_MARKS[symbol] in name for name in names) else _KINDS[symbol]


@dataclass(frozen=True, slots=True)
class Pattern:
    """``args.hybrid_layer_pattern``, understood.

    Args:
        segments: The symbols of every model chunk, in the order in which a token passes them; all in one where no stages are marked.
        next_tokens: What stands behind the decoder, for multi-token prediction, with its slash.
    """

    segments: tuple[str, ...]
    next_tokens: str = ""

    @classmethod
    def of(cls, text: str) -> Pattern:
        """Read a pattern.

        Raises:
            Unsupported: It has a symbol that no known version has, or more than any model has layers.
        """
        if len(text) > MOST_LETTERS:
            raise Unsupported(f"hybrid_layer_pattern {shown(text)}: more than {MOST_LETTERS:,} letters")
        main, slash, rest = text.partition(NEXT_TOKENS)
        strange = sorted(set(main + rest) - set(_KINDS) - {STAGE, NEXT_TOKENS})
        if strange:
            known = ", ".join(f"{symbol} {kind}" for symbol, kind in _KINDS.items())
            raise Unsupported(
                f"hybrid_layer_pattern {shown(text)}: unknown {' '.join(strange[:20])}; known are {known}, | and /"
            )
        return cls(tuple(main.split(STAGE)), slash + rest)

    @property
    def layers(self) -> str:
        """One symbol for each decoder layer."""
        return "".join(self.segments)

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Layers of every model chunk, where the pattern marks them."""
        return tuple(map(len, self.segments)) if len(self.segments) > 1 else None

    def dealt(self, counts: Sequence[int] | None) -> Pattern:
        """The same layers, with other marks, or with none."""
        layers, segments = self.layers, []
        for count in counts or (len(layers),):
            segments.append(layers[:count])
            layers = layers[count:]
        return Pattern(tuple(segments), self.next_tokens)

    def __str__(self) -> str:
        return STAGE.join(self.segments) + self.next_tokens


@dataclass(frozen=True, slots=True)
class Fused:
    """A first dimension that is made of blocks of unequal size, each of which tensor parallelism cuts on its own.

    Args:
        mixer: Whose it is: ``mamba`` or ``linear``, as its arguments begin, or ``latent``.
        blocks: Their names, which are also those of torch_dist's keys.
    """

    mixer: str
    blocks: tuple[str, ...]

    def partition(self, args: Mapping[str, object]) -> Partition:
        """How such a tensor is cut in a run.

        Raises:
            LayoutMismatch: Arguments are missing of which the sizes are made.
        """
        sizes = _MIXERS[self.mixer](args)
        return Partition(0, parts=tuple((name, sizes[name]) for name in self.blocks))


MAMBA_IN, MAMBA_CONV = Fused("mamba", ("z", "x", "B", "C", "dt")), Fused("mamba", ("x", "B", "C"))
DELTA_IN = Fused("linear", ("query", "key", "value", "z", "beta", "alpha"))
DELTA_CONV = Fused("linear", ("query", "key", "value"))
LATENT_DOWN = Fused("latent", ("queries", "keys and values"))


def _mamba(args: Mapping[str, object]) -> dict[str, int]:
    """Elements of Mamba's blocks."""
    heads = mamba_heads(args)
    inner = heads * _size(args, "mamba_head_dim")
    groups = _size(args, "mamba_num_groups") * _size(args, "mamba_state_dim")
    return {"z": inner, "x": inner, "B": groups, "C": groups, "dt": heads}


def mamba_heads(args: Mapping[str, object]) -> int:
    """Heads of a Mamba layer: as said, or so many that the inner size is twice the hidden size."""
    if args.get("mamba_num_heads") is not None:
        return _size(args, "mamba_num_heads")
    return 2 * _size(args, "hidden_size") // _size(args, "mamba_head_dim")


def _linear(args: Mapping[str, object]) -> dict[str, int]:
    """Elements of the gated delta net's blocks."""
    heads = _size(args, "linear_num_value_heads")
    keys = _size(args, "linear_num_key_heads") * _size(args, "linear_key_head_dim")
    values = heads * _size(args, "linear_value_head_dim")
    return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}


def _latent(args: Mapping[str, object]) -> dict[str, int]:
    """Elements of latent attention's down-projections, where one matrix holds both.

    Source: megatron-core 0.19.2, ``transformer/multi_latent_attention.py`` (``FusedMLASelfAttention._qkv_down_projection``).
    """
    keys = _size(args, "kv_lora_rank") + _size(args, "qk_pos_emb_head_dim")
    return {"queries": _size(args, "q_lora_rank"), "keys and values": keys}


def since_0_19(args: Mapping[str, object]) -> bool:
    """Whether 0.19 or later wrote a run's files: they do not say so, but this argument is as new.

    Since then Mamba's convolution is ``mixer.conv1d_weight``, and no module ``mixer.conv1d``. Source: megatron-core 0.19.2 and
    0.18.2, ``ssm/mamba_mixer.py``, ``transformer/transformer_config.py``.
    """
    return "mamba_training_ssm_states_dtype" in args


_MIXERS = {"mamba": _mamba, "linear": _linear, "latent": _latent}


def _size(args: Mapping[str, object], name: str) -> int:
    value = args.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutMismatch(
            f"args.{name} is {value!r}, of which the blocks of a fused projection are made: expected a positive number\n"
            "Files without the run's args need them: a model file that Megatron itself wrote has them."
        )
    return value


def heads_to_divide(args: Mapping[str, object], layers: str) -> dict[str, int]:
    """What tensor parallelism must divide whole, by what it is called: heads and groups of the mixers that there are.

    Args:
        args: The run's arguments.
        layers: The symbols of all layers.
    """
    found: dict[str, int] = {}
    if "M" in layers:
        found |= {"Mamba heads": mamba_heads(args), "Mamba groups": _size(args, "mamba_num_groups")}
    if "G" in layers:
        names = {"key heads": "linear_num_key_heads", "value heads": "linear_num_value_heads"}
        found |= {f"{what} of the gated delta net": _size(args, name) for what, name in names.items()}
    return found

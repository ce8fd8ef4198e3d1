"""Rotary positions, as ``config.json`` and Megatron's arguments say them: bases, parts of a head, and ways of scaling.

Sources: transformers 5.23.0, ``modeling_rope_utils.py`` and ``models/*/modeling_*.py`` (of the architectures here GLM's
alone looks at ``partial_rotary_factor``; the others' rotate whole heads whatever it says); megatron-core 0.16.1,
``models/common/embeddings/{rotary_pos_embedding,yarn_rotary_pos_embedding}.py``, ``models/gpt/gpt_model.py``,
``transformer/{multi_latent_attention,transformer_config}.py``; Megatron-LM core_v0.16.1,
``megatron/training/arguments.py``, and core_v0.19.0, ``megatron/training/argument_utils.py``
(``_apply_yarn_config_from_args``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rlhf.errors import Problems, Unsupported
from mcore_rlhf.models.meaning.kinds import Field, Values

from .fields import integer, number

_LLAMA3: dict[str, object] = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip
"""What Megatron's ``--use-rope-scaling`` has fixed."""

_ORIGINAL = "original_max_position_embeddings"
ROPE_NAMES = ("rope_theta", "rope_parameters", "rope_scaling", "rope_type")
_YARN_ARGS = (
    "yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale",
    "yarn_mscale_all_dim", "yarn_correction_range_round_to_int", "rotary_scaling_factor", "mscale", "mscale_all_dim",
)  # fmt: skip
_ROTARY = (
    "rotary_base", "rotary_percent", "position_embedding_type", "use_rope_scaling", "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor", *_YARN_ARGS,
)  # fmt: skip
_SINES = "yarn_rotary_scaling_factor"
_OUTSIDE = ("rope_theta", "partial_rotary_factor", "max_position_embeddings")
"""What is also found beside the section on rotary embeddings."""
_FAR = 1e-9
"""Two attention factors that are nearer than that are one, written differently."""


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's numbers, as both sides compute with them.

    Args:
        factor: How much longer texts get.
        original: For how long ones the model was trained.
        fast, slow: Between how many rotations the two ways of scaling are mixed.
        mscale, mscale_all: Megatron multiplies sine and cosine by the quotient of what the two make of ``factor``.
        truncated: Whether the bounds of the mixture are whole numbers.
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    mscale: float = 1.0
    mscale_all: float = 0.0
    truncated: bool = True

    @classmethod
    def of_rope(cls, rope: Values) -> Yarn:
        """What a ``config.json`` says.

        Raises:
            Unsupported: Its attention factor is none that Megatron's two numbers make.
        """
        original = integer(rope, "original_max_position_embeddings") or integer(rope, "max_position_embeddings")
        factor = number(rope, "factor", 0.0) or integer(rope, "max_position_embeddings") / max(original, 1)
        mscale, every = number(rope, "mscale", 0.0), number(rope, "mscale_all_dim", 0.0)
        asked = rope.get("attention_factor")
        if mscale and every and asked is None:
            made = mscale
        else:
            wanted = asked if isinstance(asked, int | float) else _get_mscale(factor, 1.0)
            made = _mscale_for(wanted * _get_mscale(factor, every), factor)
        return cls(
            factor, original, number(rope, "beta_fast", 0.0) or 32.0, number(rope, "beta_slow", 0.0) or 1.0, made, every,
            bool(rope.get("truncate", True)),
        )  # fmt: skip

    @property
    def sines(self) -> float:
        """What Megatron multiplies sine and cosine by."""
        return _get_mscale(self.factor, self.mscale) / _get_mscale(self.factor, self.mscale_all)

    def rope(self) -> dict[str, object]:
        """What a ``config.json`` says of it; transformers takes the two numbers where neither is 0."""
        said: dict[str, object] = {
            "rope_type": "yarn", "type": "yarn", "factor": self.factor,
            "original_max_position_embeddings": self.original, "beta_fast": self.fast, "beta_slow": self.slow,
        }  # fmt: skip
        if self.mscale_all:
            said["mscale_all_dim"] = self.mscale_all
        if self.mscale and self.mscale_all:
            said["mscale"] = self.mscale
        elif abs(self.sines - _get_mscale(self.factor, 1.0)) > _FAR:
            said["attention_factor"] = self.sines
        if not self.truncated:
            said["truncate"] = False
        return said


def _get_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _mscale_for(wanted: float, factor: float) -> float:
    """The number of which Megatron makes a factor: 1 where it is YaRN's own."""
    if abs(wanted - _get_mscale(factor, 1.0)) < _FAR:
        return 1.0
    if factor <= 1:
        raise Unsupported(f"config.json: attention_factor {wanted} of YaRN by {factor}; Megatron takes 1 for it")
    return (wanted - 1.0) / (0.1 * math.log(factor))


def _rotary_args(config: Values, partial: bool, scalable: bool) -> dict[str, object]:
    rope = rope_of(config)
    kind, percent = rope_type(rope), number(rope, "partial_rotary_factor", 1.0) if partial else 1.0
    said: dict[str, object] = {
        "rotary_base": _base(rope), "rotary_percent": percent, "use_rope_scaling": kind == "llama3",
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
    }  # fmt: skip
    if kind != "default" and not scalable:
        raise Unsupported(
            f"config.json: rotary embeddings of type {kind} are the class's own; Megatron's GPT has no such"
        )
    if kind == "llama3":
        _check_llama3(rope)
        said["rope_scaling_factor"] = number(rope, "factor", 8.0)
    elif kind == "linear":
        said["rotary_seq_len_interpolation_factor"] = _whole(rope, "factor", "--rotary-seq-len-interpolation-factor")
    elif kind == "yarn":
        said.update(_yarn_args(rope, percent))
    elif kind != "default":
        raise Unsupported(
            f"config.json: rotary embeddings of type {kind} are not supported; Megatron's GPT knows the types default, "
            "llama3, linear and yarn"
        )
    return said


def _rotary_config(args: Values, partial: bool, scaled: bool, scalable: bool) -> dict[str, object]:
    config: dict[str, object] = {"rope_theta": float(number(args, "rotary_base", 10000))}
    percent = number(args, "rotary_percent", 1.0)
    if partial:
        config["partial_rotary_factor"] = percent
    elif percent != 1.0:
        raise Unsupported(f"args: rotary_percent is {percent}, and transformers rotates whole heads")
    scalings = _scalings(args)
    if len(scalings) > 1:
        raise Unsupported(f"args: {' and '.join(scalings)} at once; config.json has one type of rotary positions")
    if scalings and not scalable:
        raise Unsupported(f"args: {', '.join(scalings)}, and transformers' class does not scale positions so")
    for scaling in scalings.values() or ([{"rope_type": "default"}] if scaled else []):
        config["rope_scaling"] = scaling
    return config


def rotary(*, partial: bool = False, scaled: bool = False, scalable: bool = True) -> Field:
    """Rotary positions: their base, the part of a head that has them, and how they are scaled.

    ``config.json`` gets ``rope_theta`` and ``rope_scaling``, which transformers before and since version 5 reads.

    Args:
        partial: Whether the class looks at ``partial_rotary_factor``.
        scaled: Whether the class scales positions unless its ``config.json`` says that it does not.
        scalable: Whether the class scales positions in a way that Megatron has.
    """
    return Field(
        (*ROPE_NAMES, *(["partial_rotary_factor"] if partial else [])),
        _ROTARY,
        lambda config: _rotary_args(config, partial, scalable),
        lambda args: _rotary_config(args, partial, scaled, scalable),
    )


def _scalings(args: Values) -> dict[str, dict[str, object]]:
    """What scales positions: ``rope_scaling`` by Megatron's argument."""
    found: dict[str, dict[str, object]] = {}
    kind, length = args.get("position_embedding_type"), number(args, "rotary_seq_len_interpolation_factor", 1)
    if kind not in (None, "rope", "yarn"):
        raise Unsupported(f"args: position_embedding_type is {kind}, and transformers computes as with rope")
    if kind == "yarn":
        found["position_embedding_type yarn"] = _yarn_of(args).rope()
    elif (
        _SINES in args and _yarn_of(args).sines != 1.0
    ):  # of the configuration itself, which Megatron looks at whatever the type is
        raise Unsupported(
            f"args: position_embedding_type is {kind or 'rope'}, and {_SINES} {args[_SINES]} scales sines and cosines all the same"
        )
    if args.get("use_rope_scaling"):
        factor = number(args, "rope_scaling_factor", 8.0)
        found["use_rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    if length != 1:
        name = f"rotary_seq_len_interpolation_factor {length}"
        found[name] = {"rope_type": "linear", "type": "linear", "factor": float(length)}
    return found


def _yarn_args(rope: Values, percent: float) -> dict[str, object]:
    """YaRN as megatron-core's configuration has it, and as newer Megatron-LM's arguments spell the same."""
    if percent != 1.0:
        raise Unsupported(f"config.json: YaRN over {percent} of a head; megatron-core's takes whole heads")
    yarn = Yarn.of_rope(rope)
    return {
        "yarn_rotary_scaling_factor": yarn.factor, "yarn_original_max_position_embeddings": yarn.original,
        "yarn_beta_fast": yarn.fast, "yarn_beta_slow": yarn.slow, "yarn_mscale": yarn.mscale,
        "yarn_mscale_all_dim": yarn.mscale_all, "yarn_correction_range_round_to_int": yarn.truncated,
        "rotary_scaling_factor": yarn.factor, "mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all,
    }  # fmt: skip


def _yarn_of(args: Values) -> Yarn:
    """Of a configuration's own attributes where they are there, otherwise of Megatron-LM's arguments.

    Source: megatron-core 0.19.2, ``models/common/embeddings/yarn_rotary_pos_embedding.py``
    (``_yarn_get_concentration_factor_from_config``): where an attribute is None, both numbers are what they are by default.
    """
    mscale, every = args.get("yarn_mscale"), args.get("yarn_mscale_all_dim")
    if _SINES not in args:
        mscale, every = number(args, "mscale", 1.0), number(args, "mscale_all_dim", 0.0)
    elif not isinstance(mscale, int | float) or not isinstance(every, int | float):
        mscale, every = 1.0, 0.0
    rounded = args.get("yarn_correction_range_round_to_int")
    return Yarn(
        number(args, _SINES, number(args, "rotary_scaling_factor", 1.0)),
        int(number(args, "yarn_original_max_position_embeddings", 4096)), number(args, "yarn_beta_fast", 32.0),
        number(args, "yarn_beta_slow", 1.0), mscale, every, rounded is None or bool(rounded),
    )  # fmt: skip


_LATENT_ROTARY = (
    "rotary_base", "rotary_percent", "rope_type", "rotary_scaling_factor", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip


def _latent_args(config: Values, interleaved: bool) -> dict[str, object]:
    rope = rope_of(config)
    kind = rope_type(rope)
    if kind not in ("default", "yarn"):
        raise Unsupported(f"config.json: rotary embeddings of type {kind} are not supported with latent attention")
    if interleaved and config.get("rope_interleave", True) is False:
        raise Unsupported(
            "config.json: rope_interleave is false; Megatron's latent attention takes pairs that lie side by side"
        )
    if number(rope, "partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported(
            f"config.json: partial_rotary_factor {rope['partial_rotary_factor']}; Megatron's latent attention rotates all of its part"
        )
    said: dict[str, object] = {"rotary_base": _base(rope), "rotary_percent": 1.0}
    if kind == "default":
        return {**said, "rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn = Yarn.of_rope(rope)
    if not yarn.truncated:
        raise Unsupported("config.json: truncate is false; Megatron's latent attention rounds YaRN's bounds")
    return {
        **said, "rope_type": "yarn", "rotary_scaling_factor": yarn.factor, "beta_fast": yarn.fast, "beta_slow": yarn.slow,
        "original_max_position_embeddings": yarn.original, "mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all,
    }  # fmt: skip


def _latent_config(args: Values, interleaved: bool) -> dict[str, object]:
    config: dict[str, object] = {"rope_theta": float(number(args, "rotary_base", 10000))}
    if interleaved:
        config["rope_interleave"] = True
    # A stored run has the argument's default of 1; without one, the configuration's own default counts.
    factor, every = number(args, "rotary_scaling_factor", 40.0), number(args, "mscale_all_dim", 0.0)
    if (args.get("rope_type") or "yarn") == "yarn":
        yarn = Yarn(
            factor, int(number(args, "original_max_position_embeddings", 4096)), number(args, "beta_fast", 32.0),
            number(args, "beta_slow", 1.0), number(args, "mscale", 1.0), every,
        )  # fmt: skip
        return config if factor == 1.0 else {**config, "rope_scaling": yarn.rope()}
    if number(args, "rotary_percent", 1.0) != 1.0:
        raise Unsupported(f"args: rotary_percent is {args['rotary_percent']}, and transformers rotates whole heads")
    if _get_mscale(factor, every) != 1.0:
        raise Unsupported(
            f"args: mscale_all_dim {every} with rotary_scaling_factor {factor} scales attention though rope_type is rope"
        )
    return config


def latent_rotary(*, interleaved: bool = False) -> Field:
    """Rotary positions of latent attention, of which Megatron also knows YaRN, as it has it unless told otherwise. It always takes pairs
    apart. Without YaRN its own defaults, which suit DeepSeek-V3's, would scale.

    Args:
        interleaved: Whether ``config.json`` can say that pairs lie side by side.
    """
    return Field(
        (*ROPE_NAMES, *(["rope_interleave"] if interleaved else [])),
        _LATENT_ROTARY,
        lambda config: _latent_args(config, interleaved),
        lambda args: _latent_config(args, interleaved),
    )


def rope_of(config: Values) -> Values:
    """What it says of rotary embeddings: in one place since transformers 5, in several before."""
    found = config.get("rope_scaling") or config.get("rope_parameters")
    outside = {name: config[name] for name in _OUTSIDE if name in config}
    return {**outside, **(found if isinstance(found, Mapping) else {})}


def rope_type(rope: Values) -> object:
    """The type of rotary embeddings."""
    return rope.get("rope_type", rope.get("type")) or "default"


def _base(rope: Values) -> int:
    """Megatron's ``--rotary-base`` is a whole number."""
    base = number(rope, "rope_theta", 10000)
    if base != int(base):
        raise Unsupported(f"config.json: rope_theta {base}; Megatron's --rotary-base is a whole number")
    return int(base)


def _whole(rope: Values, name: str, argument: str) -> int:
    value = number(rope, name, 1.0)
    if value != int(value):
        raise Unsupported(f"config.json: {name} {value}; Megatron's {argument} is a whole number")
    return int(value)


def _check_llama3(rope: Values) -> None:
    problems = Problems()
    for name, value in _LLAMA3.items():
        said = rope.get(name, rope.get("max_position_embeddings", value) if name == _ORIGINAL else value)
        if said != value:
            problems.add(Unsupported, f"config.json: {name} is {said}, and {value} is fixed in megatron-core")
    problems.raise_if_any()


def is_frequencies(name: str) -> bool:
    """Whether a tensor is the table of rotary frequencies that folders of 2023 still have, Llama 2's among them, once a layer.

    It is computed from the config, and not loaded.
    Source: transformers 5.23.0, ``modeling_utils.py`` (``_adjust_missing_and_unexpected_keys``).
    """
    return name.endswith("rotary_emb.inv_freq")

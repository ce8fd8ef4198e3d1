"""Which layers are mixtures of experts and which experts compete, as ``config.json`` and Megatron's arguments say it."""

from __future__ import annotations

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.models.meaning.kinds import Field, Values

from .fields import integer, number

_ARG, _LAYERS, _HF_LAYERS = "moe_layer_freq", "num_layers", "num_hidden_layers"
_FIRST = "first_k_dense_replace"
_CLAMP, _ALPHA = "activation_func_clamp_value", 1.702


def mixture_layers(args: Values) -> frozenset[int]:
    """Numbers of the layers that are mixtures of experts.

    Source: megatron-core 0.16.1, ``models/gpt/gpt_layer_specs.py`` (``get_gpt_decoder_layer_specs``).

    Args:
        args: Megatron's.
    """
    layers = args.get(_LAYERS)
    if not args.get("num_experts") or not isinstance(layers, int):
        return frozenset()
    frequency = args.get(_ARG)
    if isinstance(frequency, list | tuple):
        return frozenset(number for number, mixture in enumerate(frequency) if mixture)
    every = frequency if isinstance(frequency, int) and frequency > 0 else 1
    return frozenset(range(0, layers, every))


def _argument(mixture: frozenset[int], layers: int) -> dict[str, object]:
    if len(mixture) == layers:
        return {_ARG: 1}
    return {_ARG: [int(number in mixture) for number in range(layers)]}


def _after_dense(config: Values) -> dict[str, object]:
    first = config.get(_FIRST)
    first = first if isinstance(first, int) else 0
    return _argument(frozenset(range(first, integer(config, _HF_LAYERS))), integer(config, _HF_LAYERS))


def _first_dense(args: Values) -> dict[str, object]:
    mixture, layers = mixture_layers(args), args.get(_LAYERS)
    first = min(mixture, default=layers if isinstance(layers, int) else 0)
    if isinstance(layers, int) and mixture != frozenset(range(first, layers)):
        raise Unsupported(
            f"args: moe_layer_freq has dense layers after mixtures, and {_FIRST} in config.json can only say how many come first"
        )
    return {_FIRST: first}


FIRST_DENSE = Field((_FIRST,), (_ARG,), _after_dense, _first_dense)
"""The first layers are dense, all others are mixtures."""


def _listed_sparse(config: Values) -> dict[str, object]:
    """Refuses a list with other kinds or of another length, and a number beside it that says something else."""
    kinds, layers, first = config.get("mlp_layer_types"), integer(config, _HF_LAYERS), config.get(_FIRST)
    if not isinstance(kinds, list):
        kinds = ["dense", *["sparse"] * (layers - 1)]
    if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise Unsupported(f"config.json: mlp_layer_types {kinds}: expected {layers} of dense and sparse")
    mixture = frozenset(number for number, kind in enumerate(kinds) if kind == "sparse")
    if isinstance(first, int) and mixture != frozenset(range(first, layers)):
        raise Unsupported(
            f"config.json: first_k_dense_replace is {first}, and transformers, which looks at mlp_layer_types alone, has the mixtures "
            f"{sorted(mixture)}"
        )
    return _argument(mixture, layers)


def _sparse_list(args: Values) -> dict[str, object]:
    mixture = mixture_layers(args)
    return {"mlp_layer_types": ["sparse" if n in mixture else "dense" for n in range(integer(args, _LAYERS))]}


SPARSE_LIST = Field(("mlp_layer_types", _FIRST), (_ARG,), _listed_sparse, _sparse_list)
"""Which layers are mixtures: as listed, and without a list all but the first.

Source: transformers 5.23.0, ``models/glm4_moe_lite/configuration_glm4_moe_lite.py``; it looks at no other field.
"""
_DENSE, _STEP = "mlp_only_layers", "decoder_sparse_step"


def _every_so_many(config: Values) -> dict[str, object]:
    listed, step = config.get(_DENSE), config.get(_STEP)
    dense = frozenset(listed) if isinstance(listed, list | tuple) else frozenset()
    every = step if isinstance(step, int) and step > 0 else 1
    numbers = range(integer(config, _HF_LAYERS))
    mixture = frozenset(n for n in numbers if n not in dense and (n + 1) % every == 0)
    return _argument(mixture, integer(config, _HF_LAYERS))


def _dense_list(args: Values) -> dict[str, object]:
    layers, mixture = args.get(_LAYERS), mixture_layers(args)
    numbers = range(layers if isinstance(layers, int) else 0)
    return {_DENSE: [number for number in numbers if number not in mixture], _STEP: 1}


DENSE_LIST = Field((_DENSE, _STEP), (_ARG,), _every_so_many, _dense_list)
"""Every so many layers are mixtures, except those in a list.

Source: transformers 5.23.0, ``models/qwen3_moe/modeling_qwen3_moe.py`` (``Qwen3MoeDecoderLayer.__init__``).
"""


def groups(*, grouped: str | None = None, alone: str | None = None) -> Field:
    """Groups of experts of which only some are looked at; one group is none.

    Args:
        grouped: What ``config.json`` calls this method of choosing; None where it needs no name.
        alone: What it calls the method without groups.
    """

    def args(config: Values) -> dict[str, object]:
        number, chosen = config.get("n_group"), config.get("topk_group")
        named = grouped is None or config.get("topk_method", alone) == grouped
        several = named and isinstance(number, int) and number > 1
        return {
            "moe_router_num_groups": number if several else None, "moe_router_group_topk": chosen if several else None
        }  # fmt: skip

    def config(args: Values) -> dict[str, object]:
        number, chosen = args.get("moe_router_num_groups"), args.get("moe_router_group_topk")
        said: dict[str, object] = {"n_group": number or 1, "topk_group": chosen or 1}
        method = grouped if number else alone
        return said if method is None else {**said, "topk_method": method}

    names = ("n_group", "topk_group", *(["topk_method"] if grouped else []))
    return Field(names, ("moe_router_num_groups", "moe_router_group_topk"), args, config)


def softmax_weights(said: str | None = None) -> Field:
    """Whether the weights of the chosen experts add up to 1: Megatron takes the softmax of those alone, or of all before.

    Source: megatron-core 0.16.1, ``transformer/transformer_config.py`` (``__post_init__``).

    Args:
        said: In ``config.json``, whether they do; None where they always do.
    """

    def args(config: Values) -> dict[str, object]:
        whole = said is None or bool(config.get(said))
        if whole and config.get("num_experts_per_tok") == 1:  # which alone gets the weight 1
            raise Unsupported(
                f"config.json: num_experts_per_tok 1 with {said or 'weights'} that add up to 1; Megatron wants "
                "--moe-router-pre-softmax for one expert"
            )
        return {"moe_router_pre_softmax": not whole}

    def config(args: Values) -> dict[str, object]:
        before = bool(args.get("moe_router_pre_softmax"))
        if said is None and before:
            raise Unsupported("args: moe_router_pre_softmax is True, and transformers computes as with False")
        return {} if said is None else {said: not before}

    return Field(() if said is None else (said,), ("moe_router_pre_softmax",), args, config)


def _by_sigmoid(config: Values) -> dict[str, object]:
    said, chosen = bool(config.get("norm_topk_prob", True)), config.get("num_experts_per_tok")
    if isinstance(chosen, int) and said != (chosen > 1):
        does = "makes several weights add up to 1" if chosen > 1 else "leaves the weight of a single one as it is"
        raise Unsupported(
            f"config.json: norm_topk_prob {said} with {chosen} experts chosen by a sigmoid; Megatron {does}"
        )
    return {}


SIGMOID_WEIGHTS = Field(
    ("norm_topk_prob",), (), _by_sigmoid, lambda args: {"norm_topk_prob": args.get("moe_router_topk", 2) != 1}
)
"""The weights of experts that a sigmoid chose: Megatron makes several add up to 1, and leaves a single one as it is.

Source: megatron-core 0.16.1, ``transformer/moe/moe_utils.py`` (``topk_routing_with_score_function``).
"""


def _one_next(args: Values) -> dict[str, object]:
    if integer(args, "mtp_num_layers") > 1:
        raise Unsupported(f"args: mtp_num_layers is {args['mtp_num_layers']}, and the class has names for one layer")
    return {}


ONE_NEXT_LAYER = Field((), ("mtp_num_layers",), config=_one_next)
"""One layer of multi-token prediction at most, of which the tensors tell and ``config.json`` needs not."""


def _clamped_args(config: Values) -> dict[str, object]:
    if number(config, "swiglu_alpha", _ALPHA) != _ALPHA:
        raise Unsupported(f"config.json: swiglu_alpha {config['swiglu_alpha']}; Megatron's --quick-geglu has {_ALPHA}")
    limit = number(config, "swiglu_limit", 7.0)
    return {"swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0, _CLAMP: limit}


def _clamped_config(args: Values) -> dict[str, object]:
    if args.get("swiglu") or not args.get("quick_geglu"):
        raise Unsupported("args: quick_geglu is off, and transformers computes as with it")
    offset, limit = number(args, "glu_linear_offset", 0.0), args.get(_CLAMP)
    if offset != 1.0:
        raise Unsupported(f"args: glu_linear_offset is {offset}, and transformers computes as with 1.0")
    if not isinstance(limit, int | float):
        raise Unsupported(f"args: {_CLAMP} is {limit}, and transformers always clamps")
    return {"swiglu_limit": float(limit)}


CLAMPED_GATE = Field(
    ("swiglu_limit", "swiglu_alpha"),
    ("swiglu", "quick_geglu", "glu_linear_offset", _CLAMP),
    _clamped_args,
    _clamped_config,
)
"""GPT-OSS's feed-forward: ``(up + 1) * gate * sigmoid(1.702 * gate)``, both clamped before.

Sources: transformers 5.23.0, ``models/gpt_oss/modeling_gpt_oss.py`` (``GptOssExperts._apply_gate``); megatron-core 0.16.1
and 0.19.2, ``transformer/mlp.py``, ``fusions/fused_bias_geglu.py`` (``quick_gelu``).
"""


def doubt_about_groups(args: Values) -> str | None:
    """Where transformers chooses other groups than Megatron does.

    Megatron scores a group by its best ``topk / group_topk`` experts. DeepSeek-V3 and GLM-4.5 always take the best 2,
    DeepSeek-V2 the best one.

    Sources: megatron-core 0.16.1, ``transformer/moe/moe_utils.py`` (``group_limited_topk``); transformers 5.23.0,
    ``models/{deepseek_v2,deepseek_v3}/modeling_*.py``.
    """
    chosen, topk = args.get("moe_router_group_topk"), args.get("moe_router_topk")
    if not isinstance(chosen, int) or not isinstance(topk, int):
        return None
    best = 2 if args.get("moe_router_score_function") == "sigmoid" else 1
    if topk == best * chosen:
        return None
    return (
        f"{topk} experts of {chosen} groups: transformers scores a group by its best {best}, Megatron by its best {topk // chosen}; "
        "the weights are right, but the two models do not choose the same experts"
    )

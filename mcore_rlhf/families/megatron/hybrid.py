"""GPTModel and HybridModel: one model under both names. A GPT layer is two hybrid ones, an attention and a feed-forward.

Source: megatron-core 0.19.2, ``dist_checkpointing/gpt_checkpoint_interop.py`` (``gpt_compatible_layer_maps``: the i-th attention and the
i-th feed-forward are of GPT layer i), ``models/hybrid/hybrid_layer_specs.py`` (``hybrid_stack_spec``: norms are fused into the linear
layers behind them, but for experts, which are grouped).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from mcore_rlhf.core.facts import Fate, Item, Kind, Rule, Values, same
from mcore_rlhf.errors import LayoutMismatch, Unsupported
from mcore_rlhf.families.source import Source
from mcore_rlhf.models.hybrid import Pattern
from mcore_rlhf.models.megatron import layer_of, registration_order

from .arguments import PATTERNS, Arguments, stored_arguments
from .state import MegatronState, RankValues

_SPEC = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
_PAIRS = re.compile(r"(\*[-E])+")
_LAYER = re.compile(r"decoder\.layers\.(\d{1,18})\.(.*)")
_ATTENTION = ("self_attention.", "input_layernorm.")
_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_EXPERT = re.compile(r"local_experts\.(\d{1,18})\.(linear_fc[12]\.(?:weight|bias))$")
_EXPERT_STATE = re.compile(r"local_experts\.\d{1,18}\.(linear_fc[12]\._extra_state)$")
_KNOWN = re.compile(
    r"(self_attention\.linear_(qkv|proj)\.(layer_norm_)?(weight|bias)|mlp\.linear_fc[12]\.(layer_norm_)?(weight|bias)|pre_mlp_layernorm\.\w+|"
    r"mlp\.router\.\w+|mlp\.(shared_experts|experts)\.(linear_fc[12]\.(weight|bias)\d*|gate_\w+)|.*_extra_state)$"
)
_STAGES = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout",
)  # fmt: skip


def as_hybrid(source: Source, text: str) -> Source:
    """A GPTModel as a HybridModel, with its optimizer.

    Args:
        source: A source under Megatron's names.
        text: What its layers are to be, as ``--hybrid-layer-pattern`` has it.

    Raises:
        CheckpointError: The pattern is not that of such a model, or HybridModel has no place for some of it.
    """
    family, pattern = MegatronState.needed(source), Pattern.of(text)
    if family.args.pattern is not None:
        raise Unsupported(
            f"{source.root}: is a hybrid model already, {family.args.pattern}; --hybrid-layer-pattern is for GPTModels"
        )
    _check_pattern(pattern, source)
    kinds = pattern.layers
    names = {name: _hybrid_name(name, kinds) for name in (*source.model.shapes, *family.order)}
    changed: dict[str, object] = {
        PATTERNS[0]: str(pattern), "num_layers": len(kinds), "spec": list(_SPEC), "transformer_impl": "transformer_engine",
        **({"moe_grouped_gemm": True} if "E" in kinds else {}), **dict.fromkeys(_STAGES), "num_layers_per_virtual_pipeline_stage": None,
    }  # fmt: skip
    if "encoder_num_layers" in family.args.values:
        changed["encoder_num_layers"] = len(kinds)
    return _renamed(source, names, len(kinds), changed, f"GPTModel → HybridModel {pattern}")


def as_gpt(source: Source) -> Source:
    """A HybridModel of attention and feed-forwards in turn as a GPTModel; any other source as it is.

    Raises:
        CheckpointError: It has layers that GPTModel does not have.
    """
    family = MegatronState.of(source)
    pattern = None if family is None else family.args.pattern
    if family is None or pattern is None:
        return source
    if pattern.next_tokens or not _PAIRS.fullmatch(pattern.layers):
        raise Unsupported(
            f"{source.root}: the layers {pattern} of this hybrid model are not attention and feed-forward in turn (*- or *E), and a "
            "GPTModel, and what goes by its names, has no others"
        )
    names = {name: _gpt_name(name) for name in (*source.model.shapes, *family.order)}
    layers = len(pattern.layers) // 2
    changed: dict[str, object] = {
        **dict.fromkeys(PATTERNS),
        "num_layers": layers,
        "spec": None,
        "is_hybrid_model": False,
    }
    if "encoder_num_layers" in family.args.values:
        changed["encoder_num_layers"] = layers
    return _renamed(source, names, layers, changed, f"HybridModel {pattern} → GPTModel")


def _check_pattern(pattern: Pattern, source: Source) -> None:
    """A pattern must have the source's layers, and nothing else: what else it asks for would have to be invented."""
    kinds = pattern.layers
    for symbol, why in (
        ("M", "a Mamba layer"),
        ("G", "a gated delta net"),
        ("D", "sparse attention"),
        ("+", "latent attention"),
    ):
        if symbol in kinds:
            raise Unsupported(
                f"--hybrid-layer-pattern {pattern}: {symbol} is {why}, for which a GPTModel has no weights\nGive a pattern of its own "
                "layers, such as *-*-; Megatron itself leaves M layers fresh where a run of such a pattern loads a torch_dist GPTModel."
            )
    if pattern.next_tokens or source.model.mtp_layers:
        raise Unsupported(
            f"--hybrid-layer-pattern {pattern}: layers of multi-token prediction are not mapped; without them the rest is"
        )
    experts = {
        layer for s in source.model.params if ".mlp.experts." in s.name and (layer := layer_of(s.name)) is not None
    }
    wanted = "".join("*E" if layer in experts else "*-" for layer in range(source.model.num_layers))
    if kinds != wanted:
        raise LayoutMismatch(
            f"--hybrid-layer-pattern {pattern}: the {source.model.num_layers} layers of this GPTModel are {wanted}, attention (*) and "
            "behind it a feed-forward (-) or experts (E); any other order would compute something else"
        )


def _hybrid_name(name: str, kinds: str) -> str:
    """A GPTModel's name as HybridModel has it."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name.replace("decoder.final_layernorm.", "decoder.final_norm.")
    layer, rest = int(match.group(1)), match.group(2)
    of_attention = rest.startswith(_ATTENTION)
    for norm, fused in _FUSED.items():
        if rest.startswith(norm) and not (norm.startswith("pre_mlp") and kinds[2 * layer + 1] == "E"):
            rest = fused + rest.removeprefix(norm)
    rest = _EXPERT_STATE.sub(r"\1", _EXPERT.sub(r"\2\1", rest))
    if not _KNOWN.fullmatch(rest):
        raise Unsupported(
            f"{name}: HybridModel's layers have nothing of the kind (megatron-core 0.19.2, hybrid_stack_spec)"
        )
    return f"decoder.layers.{2 * layer + (not of_attention)}.{rest}"


def _gpt_name(name: str) -> str:
    """A hybrid model's name as GPTModel with Transformer Engine's layers has it."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name.replace("decoder.final_norm.", "decoder.final_layernorm.")
    return f"decoder.layers.{int(match.group(1)) // 2}.{match.group(2)}"


_RENAMED: tuple[Rule[Values], ...] = (
    Rule(Fate.CHANGED, "{text}: names, and the arguments that describe its layers", dict),
    Rule(
        Fate.DERIVED,
        "as a run of the other model stores it",
        lambda v: {"of": v["differs"]},
        [Item(Kind.MODEL)],
        told=False,
    ),
)


def _renamed(source: Source, names: Mapping[str, str], layers: int, changed: Mapping[str, object], text: str) -> Source:
    """The source under other names and with other arguments."""
    family, notes = MegatronState.needed(source), source.notes.copy()
    args = _with(source.state.args, changed)
    differs = [Item(Kind.ARGUMENT, k) for k, v in source.state.args.items() if not same(v, args.get(k))]
    notes.through(_RENAMED, {"text": text, "differs": differs})
    new = {names[spec.name]: spec for spec in source.model.params}
    order = [name for name in registration_order(names.values()) if not name.endswith("layer_norm__extra_state")]
    specs = tuple(replace(new[name], name=name) for name in order if name in new)
    model = replace(
        source.model, params=specs, num_layers=layers, _index={}, unused=frozenset(_each(names, source.model.unused))
    )
    return replace(
        source, model=model, catalog=source.catalog.renamed(source.role, {name: spec.name for name, spec in new.items()}),
        state=replace(source.state, args=args), notes=notes,
        family=replace(
            family, args=Arguments({**family.args.values, **args}), order=list(dict.fromkeys(order)),
            unknown=list(_each(names, family.unknown)), shards=[_seen(shard, names, changed) for shard in family.shards],
        ),
    )  # fmt: skip


def _each(names: Mapping[str, str], some: Iterable[str]) -> Iterable[str]:
    return (names[name] for name in some)


def _seen(rank: RankValues, names: Mapping[str, str], changed: Mapping[str, object]) -> RankValues:
    """What belongs to a rank, with other arguments, and its opaque values under other names."""
    args = {"args": _with(stored_arguments(rank.top), changed)} if rank.top.get("args") is not None else {}
    parts = (replace(part, opaque={names.get(n, n): value for n, value in part.opaque.items()}) for part in rank.parts)
    return RankValues(rank.at, {**rank.top, **args}, tuple(parts), rank.materialize)


def _with(args: Mapping[str, object], changed: Mapping[str, object]) -> dict[str, object]:
    """Arguments of the other model; what is not said in them is not unsaid."""
    return {**args, **{name: value for name, value in changed.items() if value is not None or name in args}}

"""Megatron's stored ``args``: what they say of the layout, whether the files agree, and what they must say for a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rlhf.core.catalog import DType, Shape, dtype_of
from mcore_rlhf.core.facts import Fate, Rule, Values
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Problems
from mcore_rlhf.layouts.parallel import ParallelConfig, least_dp
from mcore_rlhf.layouts.pipeline import ModelChunk, PipelineSplit, model_chunks
from mcore_rlhf.models.hybrid import Pattern, since_0_19, unlike
from mcore_rlhf.models.meaning.bounds import check_sizes
from mcore_rlhf.models.megatron import EMBEDDING, layer_of, second_matrix
from mcore_rlhf.models.spec import ModelSpec

DISTRIBUTED, PLAIN, LAYER_WISE = "distributed", "plain", "layer_wise"
"""Kinds of optimizer: one that is cut over data-parallel ranks, one that every rank has whole, one of which each has whole parameters."""

_NULL = "NullTokenizer"
_LAYER_WISE, BY_LAYOUT = "use_layer_wise_distributed_optimizer", "use_layer_wise_param_layout"


@dataclass(frozen=True, slots=True)
class Arguments:
    """A typed view of the attributes of ``args``; missing ones read as their default, and sizes that no run has are refused.

    Source of the names: Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``.
    """

    values: Mapping[str, object]
    where: str = "args"

    def __post_init__(self) -> None:
        check_sizes(self.values, self.where)

    def integer(self, name: str, default: int = 0) -> int:
        """An integer attribute; None counts as missing."""
        value = self.values.get(name)
        return default if value is None or not isinstance(value, int) else int(value)

    def optional(self, name: str) -> int | None:
        """An integer attribute, or None."""
        value = self.values.get(name)
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else None

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean attribute."""
        value = self.values.get(name)
        return default if value is None else bool(value)

    def number(self, name: str) -> float | None:
        """A numeric attribute, or None."""
        value = self.values.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def query_groups(self) -> tuple[int, int, int] | None:
        """How ``linear_qkv`` is made: query groups, each of so many query heads, a key and a value, and the rows of each of these;
        None where nobody says, or where gates stand between them.
        """
        heads, channels = self.optional("num_attention_heads"), self.optional("kv_channels")
        if not heads or channels is None or self.flag("attention_output_gate"):
            return None
        groups = self.integer("num_query_groups", heads) if self.flag("group_query_attention") else heads
        return None if groups < 1 or heads % groups else (groups, heads // groups, channels)

    @property
    def num_experts(self) -> int:
        """Routed experts per layer; 0 for a dense model."""
        return self.integer("num_experts")

    @property
    def mtp_layers(self) -> int:
        """Multi-token-prediction layers."""
        return self.integer("mtp_num_layers")

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's weight."""
        return not self.flag("untie_embeddings_and_output_weights", default=True)

    @property
    def gated(self) -> bool:
        """Whether the feed-forward is gated."""
        return self.flag("swiglu") or self.flag("quick_geglu") or self.flag("geglu")

    @property
    def transformer_engine(self) -> bool:
        """Whether the layers are Transformer Engine's; those of a hybrid model always are."""
        return self.pattern is not None or self.values.get("transformer_impl", "transformer_engine") != "local"

    @property
    def vocab_size(self) -> int | None:
        """True number of words, extra ids included; None where the run did not store it, or it is that of no tokenizer.

        ``NullTokenizer`` took ``--vocab-size`` and added an end-of-document word; today that is the last of them. Others do not ask for it.
        Sources: megatron-core 0.16.1 and 0.19.2, ``tokenizers/text/libraries/null_tokenizer.py``.
        """
        size, rows = self.optional("vocab_size"), self.optional("padded_vocab_size")
        if size is None:
            return None
        size += self.integer("vocab_extra_ids")
        if self.values.get("tokenizer_type") == _NULL:
            return size + 1 if rows is None or size < rows else size
        return size if rows is None or size <= rows else None

    @property
    def has_matrix_optimizer(self) -> bool:
        """Whether matrices are trained by an optimizer of their own, such as Muon, with Adam or Lion beside it for everything else.

        Sources: megatron-core 0.19.2, ``optimizer/__init__.py`` (``get_megatron_optimizer``): any but adam and sgd; megatron-core
        0.16.1 and 0.17.1, ``optimizer/muon.py``: Muon alone, and no argument about a layer-wise optimizer yet.
        """
        name = str(self.values.get("optimizer") or "adam")
        return "muon" in name or (_LAYER_WISE in self.values and name not in ("adam", "sgd"))

    @property
    def has_narrow_params(self) -> bool:
        """Whether weights are not their masters rounded: of fp8 or fp4, or of masters in fp16 (Transformer Engine 2.9, ``FusedAdam``)."""
        precise, dtype = self.flag("use_precision_aware_optimizer"), str(self.values.get("main_params_dtype"))
        return (precise and "16" in dtype) or self.flag("fp8_param_gather") or self.flag("fp4_param_gather")

    @property
    def layer_wise(self) -> bool:
        """Whether that optimizer deals whole parameters to data-parallel ranks: ``dist_muon``, as 0.16 and 0.17 call it."""
        return self.has_matrix_optimizer and (
            self.flag(_LAYER_WISE) or str(self.values.get("optimizer")).startswith("dist_")
        )

    @property
    def params_dtype(self) -> DType | None:
        """Element type of the parameters."""
        value = self.values.get("params_dtype")
        return dtype_of(value) if value is not None else None

    @property
    def pipeline_split(self) -> PipelineSplit:
        """How decoder layers are dealt to stages."""
        layout = self.values.get("pipeline_model_parallel_layout")
        text = layout if isinstance(layout, str) else _layout_text(layout)
        return PipelineSplit(
            first=self.optional("decoder_first_pipeline_num_layers"),
            last=self.optional("decoder_last_pipeline_num_layers"),
            count_embedding=self.flag("account_for_embedding_in_pipeline_split"),
            count_loss=self.flag("account_for_loss_in_pipeline_split"),
            layout=text,
            counts=self.pattern.counts if self.pattern is not None else None,
        )

    @property
    def pattern(self) -> Pattern | None:
        """What every layer of a hybrid model is, and which chunk it lies in; None for any other model.

        Raises:
            Unsupported: The pattern has symbols that no known version has.
        """
        value = next((value for name in PATTERNS if isinstance(value := self.values.get(name), str)), None)
        return None if value is None else Pattern.of(value)

    def parallel(self) -> ParallelConfig:
        """The degrees of the run that wrote the files."""
        tp = self.integer("tensor_model_parallel_size", self.integer("model_parallel_size", 1)) or 1
        pp = self.integer("pipeline_model_parallel_size", 1) or 1
        cp = self.integer("context_parallel_size", 1) or 1
        ep = (self.integer("expert_model_parallel_size", 1) or 1) if self.num_experts else 1
        etp = (self.integer("expert_tensor_parallel_size", tp) or tp) if self.num_experts else tp
        dp = self.integer("data_parallel_size") or max(1, self.integer("world_size", 1) // (tp * pp * cp))
        dp = dp if (tp * cp * dp) % (etp * ep) == 0 else least_dp(tp, cp, ep, etp)
        layout = self.pipeline_split.layout
        return ParallelConfig(tp, pp, self._vpp(pp), cp, ep, etp, dp, layout)

    def experts_apart(self, parallel: ParallelConfig) -> bool:
        """Whether routed experts have an optimizer and buffers of their own: where other ranks share them than the dense parameters.

        Sources: megatron-core 0.16.1 and 0.18.2, ``tensor_parallel/layers.py``: ``allreduce`` is false only where
        ``expert_model_parallel_size > 1``; 0.19.2, the same (``use_expert_pgs``): and where experts are cut otherwise.
        """
        cut_otherwise = parallel.etp != parallel.tp and since_0_19(self.values)
        return bool(self.num_experts) and (parallel.ep > 1 or cut_otherwise)

    def _vpp(self, pp: int) -> int:
        if pp == 1:
            return 1
        return self.integer("virtual_pipeline_model_parallel_size", 1) or 1


def stored_arguments(tree: Mapping[str, object]) -> dict[str, object]:
    """The ``args`` of a model file as a dictionary; empty where it has none. Some tools store a dictionary itself."""
    args = tree.get("args")
    if args is None or isinstance(args, dict):
        return dict(args or {})
    return dict(vars(args))


def _layout_text(layout: object) -> str | None:
    """The text of a layout that was stored as Megatron's own object (read as a stub)."""
    state = getattr(layout, "__dict__", {})
    text = state.get("input_data") if isinstance(state, dict) else None
    return text if isinstance(text, str) else None


PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Where the pattern of a hybrid model stands: since 0.17, and before, without marks for stages.

Source: Megatron-LM core_v0.17.1, ``megatron/training/arguments.py``.
"""


def arguments_for(
    old: Mapping[str, object],
    parallel: ParallelConfig,
    split: PipelineSplit,
    *,
    rank: int | None,
    padded_vocab_size: int | None,
    params_dtype: DType | None,
    optimizer: str | None,
    ckpt_format: str = "torch",
) -> dict[str, object]:
    """The arguments that a run at the new layout would have stored.

    Only what depends on the layout changes, and only attributes that the source has, or that the layout needs, are set.

    Args:
        old: The source's arguments.
        parallel: The new degrees.
        split: How layers are dealt.
        rank: The rank that writes the file; None where ranks stay what they were.
        padded_vocab_size: Rows of the embedding.
        params_dtype: A torch name for the parameters' element type when it changes, else None.
        optimizer: ``distributed``, ``plain``, ``layer_wise`` or None.
        ckpt_format: Megatron's name of the format that is written: ``torch`` or ``torch_dist``.
    """
    where_present = _layout_arguments(old, parallel, split, padded_vocab_size)
    if old.get("ckpt_format") not in (None, ckpt_format):
        where_present.update(ckpt_format=ckpt_format, use_dist_ckpt=ckpt_format == "torch_dist")
    if rank is not None:
        where_present.update(rank=rank, local_rank=0)
    new = {**old, **_degrees(parallel)}
    new.update((name, value) for name, value in where_present.items() if name in old or value not in (None, False))
    new.update(_virtual_stage_arguments(old, parallel, split))
    new.update(_pattern_arguments(old, split))
    if optimizer is not None:
        new.update(_optimizer_arguments(old, optimizer, ckpt_format))
    if params_dtype is not None:
        bf16 = params_dtype.name == "bfloat16"
        new.update(bf16=bf16, fp16=params_dtype.name == "float16")
        if "accumulate_allreduce_grads_in_fp32" in old:  # Megatron's default follows the parameters' type
            new["accumulate_allreduce_grads_in_fp32"] = bf16 and not old.get("grad_reduce_in_bf16")
    return new


def _degrees(parallel: ParallelConfig) -> dict[str, object]:
    """Arguments that every run stores."""
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "context_parallel_size": parallel.cp,
        "data_parallel_size": parallel.dp,
        "world_size": parallel.world_size,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
    }


def _layout_arguments(
    old: Mapping[str, object], parallel: ParallelConfig, split: PipelineSplit, padded_vocab_size: int | None
) -> dict[str, object]:
    """Arguments that are stored where the run has them, or the layout needs them."""
    moe = bool(old.get("num_experts"))
    found: dict[str, object] = {
        "transformer_pipeline_model_parallel_size": parallel.pp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "decoder_first_pipeline_num_layers": split.first,
        "decoder_last_pipeline_num_layers": split.last,
        "account_for_embedding_in_pipeline_split": split.count_embedding,
        "account_for_loss_in_pipeline_split": split.count_loss,
        "pipeline_model_parallel_layout": split.layout,
        "sequence_parallel": parallel.tp > 1 and (bool(old.get("sequence_parallel")) or moe),
        "padded_vocab_size": padded_vocab_size,
    }
    if parallel.tp == 1:
        found["tp_comm_overlap"] = False  # overlaps what sequence parallelism communicates
    if old.get("inprocess_active_world_size") == old.get("world_size"):
        found["inprocess_active_world_size"] = parallel.world_size
    return found


def _virtual_stage_arguments(
    old: Mapping[str, object], parallel: ParallelConfig, split: PipelineSplit
) -> dict[str, object]:
    """How Megatron is told of virtual stages: by their layers where all are equal, by their number, or by a layout."""
    layers = old.get("num_layers")
    virtual = parallel.vpp > 1 and split.layout is None and split.counts is None
    per_chunk = layers // (parallel.pp * parallel.vpp) if virtual and split.even and isinstance(layers, int) else None
    new: dict[str, object] = {"num_layers_per_virtual_pipeline_stage": per_chunk}
    if "num_virtual_stages_per_pipeline_rank" in old or (virtual and per_chunk is None):
        new["num_virtual_stages_per_pipeline_rank"] = parallel.vpp if virtual and per_chunk is None else None
    if (parallel.vpp > 1) != bool(old.get("virtual_pipeline_model_parallel_size")):
        dependent = ("overlap_p2p_comm", "align_param_gather")  # Megatron's defaults; only virtual stages can have them
        new.update((name, parallel.vpp > 1) for name in dependent if name in old)
    return new


def _pattern_arguments(old: Mapping[str, object], split: PipelineSplit) -> dict[str, object]:
    """The pattern of a hybrid model with the marks of its stages, wherever the source has it."""
    pattern = Arguments(old).pattern
    if pattern is None:
        return {}
    return {name: str(pattern.dealt(split.counts)) for name in PATTERNS if isinstance(old.get(name), str)}


def _optimizer_arguments(old: Mapping[str, object], optimizer: str, ckpt_format: str) -> dict[str, object]:
    """Megatron overlaps the gathering of parameters with the distributed and the layer-wise optimizer only.

    Since 0.18 the layer-wise optimizer deals by a layout of its own, unless it is told not to; the ``torch`` format cannot hold that.
    """
    new: dict[str, object] = {"use_distributed_optimizer": optimizer == DISTRIBUTED}
    if optimizer == PLAIN:
        dependent = ("overlap_param_gather", "align_param_gather", "overlap_param_gather_with_optimizer_step")
        new.update((name, False) for name in dependent if name in old)
    if Arguments(old).has_matrix_optimizer:
        if _LAYER_WISE in old:
            new[_LAYER_WISE] = optimizer == LAYER_WISE
        else:
            new["optimizer"] = "dist_muon" if optimizer == LAYER_WISE else "muon"
        if optimizer == LAYER_WISE and ckpt_format == "torch" and BY_LAYOUT in old:
            new[BY_LAYOUT] = False
    return new


NO_ARGUMENTS: Rule[Values] = Rule(Fate.NOTE, "{file} stores no args; {instead}", dict)


def check_against_arguments(
    args: Arguments, file: str, model: ModelSpec, chunks: Sequence[ModelChunk] | None, parallel: ParallelConfig
) -> None:
    """The model as found in the files must be the one that the arguments describe.

    Args:
        args: The arguments.
        file: Where they are stored.
        model: What the files hold.
        chunks: How the files deal the layers to model chunks; None where they do not.
        parallel: The degrees.

    Raises:
        LayoutMismatch: It is not; every contradiction is listed.
    """
    problems = Problems()

    def compare(what: str, found: int | None, name: str) -> None:
        said = args.optional(name)
        if said is not None and found is not None and found != said:
            problems.add(LayoutMismatch, f"{what}: found {found} in the files, but args.{name} is {said} in {file}")

    embedding = model.get(EMBEDDING)
    compare("decoder layers", model.num_layers, "num_layers")
    if args.pattern is not None and len(args.pattern.layers) != model.num_layers:
        layers = len(args.pattern.layers)
        text = f"decoder layers: found {model.num_layers} in the files, but args.{PATTERNS[0]} {args.pattern} in {file} has {layers}"
        problems.add(LayoutMismatch, text)
    elif args.pattern is not None:
        _check_pattern(args.pattern, file, model, problems)
    if embedding is not None:
        compare("embedding rows", embedding.global_shape[0], "padded_vocab_size")
        compare("hidden size", embedding.global_shape[1], "hidden_size")
        if model.vocab_size is not None and model.vocab_size > (rows := embedding.global_shape[0]):
            text = f"embedding rows: found {rows} in the files, too few for the {model.vocab_size} words of {file}, or of --vocab-size"
            problems.add(LayoutMismatch, text)
    _check_qkv(args, file, model, problems)
    if not problems and chunks is not None:
        _check_chunks(args, file, model, chunks, parallel, problems)
    problems.raise_if_any()


def _check_pattern(pattern: Pattern, file: str, model: ModelSpec, problems: Problems) -> None:
    """Every layer of a hybrid model must be what the pattern calls it."""
    names: dict[int, list[str]] = {}
    for spec in model.params:
        layer = layer_of(spec.name)
        if layer is not None:
            names.setdefault(layer, []).append(spec.name)
    for layer, symbol in enumerate(pattern.layers):
        mine = names.get(layer, [])
        if kind := unlike(symbol, mine):
            problems.add(
                LayoutMismatch,
                f"decoder layer {layer} has {', '.join(mine[:2])} …, but the pattern {pattern} in {file} calls it {kind}",
            )


def _check_qkv(args: Arguments, file: str, model: ModelSpec, problems: Problems) -> None:
    heads, channels = args.optional("num_attention_heads"), args.optional("kv_channels")
    if heads is None or channels is None or args.flag("attention_output_gate"):
        return
    groups = args.integer("num_query_groups", heads) if args.flag("group_query_attention") else heads
    rows = (heads + 2 * groups) * channels
    for spec in (one for one in model.params if one.name.endswith("self_attention.linear_qkv.weight")):
        if args.query_groups is None or spec.global_shape[0] != rows:
            made = f"{spec.name}: {spec.global_shape[0]} rows, but {heads} heads and {groups} query groups of {channels} in the args"
            problems.add(LayoutMismatch, f"{made} of {file} make {rows if args.query_groups else 'none'}")
            return


def _check_chunks(
    args: Arguments,
    file: str,
    model: ModelSpec,
    chunks: Sequence[ModelChunk],
    parallel: ParallelConfig,
    problems: Problems,
) -> None:
    """Layers per chunk as the arguments would deal them, where they say enough to know."""
    if args.optional("num_layers") is None or args.values.get("heterogeneous_layers_config_path"):
        return
    try:
        expected = model_chunks(model.num_layers, parallel.pp, parallel.vpp, args.pipeline_split, args.mtp_layers)
    except CheckpointError as error:
        problems.add(LayoutMismatch, f"args in {file} cannot deal the layers that the files hold: {error}")
        return
    found = [chunk.num_layers for chunk in chunks]
    said = [chunk.num_layers for chunk in expected]
    if found != said:
        problems.add(LayoutMismatch, f"layers per model chunk: found {found} in the files, args in {file} say {said}")


def is_gated(shapes: Mapping[str, Shape], args: Arguments) -> bool:
    """Whether feed-forwards are gated, as their own shapes say: the first matrix is then twice as wide.

    Args:
        shapes: Of all parameters; stacked experts as they are stored, or as (experts, rows, columns).
        args: The run's arguments.

    Raises:
        LayoutMismatch: The arguments say otherwise: ``[gate; up]`` would be cut in the wrong places.
    """
    for name, first in shapes.items():
        second = shapes.get(second_matrix(name) or "")
        if second is None:
            continue
        width, inner = (first[-1], second[-2]) if name.endswith("weight1") else (first[0], second[1])
        gated = width == 2 * inner
        if "swiglu" in args.values and gated != args.gated:
            raise LayoutMismatch(
                f"{name} has shape {first} and {second_matrix(name)} {second}: the feed-forward is {'' if gated else 'not '}gated, "
                f"but args.swiglu is {args.values['swiglu']}\nThe args are not those of this model."
            )
        return gated
    return args.gated

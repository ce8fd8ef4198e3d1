"""Megatron-Bridge's LoRA under peft's names: adapters of fused linear layers become one for each layer that is fused.

A fused layer's adapter has one ``linear_in`` for all that is fused (queries, keys, values; gate, up): it is repeated. Its ``linear_out``
is cut like the rows of the base weight. ``CanonicalLoRA`` has an adapter for each, which was read in code, not run.

Source: NVIDIA-NeMo/Megatron-Bridge ``src/megatron/bridge/peft/{adapter_wrapper,canonical_lora,utils}.py`` and
``models/conversion/peft_bridge.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mcore_rlhf.core.catalog import MASTER, PARAM, Box, Shape
from mcore_rlhf.core.facts import Fate, Item, Kind, Reason, Rule, Values
from mcore_rlhf.core.shares import Share
from mcore_rlhf.errors import LayoutMismatch, Problems, UsageError
from mcore_rlhf.families.crossing.to_huggingface import to_huggingface
from mcore_rlhf.families.inventory import OF_OPTIMIZER, random_states
from mcore_rlhf.families.megatron.state import NO_PARAMETERS, NO_RNG, MegatronState
from mcore_rlhf.families.module import ModuleState, read_config
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.selection import renamed
from mcore_rlhf.families.source import Source
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.huggingface.config import architecture_of, sizes_of_config
from mcore_rlhf.models.huggingface.relation import Filled, filled, spelling_of
from mcore_rlhf.models.huggingface.table import Sizes
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec

from .config import model_reference
from .names import BASE_LAYER, BRIDGE_ADAPTER, DEFAULT, LORA_A, LORA_B, PREFIX

_WEIGHTS = (PARAM, MASTER)
"""Without the optimizer's moments: those of a shared matrix are not those of its copies."""
_SIDES = {"in": LORA_A, "out": LORA_B}
_EMBEDDING = "embedding.word_embeddings.weight"


def with_peft_names(source: Source, options: WriteOptions) -> Source:
    """A Megatron source that has adapters, under peft's names; any other source as it is.

    Args:
        source: An opened checkpoint.
        options: What the user asked for: ``reference_config`` describes the model where the checkpoint does not.

    Raises:
        CheckpointError: The model's names are not known, or an adapter does not fit its layer.
    """
    if MegatronState.of(source) is None or not any(BRIDGE_ADAPTER.fullmatch(s.name) for s in source.model.params):
        return source
    options = replace(options, reference_config=model_reference(options.reference_config))
    base = _base(source, options)
    config = _description(source, base, options)
    sizes = sizes_of_config(config)
    if base is None and sizes.layers != source.model.num_layers:
        raise LayoutMismatch(
            f"{source.root}: has adapters of {source.model.num_layers} layers, and the model has {sizes.layers}\n"
            "Layers without an adapter cannot be counted, and with virtual pipeline stages verl saves the first chunk of each rank "
            "and no other: such a checkpoint is not whole."
        )
    names = [spec.name for spec in source.model.params]
    rows = {row.name: row for row in filled(architecture_of(config)[0], sizes, spelling_of(names))}
    relation = _Relation(source, rows, sizes)
    relation.fill()
    return _joined(source, base, relation)


def _base(source: Source, options: WriteOptions) -> Source | None:
    """The base model under Hugging Face's names; None where the checkpoint has the adapter alone."""
    if source.model.get(_EMBEDDING) is None:
        return None
    rest = renamed(source, lambda name: None if BRIDGE_ADAPTER.fullmatch(name) else name)
    without = replace(rest, states=(), optimizer=None, state=replace(rest.state, groups=()))
    return to_huggingface(without, options)


def _description(source: Source, base: Source | None, options: WriteOptions) -> Mapping[str, object]:
    if options.reference_config is not None:
        return read_config(options.reference_config)
    if base is not None:
        return base.family.config
    raise UsageError(
        f"{source.root}: has adapters and not their base model, and nothing that describes it: how many heads it has, how they are fused\n"
        "Give --reference-config, the folder with the model's config.json (and with adapter_config.json, for lora_alpha)."
    )


@dataclass
class _Relation:
    """Which part of which of Megatron's tensors every one of peft's is.

    Args:
        source: Megatron's.
        rows: The model's parameters by Megatron's names.
        sizes: Of the model.
    """

    source: Source
    rows: Mapping[str, Filled]
    sizes: Sizes
    shares: dict[str, tuple[Share, ...]] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    adapted: set[str] = field(default_factory=set)
    repeated: int = 0

    def fill(self) -> None:
        """Relate every adapter.

        Raises:
            LayoutMismatch: One fits no layer of the model; all of them.
        """
        problems = Problems()
        for spec in self.source.model.params:
            match = BRIDGE_ADAPTER.fullmatch(spec.name)
            if match is None:
                continue
            row = self.rows.get(f"{match['linear']}.weight")
            tensors = [] if row is None else list(_of_part(row, match["part"]))
            if row is None or not tensors or match["kind"] == "bias" or len(spec.global_shape) != 2:
                text = f"{spec.name} {spec.global_shape}: is an adapter of no layer of this model that peft could adapt"
                problems.add(LayoutMismatch, text, "Experts, and layers that only Megatron has, cannot be converted.")
                continue
            self._relate(spec, row, tensors, match["side"], match["part"] is not None, problems)
        problems.raise_if_any()

    def _relate(
        self, spec: ParamSpec, row: Filled, tensors: Sequence[str], side: str, canonical: bool, problems: Problems
    ) -> None:
        self.repeated += len(tensors) - 1 if side == "in" else 0
        expected = sum(row.tensors[tensor][0] for tensor in tensors)
        if side == "out" and spec.global_shape[0] != expected:
            problems.add(
                LayoutMismatch, f"{spec.name}: has {spec.global_shape[0]} rows, and what it adapts has {expected}"
            )
            return
        for tensor in tensors:
            module = tensor.removesuffix(".weight")
            name = f"{PREFIX}{module}.{_SIDES[side]}.{DEFAULT}.weight"
            self.adapted.add(module)
            whole = Box.whole(spec.global_shape)
            if side == "in" or canonical or len(row.tensors) == 1:
                self.shares[name], self.shapes[name] = (Share(whole, spec.name, whole),), spec.global_shape
            else:
                self.shapes[name] = (row.tensors[tensor][0], spec.global_shape[1])
                self.shares[name] = tuple(self._rows(spec, row, tensor))

    def _rows(self, spec: ParamSpec, row: Filled, tensor: str) -> Iterator[Share]:
        """``linear_out`` is cut like the rows of the base weight."""
        rank = spec.global_shape[1]
        for link in row.links(self.sizes):
            if link.huggingface == tensor:
                box, other = link.huggingface_box, link.other_box
                yield Share(
                    Box((box.offset[0], 0), (box.shape[0], rank)),
                    spec.name,
                    Box((other.offset[0], 0), (other.shape[0], rank)),
                )


def _of_part(row: Filled, part: str | None) -> Iterator[str]:
    """The tensors that an adapter changes: all that are fused, or, in ``CanonicalLoRA``, the one that it is named after."""
    for tensor in row.tensors:
        if tensor.endswith(".weight") and (part is None or tensor.endswith(f".{part}_proj.weight")):
            yield tensor


def _joined(source: Source, base: Source | None, relation: _Relation) -> Source:
    dtypes = {spec.name: spec.dtype for spec in source.model.params}
    specs = [
        ParamSpec(name, shape, dtypes[relation.shares[name][0].name], REPLICATED)
        for name, shape in relation.shapes.items()
    ]
    adapter = source.catalog.of_states(_WEIGHTS).recut(source.role, relation.shares, relation.shapes)
    frozen = None if base is None else renamed(base, lambda name: _in_memory(name, relation.adapted))
    own = ModuleState(order=tuple(spec.name for spec in specs))
    catalog = adapter
    notes = (frozen or source).notes.copy()
    if frozen is not None:
        module = ModuleState.needed(frozen)
        specs = [*(replace(spec, trainable=False) for spec in frozen.model.params), *specs]
        catalog = frozen.catalog.of_states(_WEIGHTS).joined(adapter)
        own = replace(module, order=(*module.order, *own.order), packs_experts=True)
    joined = _Joined(source, relation, frozen is None)
    if (
        joined.optimizer()
    ):  # what was said of the base's way to Hugging Face's names is not said of the adapters' optimizer
        notes.said = {item: said for item, said in notes.said.items() if item not in _OF_ADAPTERS}
    notes.through(_RULES, joined)
    model = ModelSpec(tuple(specs), source.model.num_layers, frozen is not None and frozen.model.tied)
    state = replace((frozen or source).state, groups=(), scheduler=None, grad_scaler=None)
    return replace(
        source, model=model, parallel=ParallelConfig(), catalog=catalog, state=state, states=(), optimizer=None, notes=notes,
        family=own, moved={} if frozen is None else frozen.moved, origin=source.origin if frozen is None else frozen.origin,
    )  # fmt: skip


class _Joined(NamedTuple):
    """What is asked about adapters that get peft's names: whether they are alone, without a base."""

    source: Source
    relation: _Relation
    alone: bool

    def optimizer(self) -> bool:
        """Whether there is one."""
        return self.source.optimizer is not None

    def rng(self) -> Values | None:
        """Random states, of which nobody speaks yet where there is no base."""
        return {"of": random_states(self.source)} if self.alone else None


_OF_ADAPTERS = (*OF_OPTIMIZER, Item(Kind.SCHEDULER))
_RULES: tuple[Rule[_Joined], ...] = (
    Rule(Fate.CHANGED, "Megatron-Bridge's adapters become peft's, of {found} modules", lambda j: len(j.relation.adapted)),
    Rule(Fate.CHANGED, "{found} matrices A are copies: in Megatron one serves all that is fused in a layer", lambda j: j.relation.repeated),
    Rule(Fate.CHANGED, "as a module's, under peft's names", of=[Item(Kind.TENSOR, PARAM)], told=False),
    Rule(Fate.LOST, "the adapters' optimizer: its states are of matrices that several modules share", _Joined.optimizer, _OF_ADAPTERS),
    Rule(Fate.LOST, NO_RNG, _Joined.rng),
    Rule(Reason.OF_ENGINE, when=lambda j: j.alone, of=[Item(Kind.ARGUMENT)]),
    Rule(Reason.OF_LAYOUT, when=lambda j: j.alone, of=[Item(Kind.MODEL)]),
    NO_PARAMETERS.of_part(lambda j: MegatronState.of(j.source) if j.alone else None),
)  # fmt: skip


def _in_memory(name: str, adapted: set[str]) -> str:
    """What a base tensor is called in a model with an adapter."""
    module, _, last = name.rpartition(".")
    return f"{PREFIX}{module}.{BASE_LAYER}.{last}" if module in adapted else PREFIX + name

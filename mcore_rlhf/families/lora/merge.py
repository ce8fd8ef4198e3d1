"""A base model with its adapter added: which tensors it has, and of what each is made.

Packed experts are one low-rank sum for each, of strided parts of two matrices that all experts share. Source: peft 0.21.2,
``tuners/lora/layer.py`` (``ParamWrapper.get_delta_weight``): ``A`` is ``(experts · rank, in)``, expert after expert; ``B`` is
``(out, rank · experts)`` with the expert's number fastest; the weight is ``(experts, out, in)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import (
    MASTER,
    PARAM,
    Box,
    Chunk,
    DType,
    TensorEntry,
    TensorName,
    dtype_of,
    row_major,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.computed import COMPUTED
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule, Values
from mcore_rlhf.core.lowrank import LowRankSum
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported, UsageError
from mcore_rlhf.families.inventory import OF_OPTIMIZER
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import Computed, Source
from mcore_rlhf.models.spec import REPLICATED, ParamSpec
from mcore_rlhf.storage.paths import ReadablePath

from .config import AdapterConfig, completed
from .names import BASE_LAYER, LORA_A, LORA_B, PREFIX, SAVED_MODULE, AdapterTensor, in_base, in_memory
from .parts import CARRIED, Adapter, adapter_in

_REFUSED = {
    "use_dora": "DoRA scales every row by a norm of the merged weight",
    "use_qalora": "QA-LoRA pools its inputs",
    "lora_bias": "the adapter adds a bias, for which the base's module may have no place",
    "kasa_config": "KaSA changes the base weights themselves",
    "layer_replication": "it repeats layers of the base",
    "trainable_token_indices": "it replaces single rows of embeddings",
    "alora_invocation_tokens": "it acts behind certain tokens only, and peft does not merge it either",
    "use_bdlora": "its matrices are made of blocks",
    "arrow_config": "it chooses among adapters token by token",
}
_ON_THE_BASE = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Beginnings that leave the base as it is. PiSSA, CorDA, OLoRA, LoftQ and LoRA-GA take a part out of it first, and their adapter is
to be added to what is left, which a checkpoint of the whole run has.

Source: peft 0.21.2, ``tuners/lora/layer.py`` (``update_layer``, ``pissa_init``).
"""


def module_state(source: Source) -> ModuleState:
    """What a source under a module's names keeps besides tensors.

    Raises:
        Unsupported: Its names are another family's.
    """
    found = ModuleState.of(source)
    if found is None:
        raise Unsupported(f"{source.root}: a {source.format} checkpoint has no adapter under a module's names")
    return found


@dataclass
class Merge:
    """A merge on its way.

    Args:
        adapter: Has the adapter's tensors.
        base: Has the base's; the same source where one checkpoint has both.
        write: What the user asked for.
        config: The adapter's configuration.
    """

    adapter: Source
    base: Source
    write: WriteOptions
    config: AdapterConfig
    _problems: Problems = field(default_factory=Problems)
    _sums: dict[str, LowRankSum] = field(default_factory=dict)
    _own: dict[str, str] = field(default_factory=dict)

    def source(self, root: ReadablePath) -> Source:
        """The merged model.

        Args:
            root: The base's own folder, for what else lies in it.

        Raises:
            CheckpointError: Base and adapter do not fit, or the adapter is of another kind; all problems together.
        """
        self._refuse()
        found = adapter_in(self.adapter, self.config.bias)
        self.config = completed(self.config, found.ranks, found.saved_modules)
        entries, specs = self._base()
        shared = self._shared(entries)
        self._add_products(found, entries, specs)
        self._replace_whole(found, entries, specs, shared)
        self._refuse_tied(shared)
        self._problems.raise_if_any()
        made = self._made(entries, specs, shared, self._report(found))
        return replace(made, root=root, computed=Computed(self.base.root, self._sums))

    def _refuse(self) -> None:
        for name, reason in _REFUSED.items():
            if self.config.values.get(name):
                self._problems.add(
                    Unsupported,
                    f"{self.config.where}: {name}: {reason}; such an adapter cannot be merged here",
                    "Merge it with peft's merge_and_unload; the adapter itself can be converted.",
                )
        begun = self.config.values.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower() not in _ON_THE_BASE and self.base is not self.adapter:
            self._problems.add(
                Unsupported,
                f"{self.config.where}: init_lora_weights is {begun!r:.40}: the run took a part out of the base's weights first, or nobody "
                "here knows what it did, and the adapter is to be added to what was left",
                "Merge it with peft's merge_and_unload, or save it with path_initial_model_for_weight_conversion.",
            )
        self._problems.raise_if_any()

    def _base(self) -> tuple[dict[str, TensorEntry], dict[str, ParamSpec]]:
        """The base's tensors under its own names."""
        entries: dict[str, TensorEntry] = {}
        specs: dict[str, ParamSpec] = {}
        buffers = module_state(self.base).buffers
        for spec in self.base.model.params:
            name = in_base(spec.name) if in_memory(spec.name) is None else None
            entry = None if name is None else _stored(self.base, spec.name, (PARAM, MASTER))
            if name is None or entry is None:
                continue
            self._own[name] = spec.name
            entries[name] = replace(entry, name=TensorName(self.base.role, name))
            dtype = spec.dtype if self.write.dtype is None or spec.name in buffers else dtype_of(self.write.dtype)
            specs[name] = ParamSpec(name, spec.global_shape, dtype, spec.partition, spec.name not in buffers)
        if not entries:
            one = self.write.base_model or self.adapter.root
            raise UsageError(
                f"{one}: holds an adapter and nothing of its base model\nGive the folder of the base with --base-model DIR."
            )
        return entries, specs

    def _shared(self, entries: Mapping[str, TensorEntry]) -> dict[str, str]:
        found = module_state(self.base).shared.items()
        named = ((in_base(alias), in_base(owner)) for alias, owner in found)
        return {alias: owner for alias, owner in named if alias is not None and owner in entries and owner is not None}

    def _add_products(self, found: Adapter, entries: dict[str, TensorEntry], specs: Mapping[str, ParamSpec]) -> None:
        pairs: dict[str, dict[str, AdapterTensor]] = {}
        for tensor in found.tensors:
            if tensor.kind in (LORA_A, LORA_B):
                pairs.setdefault(tensor.module, {})[tensor.kind] = tensor
            elif tensor.kind not in (SAVED_MODULE, "base"):
                self._problems.add(
                    Unsupported, f"{tensor.memory}: {_REFUSED['use_dora']}, or is of a kind that is not known"
                )
        for module, pair in pairs.items():
            self._add(module, pair, entries, specs)

    def _add(
        self,
        module: str,
        pair: Mapping[str, AdapterTensor],
        entries: dict[str, TensorEntry],
        specs: Mapping[str, ParamSpec],
    ) -> None:
        left, right = (
            _stored(self.adapter, pair[k].memory, (MASTER, PARAM)) if k in pair else None for k in (LORA_B, LORA_A)
        )
        if left is None or right is None:
            self._problems.add(LayoutMismatch, f"{module}: the adapter has only one of its two matrices")
            return
        name: str | None = f"{module}.weight"
        if name not in entries:
            name = _adapted_parameter(module, left, right, {key: entry.global_shape for key, entry in entries.items()})
        if name is None and (owner := self._shared(entries).get(f"{module}.weight")) is not None:
            self._problems.add(Unsupported, *_tied(f"{module}.weight", owner))
            return
        if name is None:
            self._problems.add(
                LayoutMismatch,
                f"{module}.weight: the adapter changes it, and {self.base.root} does not have it",
                "Give the base model of this adapter, under the same names.",
            )
            return
        base, dtype = _stored(self.base, self._own[name], (MASTER, PARAM)) or entries[name], specs[name].dtype
        if len(base.global_shape) == 3:
            sums = _expert_sums(base, left, right, self.config.scaling(name), dtype)
            numbered = {f"{name}.{number}": total for number, total in enumerate(sums)}
            entries[name] = _packed(entries[name], numbered, dtype)
            self._sums.update((COMPUTED + key, total) for key, total in numbered.items())
            return
        transposed = ".lora_embedding_" in pair[LORA_A].memory or self.config.flag("fan_in_fan_out")
        total = LowRankSum(base, left, right, self.config.scaling(module), dtype, transposed)
        if total.added_shape != base.global_shape:
            text = f"{name}: has shape {base.global_shape}, and what the adapter adds has {total.added_shape}"
            advice = "This is another model's adapter, or its configuration is another's."
            self._problems.add(LayoutMismatch, text, advice)
            return
        record = total.record(name)
        self._sums[record.file] = total
        chunk = Chunk.whole(record, base.global_shape)
        entries[name] = TensorEntry(entries[name].name, base.global_shape, dtype, (chunk,))

    def _replace_whole(
        self, found: Adapter, entries: dict[str, TensorEntry], specs: dict[str, ParamSpec], shared: dict[str, str]
    ) -> None:
        """Modules that the adapter has whole, and biases that it trains, take the place of the base's."""
        for tensor in found.tensors:
            if tensor.kind not in (SAVED_MODULE, "base"):
                continue
            name = (in_base(tensor.file) or tensor.file).removeprefix(PREFIX)
            entry = _stored(self.adapter, tensor.memory, (PARAM, MASTER))
            own = self.adapter.model.get(tensor.memory)
            if entry is None or own is None or (COMPUTED + name in self._sums and tensor.kind == "base"):
                continue
            if name in shared.values():
                self._problems.add(
                    Unsupported,
                    f"{name}: the adapter has it whole, and the base ties it to {', '.join(a for a, o in shared.items() if o == name)}",
                    "Merge it with peft's merge_and_unload, which decides who follows whom.",
                )
            shared.pop(name, None)
            dtype = own.dtype if self.write.dtype is None else dtype_of(self.write.dtype)
            specs[name] = ParamSpec(name, own.global_shape, specs[name].dtype if name in specs else dtype, REPLICATED)
            entries[name] = replace(entry, name=TensorName(self.base.role, name))

    def _refuse_tied(self, shared: Mapping[str, str]) -> None:
        """A run adds to what the adapted module computes, and the other one keeps the base's weight; merged, both would change.

        Source: peft 0.21.2, ``tuners/lora/layer.py`` (``Embedding.forward``, and ``merge``, which changes both).
        """
        for alias, owner in shared.items():
            if COMPUTED + owner in self._sums:
                self._problems.add(Unsupported, *_tied(owner, alias))

    def _report(self, found: Adapter) -> Report:
        notes = self.base.notes.copy()
        notes.extend(self.adapter.notes.lines)
        for item, said in self.adapter.notes.said.items():
            notes.said.setdefault(item, said)
        whole = f", and {len(found.saved_modules)} modules replaced" if found.saved_modules else ""
        tensors = [Item(Kind.TENSOR, tensor.memory) for tensor in found.tensors]
        trained, other = (
            self.adapter.optimizer is not None,
            self.adapter.state.other if self.adapter is not self.base else {},
        )
        run = {"of": [Item(Kind.VALUE, name) for name in other if name != CARRIED]}
        notes.through(
            _RULES, {"sums": len(self._sums), "whole": whole, "tensors": tensors, "trained": trained, "run": run}
        )
        return notes

    def _made(
        self,
        entries: Mapping[str, TensorEntry],
        specs: Mapping[str, ParamSpec],
        shared: Mapping[str, str],
        notes: Report,
    ) -> Source:
        base, module, role = self.base, module_state(self.base), self.base.role
        old = base.state
        state = replace(
            old, iteration=self.adapter.state.iteration or old.iteration, groups=(), scheduler=None, grad_scaler=None,
            other={key: value for key, value in old.other.items() if key != CARRIED},
        )  # fmt: skip
        model = replace(base.model.having(specs.values()), tied=bool(shared))
        config = dict(module.config)
        if config.get("tie_word_embeddings") and not set(specs) <= set(self._own):
            config["tie_word_embeddings"] = False
        catalog = Chunks.of(replace(entry, name=TensorName(role, name)) for name, entry in entries.items())
        buffers = tuple(name for old in module.buffers if (name := in_base(old)) is not None)
        order = dict.fromkeys(name for old in module.order if (name := in_base(old)) in specs or name in shared)
        return replace(
            base, model=model, catalog=catalog, state=state, states=(), optimizer=None, notes=notes,
            family=replace(
                module.base(), order=tuple(n for n in order if n), buffers=buffers, shared=shared, config=config, optimizer={}, keys={},
            ),
        )  # fmt: skip


def _tied(adapted: str, other: str) -> tuple[str, str]:
    """What is wrong with an adapter of one of two tied weights, and what to do."""
    text = f"{adapted}: the adapter changes it, and the base ties it to {other}, which the run left as it was"
    return text, "Merge it onto a base that has both, with tie_word_embeddings false in its config.json."


def _stored(source: Source, name: str, states: tuple[str, ...]) -> TensorEntry | None:
    found = (source.catalog.get(TensorName(source.role, name, state)) for state in states)
    return next((entry for entry in found if entry is not None), None)


def _adapted_parameter(
    module: str, left: TensorEntry, right: TensorEntry, shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Which packed parameter an adapter belongs to, whose place in the nest of wrappers is all that its name says.

    Args:
        module: Its module, with a ``base_layer`` for every wrapper around it.
        left, right: Its ``B`` and ``A``.
        shapes: Of the base's tensors.

    Returns:
        The parameter of that module with the shape that the adapter makes; None where there is none, or no single one.
    """
    owner = module
    while owner.endswith(f".{BASE_LAYER}"):
        owner = owner.removesuffix(f".{BASE_LAYER}")
    made = (left.global_shape[0], right.global_shape[1])
    fitting = [
        name for name, shape in shapes.items()
        if name.rpartition(".")[0] == owner and len(shape) == 3 and shape[1:] == made and right.global_shape[0] % shape[0] == 0
    ]  # fmt: skip
    return fitting[0] if len(fitting) == 1 else None


def _expert_sums(
    base: TensorEntry, left: TensorEntry, right: TensorEntry, scale: float, dtype: DType
) -> list[LowRankSum]:
    """The sum of every expert.

    Args:
        base: ``(experts, out, in)``.
        left: ``B``.
        right: ``A``.
        scale: What their products are multiplied by.
        dtype: What the sums are rounded to.
    """
    experts = base.global_shape[0]
    rank = right.global_shape[0] // experts
    return [
        LowRankSum(
            _expert(base, number), _columns(left, number, experts), _rows(right, number * rank, rank), scale, dtype
        )
        for number in range(experts)
    ]  # fmt: skip


def _packed(entry: TensorEntry, sums: Mapping[str, LowRankSum], dtype: DType) -> TensorEntry:
    """All experts' sums as one tensor.

    Args:
        entry: The base's tensor.
        sums: Of its experts, in order, by the names of their records.
        dtype: What they are rounded to.
    """
    _, rows, columns = entry.global_shape
    strides = row_major((1, rows, columns))
    chunks = (
        Chunk(Box((number, 0, 0), (1, rows, columns)), total.record(name), 0, strides)
        for number, (name, total) in enumerate(sums.items())
    )
    return TensorEntry(entry.name, entry.global_shape, dtype, tuple(chunks))


def _expert(entry: TensorEntry, number: int) -> TensorEntry:
    """One expert as a matrix."""
    shape = entry.global_shape[1:]
    return replace(entry, global_shape=shape, chunks=tuple(_without_first(entry, Box((number, 0, 0), (1, *shape)))))


def _without_first(entry: TensorEntry, wanted: Box) -> Iterator[Chunk]:
    for chunk in entry.primary():
        part = chunk.box.intersect(wanted)
        if part is not None:
            narrow = chunk.narrow(part)
            yield Chunk(Box(part.offset[1:], part.shape[1:]), narrow.record, narrow.start, narrow.strides[1:])


def _rows(entry: TensorEntry, start: int, count: int) -> TensorEntry:
    columns = entry.global_shape[1]
    wanted = Box((start, 0), (count, columns))
    parts = ((chunk, chunk.box.intersect(wanted)) for chunk in entry.primary())
    chunks = (replace(chunk.narrow(part), box=part.shift((start, 0))) for chunk, part in parts if part is not None)
    return replace(entry, global_shape=(count, columns), chunks=tuple(chunks))


def _columns(entry: TensorEntry, first: int, step: int) -> TensorEntry:
    """Every ``step``-th column."""
    rows, columns = entry.global_shape
    chunks = tuple(_strided(entry, first, step))
    return replace(entry, global_shape=(rows, columns // step), chunks=chunks)


def _strided(entry: TensorEntry, first: int, step: int) -> Iterator[Chunk]:
    for chunk in entry.primary():
        begin, stop = chunk.box.offset[1], chunk.box.stop[1]
        at = begin + (first - begin) % step
        count = len(range(at, stop, step))
        if count:
            box = Box((chunk.box.offset[0], (at - first) // step), (chunk.box.shape[0], count))
            start = chunk.start + (at - begin) * chunk.strides[1]
            yield Chunk(box, chunk.record, start, (chunk.strides[0], chunk.strides[1] * step))


_MERGED = (Item(Kind.MODEL), Item(Kind.CONFIG), Item(Kind.VALUE, "iteration"))
_RULES: tuple[Rule[Values], ...] = (
    Rule(Fate.CHANGED, "--merge-adapter: {sums} weights become base + scale · B·A, computed in fp32 and rounded once{whole}", dict),
    Rule(Fate.LOST, "the adapter by itself: once added, it cannot be taken out of the weights exactly", of=[Item(Kind.VALUE, CARRIED)]),
    Rule(Fate.CHANGED, "of the merged model", lambda merged: {"of": merged["tensors"]}, _MERGED, told=False),
    Rule(Fate.LOST, "the optimizer: its states belong to the adapter's matrices", lambda merged: merged["trained"],
         (*OF_OPTIMIZER, Item(Kind.SCHEDULER))),
    Rule(Fate.LOST, "counters and values of the run that trained the adapter: the base has none of them", lambda merged: merged["run"]),
)  # fmt: skip

"""What is done to a source before a target is described: the rows of one table, in order, each asked whether it is meant.

A row's ``when`` looks at names, descriptions and options that are there already; what its ``apply`` needs is imported in it. So what nobody
asked for is not run, and most of it not even loaded. A new pass is a row; a further family of names, a row for each way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from mcore_rlhf.core.facts import Fate, Item, Kind, Rule
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.models.huggingface.config import is_other_in_memory, method_of
from mcore_rlhf.models.torchtitan import OWN_EMBEDDING, OWN_NAMES, release_noted
from mcore_rlhf.storage.paths import ReadablePath

from .described import check_described
from .lora.names import BRIDGE_ADAPTER, OF_ADAPTER
from .megatron.state import MegatronState
from .module import CONFIG, USE_MUON, ModuleState, described, may_lack_frozen
from .options import ReadOptions, WriteOptions
from .selection import selected
from .source import OF_SCHEDULERS, UPDATES, Names, Source, counted_on, scheduled_groups

GPT = "gpt"
"""The pattern of layers that asks for a GPTModel."""


@dataclass(slots=True)
class Passage:
    """A source on its way to a target.

    Args:
        source: What the target is made of, as far as it has come.
        to: The target's format; where a source is only opened, one that asks for nothing.
        write: What the target is to be, as far as it is still to be said to it.
        read: How the source was opened.
        open: How another checkpoint is opened; None where no row may.
        whole: All files that are read, as one source.
    """

    source: Source
    to: Names = field(default_factory=Names)
    write: WriteOptions = field(default_factory=WriteOptions)
    read: ReadOptions = field(default_factory=ReadOptions)
    open: Callable[[ReadablePath, ReadOptions], Source] | None = None
    whole: Source = field(init=False)

    def __post_init__(self) -> None:
        self.whole = self.source

    @property
    def megatron(self) -> MegatronState | None:
        """What the source keeps under Megatron's names; None under others."""
        return MegatronState.of(self.source)

    @property
    def module(self) -> ModuleState | None:
        """What it keeps under a module's names; None under others."""
        return ModuleState.of(self.source)

    @property
    def bridge(self) -> int:
        """How many of its tensors are Megatron-Bridge's adapters."""
        params = () if self.megatron is None else self.source.model.params
        return sum(BRIDGE_ADAPTER.fullmatch(spec.name) is not None for spec in params)

    @property
    def to_module(self) -> bool:
        """Whether a whole model under a module's names is wanted."""
        return self.to.family == ModuleState.names and not self.to.adapter


class Pass(NamedTuple):
    """One row.

    Args:
        name: What it is about.
        when: Whether it is meant; costs next to nothing.
        apply: What the source becomes, or None where it stays and was only looked at; or refuses it.
    """

    name: str
    when: Callable[[Passage], bool]
    apply: Callable[[Passage], Source | None]


def through(passes: tuple[Pass, ...], passage: Passage) -> Source:
    """What a source has become behind the last row.

    Args:
        passes: The rows.
        passage: The source and what is asked of it; says afterwards what is left to be said to the target.

    Raises:
        CheckpointError: It cannot become that.
    """
    for one in passes:
        if one.when(passage):
            passage.source = one.apply(passage) or passage.source
    return passage.source


def crossed(source: Source, to: Names, options: WriteOptions) -> Source:
    """The source under the names that a target has, without a look at adapters: itself where they are its own.

    Args:
        source: An opened checkpoint.
        to: The target's format.
        options: What the target is to be.

    Raises:
        CheckpointError: The model has no names in the other family, or what decides its shapes is not known.
    """
    return through(NAMES, Passage(source, to, options))


def _refuse_contradictions(p: Passage) -> None:
    """What is asked for must be something that can be: a base that nobody looks at would be a base that nobody checks."""
    if p.write.merge_adapter and p.to.adapter:
        raise UsageError(
            f"--merge-adapter makes a whole model, and --to {p.to.name} writes an adapter alone\n"
            "Give one of them: --to hf for the merged model."
        )
    if p.write.merge_adapter and p.write.dequantize:
        raise UsageError(
            "--dequantize: not together with --merge-adapter\nMake a plain base of the quantized one first: --to hf --dequantize."
        )
    if not p.write.merge_adapter and not p.to.adapter:
        raise UsageError("--base-model: nothing is merged\nAdd --merge-adapter, or leave it out.")


def _dequantize(p: Passage) -> Source:
    from .crossing.quantized import dequantized

    return dequantized(p.source, p.write)


def _merge(p: Passage) -> Source:
    from .lora.merging import BesideAdapter, merged

    def base(write: WriteOptions) -> Source:
        assert p.open is not None  # whoever merges gives it
        reading = ReadOptions(rules=p.read.rules, stubs=p.read.stubs, optimizer=False)
        return crossed(p.open(Path(str(write.base_model)).expanduser(), reading), BesideAdapter(), write)

    p.whole, seen, p.write = merged(p.source, p.write, base)
    return seen


def _has_no_place(p: Passage) -> bool:
    """Within Megatron's family a model keeps Megatron-Bridge's adapters, under their own names."""
    if p.write.merge_adapter or p.to.holds_adapters:
        return False
    params, bridge = p.source.model.params, p.bridge
    stays = 0 < bridge < len(params) and p.to.family == MegatronState.names
    return not stays and (bridge > 0 or any(OF_ADAPTER.fullmatch(spec.name) for spec in params))


def _refuse_adapter(p: Passage) -> None:
    raise Unsupported(
        f"{p.source.root}: holds an adapter, and a checkpoint of the format {p.to.name} has no place for one\n"
        "Merge it into its base (--merge-adapter, with --base-model where the checkpoint has none), or convert it --to peft."
    )


def _peft_names(p: Passage) -> Source:
    from .lora.bridge import with_peft_names

    return with_peft_names(p.source, p.write)


def _adapter_alone(p: Passage) -> Source:
    from .lora.parts import adapter_alone

    return adapter_alone(p.source, p.write.reference_config)


def _method(p: Passage) -> str:
    """How its description says that weights are quantized; what trainers leave says what they were made of."""
    loose = p.module is None or p.module.packs_experts or p.to.adapter or p.source.computed is not None
    return "" if loose else method_of(p.source.family.config)


def _has_to_be_whole(p: Passage) -> bool:
    """Whether who takes it has no other place for weights that were not trained, and a part was not asked for."""
    part = p.write.merge_adapter or p.read.exclude_frozen or p.read.only is not None
    whole = p.module is None or not may_lack_frozen(p.source, p.module)
    return not (whole or part) and p.to_module and not p.to.packs_experts


def _would_be_misread(p: Passage) -> bool:
    """Quantized weights stay as they are on disk, unless they are to be of another type."""
    stays = not p.to.packs_experts and p.write.dtype is None and not p.write.masters
    return p.module is not None and not stays and (p.source.model.quantized or bool(_method(p)))


def _refuse_quantized(p: Passage) -> None:
    from .crossing.quantized import refuse_quantized

    refuse_quantized(p.source, _method(p))


def _is_hybrid(p: Passage) -> bool:
    """Whether a GPTModel is wanted of a hybrid model: it is asked for, or goes by other names."""
    asked = p.write.hybrid_layer_pattern == GPT or p.to.family != MegatronState.names
    return asked and p.megatron is not None and p.megatron.args.pattern is not None


def _gpt(p: Passage) -> Source:
    from .megatron.hybrid import as_gpt

    return as_gpt(p.source)


def _hybrid(p: Passage) -> Source:
    from .megatron.hybrid import as_hybrid

    return as_hybrid(p.source, str(p.write.hybrid_layer_pattern))


def _one_by_one(p: Passage) -> Source:
    from .crossing.description import known_description
    from .crossing.packing import repacked

    config = known_description(p.source, p.write)
    return repacked(described(p.source, lambda: config) if config else p.source, config, packs_experts=False)


def _to_huggingface(p: Passage) -> Source:
    from .crossing.to_huggingface import as_release, to_huggingface

    seen = to_huggingface(p.source, p.write)
    return as_release(seen) if seen.state.release and not p.to.packs_experts else seen


def _keeps_trained_alone(p: Passage) -> bool:
    return p.module is not None and p.source.optimizer is not None and p.to.family == MegatronState.names


def _without_frozen(p: Passage) -> Source:
    from .fsdp.groups import without_frozen

    return without_frozen(p.source)


def _to_megatron(p: Passage) -> Source:
    from .crossing.to_megatron import to_megatron

    return to_megatron(p.source, p.write)


def _has_own_names(p: Passage) -> bool:
    """Whether a source has torchtitan's own names."""
    if p.module is None or not any(spec.name == OWN_EMBEDDING for spec in p.source.model.params):
        return False
    from .crossing.torchtitan import of_torchtitan

    return bool(of_torchtitan(p.source))


def _may_have_others(p: Passage) -> bool:
    """Whether torchtitan's names may become Hugging Face's: somebody says how many heads the model has."""
    return not p.to.lays_out_keys and _has_own_names(p) and bool(_description(p))


def _description(p: Passage) -> dict[str, object]:
    from .crossing.description import known_description

    return known_description(p.source, p.write)


def _had_own_names(p: Passage) -> bool:
    """Whether a run of torchtitan's that was in another format goes back."""
    wanted = p.to.lays_out_keys and p.write.like is None and p.module is not None
    return wanted and p.module is not None and bool(_noted_release(p)) and not _has_own_names(p)


def _noted_release(p: Passage) -> str:
    """The release of torchtitan whose run it was; empty where it was none's."""
    return "" if p.module is None else release_noted(p.module.laid_out.get(OWN_NAMES))


def _other_names(p: Passage) -> Source:
    from .crossing.torchtitan import with_other_names

    return with_other_names(p.source, _description(p), _noted_release(p))


def _like(p: Passage) -> Source:
    """The checkpoint that ``--like`` names."""
    assert p.open is not None  # whoever converts gives it
    how = replace(p.read, role=None, step=None, only=None, exclude_frozen=False)
    return p.open(Path(str(p.write.like)).expanduser(), how)


def _as_run(p: Passage) -> Source:
    from .crossing.going_on import as_run

    return as_run(p.source, _like(p), _description(p))


def _has_torchs_muon(p: Passage) -> bool:
    """Whether a framework goes on that has a Muon of its own; one of torch's takes whole matrices, and ZeRO has flat pieces."""
    has_own = p.to.family == MegatronState.names or p.to.deals_groups
    groups = p.source.state.groups if p.module is not None and has_own else ()
    return any("ns_steps" in group.fields for group in groups) and not any(USE_MUON in group.fields for group in groups)


def _marked(p: Passage) -> Source:
    from .crossing.torch_muon import for_deepspeed, marked

    return (marked if p.to.family == MegatronState.names else for_deepspeed)(p.source)


def _has_other_groups(p: Passage) -> bool:
    """Whether a trainer makes its param groups by itself, and no run of it shows any; a DCP folder's own may be such a run's."""
    own = p.to.lays_out_keys and p.source.format == p.to.name and p.write.run_of.second_group
    wanted = p.module and p.source.optimizer and p.write.run_of.second_group is not None and p.write.like is None
    return bool(wanted) and not own and not any(USE_MUON in group.fields for group in p.source.state.groups)


def _in_its_groups(p: Passage) -> Source:
    from .crossing.going_on import in_groups_of

    return in_groups_of(p.write.run_of, p.source)


def _no_empty_groups(p: Passage) -> Source:
    from .fsdp.groups import without_empty_groups

    return p.source if p.source.format == p.to.name else without_empty_groups(p.source)


def _deals_groups_anew(p: Passage) -> bool:
    """Whether a scheduler has not as many learning rates as there are groups, where another format's rules deal these."""
    rates, groups = scheduled_groups(p.source.state.scheduler), len(p.source.state.groups)
    anew = p.to.family == ModuleState.names and p.source.format != p.to.name
    return anew and p.module is not None and groups > 0 and rates not in (None, 0, groups)


def _lacks_lambdas(p: Passage) -> bool:
    """Whether a scheduler comes out of a DCP folder, which keeps no None, into a file that has a place for it, for which
    ``load_state_dict`` asks: it may be a LambdaLR whose functions said nothing.
    """
    kept = p.source.state.scheduler or {}
    asked = p.module is not None and p.to.family == ModuleState.names and not p.to.lays_out_keys
    return asked and scheduled_groups(kept) is not None and kept.keys() <= OF_SCHEDULERS


def _with_lambdas(p: Passage) -> Source:
    from .crossing.schedule import with_lambdas

    return with_lambdas(p.source)


def _lacks_schedule(p: Passage) -> bool:
    """Whether a trainer's loader, which takes a LambdaLR's state from every file with an optimizer, would find none."""
    if not p.write.run_of.wants_schedule or p.module is None or p.source.optimizer is None:
        return False
    from .fsdp.state import is_of_one

    return not is_of_one(p.source.state.scheduler)


def _with_schedule(p: Passage) -> Source:
    from .fsdp.state import MADE, scheduler_state

    notes = p.source.notes.copy()
    notes.through([MADE], p.source)
    notes.settle(Fate.DERIVED, "as the trainer's is", Item(Kind.SCHEDULER))
    return replace(p.source, notes=notes, state=replace(p.source.state, scheduler=scheduler_state(p.source)))


def _with_fitting_schedule(p: Passage) -> Source:
    from .crossing.schedule import with_fitting_schedule

    return with_fitting_schedule(p.source)


def _are_to_be_packed(p: Passage) -> bool:
    wanted = p.to_module and p.to.packs_experts and p.module is not None and not p.module.packs_experts
    return wanted and p.write.like is None and is_other_in_memory(p.source.family.config)


def _packed(p: Passage) -> Source:
    from .crossing.packing import repacked

    return repacked(p.source, p.source.family.config, packs_experts=True)


def _has_experts_of_a_run(p: Passage) -> bool:
    """Whether a run goes on that has its experts in one of two ways; where all its names are taken over, these are too."""
    whole = p.to.lays_out_keys or p.to.deals_groups or p.write.like is None
    return p.to_module and p.to.packs_experts and not whole and is_other_in_memory(_description(p))


def _as_in_run(p: Passage) -> Source:
    from .crossing.going_on import with_experts_of

    return with_experts_of(_like(p), p.source, _description(p))


def _in_groups_of_run(p: Passage) -> Source:
    from .crossing.going_on import with_groups_of

    return with_groups_of(_like(p), p.source, _description(p))


def _check_extra_states(p: Passage) -> None:
    from .extra_states import check_extra_states

    check_extra_states(p.source)


def _refuse_left_out(p: Passage) -> None:
    from .complete import refuse_left_out

    refuse_left_out(p.source, _description(p))


def _require_whole(p: Passage) -> None:
    from .complete import require_whole

    assert p.module is not None
    require_whole(p.source, p.module)


def _note_newer(p: Passage) -> None:
    from .megatron.folders import newer_non_persistent

    located = None if p.megatron is None else p.megatron.located
    p.source.notes.through([_NEWER], newer_non_persistent(located.root, located.iteration) if located else "")


_NEWER: Rule[str] = Rule(Fate.NOTE, "{found}", lambda text: text)


def _says_no_sizes(p: Passage) -> bool:
    described = p.source.carried is not None and CONFIG in p.source.carried.files
    return described and p.megatron is not None and "num_layers" not in p.source.state.args


def _with_sizes(p: Passage) -> Source:
    from .crossing.sizes import with_sizes

    return with_sizes(p.source)


OPENED = (
    Pass("sizes that no argument says", _says_no_sizes, _with_sizes),
    Pass("a model that is whole", lambda p: p.module is not None, _require_whole),
    Pass("newer steps of the run", lambda p: p.megatron is not None and p.megatron.located is not None, _note_newer),
    Pass("a description", lambda p: p.megatron is not None or bool(p.source.family.config), lambda p: check_described(p.source)),
    Pass("a part", lambda p: p.read.only is not None or p.read.exclude_frozen, lambda p: selected(p.source, p.read)),
)  # fmt: skip
"""Asked of every source that is opened, whatever becomes of it."""

NAMES = (
    Pass("torchtitan's names", _may_have_others, _other_names),
    Pass("quantized weights", _would_be_misread, _refuse_quantized),
    Pass("a hybrid model as a GPTModel", _is_hybrid, _gpt),
    Pass("experts one by one", lambda p: p.module is not None and p.to_module and not p.to.packs_experts, _one_by_one),
    Pass("Hugging Face's names", lambda p: p.megatron is not None and p.to.family == ModuleState.names, _to_huggingface),
    Pass("torch's Muon", _has_torchs_muon, _marked),
    Pass("a trainer's param groups", _has_other_groups, _in_its_groups),
    Pass("groups that train nothing", lambda p: p.to.deals_groups and not all(g.params for g in p.source.state.groups), _no_empty_groups),
    Pass("learning rates by group", _deals_groups_anew, _with_fitting_schedule),
    Pass("functions of the learning rate", _lacks_lambdas, _with_lambdas),
    Pass("what the optimizer has no states of", _keeps_trained_alone, _without_frozen),
    Pass("Megatron's names", lambda p: p.module is not None and p.to.family == MegatronState.names, _to_megatron),
    Pass("a GPTModel as a hybrid one", lambda p: p.write.hybrid_layer_pattern not in (None, GPT), _hybrid),
    Pass("experts packed", _are_to_be_packed, _packed),
    Pass("experts as in the run that goes on", _has_experts_of_a_run, _as_in_run),
    Pass("param groups of the run that goes on", lambda p: p.to.deals_groups and p.write.like is not None, _in_groups_of_run),
    Pass("a schedule that is asked for", _lacks_schedule, _with_schedule),
    Pass("torchtitan's names again", _had_own_names, _other_names),
    Pass("the run that goes on", lambda p: p.to.lays_out_keys and p.write.like is not None, _as_run),
)  # fmt: skip
"""Whose names it has, and what follows from them."""

CONVERTED = (
    Pass("updates in a step", lambda p: bool(p.module and p.module.tag) and p.write.run_of.step not in (0, p.source.state.iteration),
         lambda p: counted_on(p.source, p.write.run_of.step - p.source.state.iteration, UPDATES)),
    Pass("a step's number", lambda p: p.write.run_of.shift > 0, lambda p: counted_on(p.source, p.write.run_of.shift)),
    Pass("contradictions", lambda p: p.write.merge_adapter or p.write.base_model is not None, _refuse_contradictions),
    Pass("plain weights", lambda p: p.write.dequantize, _dequantize),
    Pass("an adapter merged", lambda p: p.write.merge_adapter, _merge),
    Pass("no place for an adapter", _has_no_place, _refuse_adapter),
    Pass("peft's names", lambda p: not p.write.merge_adapter and p.to.holds_adapters and p.bridge > 0, _peft_names),
    Pass("an adapter alone", lambda p: p.to.adapter, _adapter_alone),
    Pass("frozen weights left out", _has_to_be_whole, _refuse_left_out),
    *NAMES,
    Pass("a number that begins at 0", lambda p: p.write.run_of.shift < 0, lambda p: counted_on(p.source, p.write.run_of.shift)),
    Pass("bytes that are unpickled", lambda p: any("_extra_state" in name.param for name in p.source.catalog), _check_extra_states),
)  # fmt: skip
"""Asked of a source that is to become a target."""

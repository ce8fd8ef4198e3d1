"""From an opened source to a described target: what became of every item, see :mod:`mcore_rlhf.core.account`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from math import prod
from operator import itemgetter

from mcore_rlhf.core.account import Account, Report
from mcore_rlhf.core.cast import is_exact
from mcore_rlhf.core.catalog import FLOAT32, MASTER, PARAM, DType
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import ANY, Facts, Fate, Item, Kind, Reason, Rule, Said
from mcore_rlhf.core.plan import FilePlan
from mcore_rlhf.families.inventory import ELEMENTS, LEFT_OUT, OF_OPTIMIZER, UNPLACED, inventory_of
from mcore_rlhf.families.module import CONFIG
from mcore_rlhf.families.run_folders import CONTENTS, SPLIT, TRANSFORMER
from mcore_rlhf.families.source import Source
from mcore_rlhf.storage.leftovers import WITH_OPTIMIZER, Leftover, of_trainer

from .base import Target
from .carried import unopened

_ITEMIZED = (CONFIG, "adapter_config.json")
"""Files whose fields are items of their own."""
_OF_RANKS = ("metadata.json", "fsdp_config.json", "integrity.json", CONTENTS, TRANSFORMER)
"""Files that say how Megatron-core and verl have stored the rest, of which model, and what bytes they have stored."""
_COPIES = ("model_state_dict/full_weights.pt",)
"""RLinf's: the same weights once more, for other programs. Source: RLinf, ``rlinf/hybrid_engines/fsdp/strategy/checkpoint.py``."""
_AGAIN = re.compile(
    r"(model|pytorch_model(_fsdp)?|consolidated|tf_model|flax_model)([.-].*)?\.(safetensors|bin|pth?|ckpt|npz)|.*\.index(\..+)?\.json"
    r"|.*\.(gguf|ggml|h5|msgpack|onnx|onnx_data|ot|tflite|pdparams|mlpackage|engine)"
)
"""Names of what has a model's weights once more, for other programs. Any other file has weights of its own: a value head, a projector.
Sources: transformers 5.23.0, ``utils/__init__.py`` (``WEIGHTS_NAME``, …); mistral-inference, ``consolidated``; LLaMA-Factory,
``extras/constants.py`` (``V_HEAD_SAFE_WEIGHTS_NAME``, which is none)."""
_param_of, _state_of = itemgetter(1), itemgetter(2)  # of a name


class Tally:
    """What was planned of an opened source, and what a target makes of it: the account of its tensors.

    Args:
        opened: The source's table, as it was opened.
    """

    def __init__(self, opened: Chunks) -> None:
        self.opened = opened
        self._own = frozenset(opened.numbers)
        self._planned: set[int] = set()
        self._wanted: set[str] = set()
        self._numel = 0
        self._masters: set[str] = set()
        self._casts: dict[tuple[str, DType, DType], set[str]] = {}

    def add(self, plan: FilePlan, holds: Chunks, source: Chunks) -> None:
        """A file that was planned.

        Args:
            plan: Its plan.
            holds: What it holds, under the target's names.
            source: What it was planned from: the source's table, or a view of it.
        """
        for name, (stored, wanted) in plan.casts.items():
            self._casts.setdefault((name.state, stored, wanted), set()).add(name.param)
        masters = [name for name in holds.names if name.state == MASTER]
        self._masters.update(name.param for name in masters if name not in plan.casts)
        if not self._wanted >= set(map(_param_of, holds.names)):
            for name, number in zip(holds.names, holds.numbers, strict=True):
                if name.param not in self._wanted:
                    self._wanted.add(name.param)
                    self._numel += prod(holds.tensors.shapes[number])
        if source.tensors is self.opened.tensors:
            self._plan(plan.used)

    def _plan(self, numbers: Collection[int]) -> None:
        """Note tensors, and those that they are made of."""
        while not self._planned.issuperset(numbers):
            new = set(numbers) - self._planned
            self._planned |= new
            numbers = {one for number in new - self._own for one in self.opened.tensors.made_of.get(number, ())}

    @property
    def complete(self) -> bool:
        """Whether the tensors that are written have as many elements as those that they are made of, or more.

        A state has the shape of its parameter, and is cut and padded with it: each parameter counts once.
        """
        opened = self.opened
        params = dict(zip(map(_param_of, reversed(opened.names)), reversed(opened.numbers), strict=True))
        if not self._planned >= self._own:
            planned = [at for at, number in enumerate(opened.numbers) if number in self._planned]
            params = {opened.names[at].param: opened.numbers[at] for at in reversed(planned)}
        return sum(prod(opened.tensors.shapes[number]) for number in params.values()) <= self._numel

    def casts(self) -> list[tuple[str, DType, DType, bool]]:
        """The conversions of the target's states, and of each whether all of its parameters' masters are in the target as they are."""
        return [(*cast, cast[0] == PARAM and params <= self._masters) for cast, params in self._casts.items()]

    def unplanned(self) -> dict[str, list[str]]:
        """By state the parameters of which no plan was made; every state is there."""
        found: dict[str, list[str]] = {state: [] for state in dict.fromkeys(map(_state_of, self.opened.names))}
        if not self._planned >= self._own:
            for name, number in zip(self.opened.names, self.opened.numbers, strict=True):
                if number not in self._planned:
                    found[name.state].append(name.param)
        return found


def account_of(opened: Source, seen: Source, target: Target, tally: Tally, *, without_optimizer: bool) -> Account:
    """The account of a planned conversion.

    Args:
        opened: The source as it was read.
        seen: The same as the target's family of formats sees it; the same object where nothing had to be done.
        target: What is described.
        tally: What was planned of it.
        without_optimizer: Whether the user asked for that.
    """
    casts = _casts(opened, tally, target.report, Said(Fate.LOST, LEFT_OUT) if without_optimizer else None)
    final = dict(target.report.said)
    if without_optimizer:
        own = (
            opened.carried is None or not opened.carried.of_model
        )  # of a model's folder nobody knows whether it has one
        if own and final.keys().isdisjoint(OF_OPTIMIZER):
            target.report.add(Fate.LOST, LEFT_OUT, *OF_OPTIMIZER)
        final = {**{item: Said(Fate.LOST, LEFT_OUT) for item in OF_OPTIMIZER}, **final}
    crossed = {**_homeless(opened, target), **seen.notes.said}
    facts = (
        Facts.of(inventory_of(opened)).handed_on(inventory_of(seen), crossed, seen.moved).handed_on(target.holds, final)
    )
    empty = {spec.name for spec in opened.model.params if 0 in spec.global_shape}
    tensors = tensors_of(tally, {**Report.of([_UNUSED], opened).said, **seen.notes.said, **final}, empty)
    files = dict(_files(opened, target, without_optimizer))
    return Account.of(
        {**facts.fates, **tensors, **files, **casts, **Report.of(UNPLACED, opened).said}, target.report.lost
    )


def _homeless(opened: Source, target: Target) -> Mapping[Item, Said]:
    """Values that only the files of one format have a place for, or of two that are alike; the target itself may know better."""
    strays = () if opened.format in (target.format, *target.alike) else opened.family.homeless
    said = Report.of(strays, opened.family).said
    return {item: one for item, one in said.items() if item not in target.report.said}


_UNUSED: Rule[Source] = Rule(
    Fate.DERIVED, "the framework stores it in some layouts only, and never uses it",
    lambda s: {"of": [Item(Kind.TENSOR, name) for name in s.model.unused]},
)  # fmt: skip


def tensors_of(tally: Tally, said: Mapping[Item, Said], empty: Collection[str] = ()) -> dict[Item, Said | None]:
    """The tensors by state, and one by one those that are in no target file; of None nobody speaks.

    Args:
        tally: What was planned of it.
        said: What was said of items.
        empty: Parameters without elements, of which there is nothing to plan.
    """
    found: dict[Item, Said | None] = {ELEMENTS: Said(Fate.KEPT, "") if tally.complete else said.get(ELEMENTS)}
    left_out = {state: [name for name in of if name not in empty] for state, of in tally.unplanned().items()}
    for state, missing in left_out.items():
        whole, every = Item(Kind.TENSOR, state), said.get(Item(Kind.TENSOR))
        if state == PARAM and every is not None and every.fate is Fate.LOST:
            every = None  # which is said of an optimizer, and an optimizer has no parameters
        why = said.get(whole) or every
        alone = {param: said.get(Item(Kind.TENSOR, param)) for param in missing}
        if state == PARAM and missing and alone.keys() <= _kept_masters(tally, left_out):
            why = Said(Fate.DERIVED, "rounded from the fp32 masters, which are kept")
        if not missing:
            found[whole] = Said(Fate.KEPT, "")
        elif why is not None:
            found[whole] = why
        else:
            found.update((Item(Kind.TENSOR, f"{param} ({state})"), fate) for param, fate in alone.items())
    return found


_BESIDE_MASTERS: Rule[tuple[set[DType], DType, DType]] = Rule(
    Fate.DERIVED, "parameters: converted to {wanted} {made}",
    lambda f: f[0] != {f[2]} and {  # otherwise they are what a run makes of its masters itself
        "wanted": f[2], "of": [Item(Kind.TENSOR, PARAM)],
        "made": "from their fp32 masters, which are kept" if f[1] == FLOAT32 else f"from {f[1]}, and rounded; their fp32 masters are kept",
    },
)  # fmt: skip
"""Of the source's element types, the one that is read and the one that is written: what is rounded beside masters that are kept."""


def _casts(opened: Source, tally: Tally, report: Report, left_out: Said | None) -> dict[Item, Said]:
    """What the conversions of element types make of the source's states: each is told in a line, and the verdict follows from it.

    Args:
        opened: The source as it was read.
        tally: What was planned of it.
        report: The target's.
        left_out: What is said of the masters where the user leaves the optimizer out.
    """
    found: dict[Item, Said] = {}
    unplanned, own = tally.unplanned(), {spec.dtype for spec in opened.model.params if spec.trainable}
    for state, source, wanted, kept in tally.casts():
        what, item = "parameters" if state == PARAM else state, Item(Kind.TENSOR, state)
        if kept:
            report.through([_BESIDE_MASTERS], (own, source, wanted))
            continue
        rounded = Said(Fate.LOST, f"{what}: converted to {wanted}, and rounded")
        if is_exact(source, wanted):
            of_params = state == MASTER and source in own
            if unplanned.get(state) == [] and not of_params:  # otherwise it is made of another state
                found[item] = Said(Fate.CHANGED, f"{what}: converted to {wanted}, which has all values of {source}")
            continue
        if state == PARAM and MASTER in unplanned and (source == FLOAT32 or PARAM not in unplanned):
            told = (left_out, *(report.said.get(Item(Kind.TENSOR, name)) for name in (MASTER, ANY)))
            found[Item(Kind.TENSOR, MASTER)] = next((s for s in told if s is not None and s.fate is Fate.LOST), rounded)
        if state == PARAM and own == {wanted}:  # what a run would have made of its masters
            rounded = Said(Fate.DERIVED, "as their fp32 masters are when they are rounded")
        if state in unplanned:
            found[item] = rounded
    for item, said in found.items():
        if said.fate is not Fate.DERIVED:
            report.add(said.fate, said.text, item)
    return found


def _kept_masters(tally: Tally, left_out: Mapping[str, list[str]]) -> set[str]:
    """Parameters whose fp32 masters are in the target: frozen ones have none."""
    return {name.param for name in tally.opened if name.state == MASTER}.difference(left_out.get(MASTER, ()))


def _files(opened: Source, target: Target, without_optimizer: bool) -> Iterator[tuple[Item, Said]]:
    """Files that no reader opened: carried along, or left behind by name; state that nobody read is lost.

    A model's folder often has its weights twice; what lies in a step beside the files of its format is nowhere else.
    """
    why = LEFT_OUT if without_optimizer else ""
    lost = (Reason.TRAINER, Reason.UNREADABLE, Reason.CALLS, Reason.WEIGHTS)
    anew = {name.rpartition("/")[2] for name in target.sums} | {f.path for f in target.files if f.path in _COPIES}
    for file in unopened(opened):
        derived = Said(Fate.DERIVED, "made anew, of the new files") if file.path in anew else None
        yield Item(Kind.FILE, file.path), derived or _fate(file, lost, why)
    taken = set(target.carried.values())
    for file in opened.of_run:
        why = (
            file.reason.value
            if file.reason is not None
            else "belongs beside the iterations of a Megatron run, and the target is none"
        )
        kept = opened.root / file.path in taken
        yield Item(Kind.FILE, file.path), Said(Fate.KEPT, "") if kept else Said(Fate.LOST, f"{file.path}: {why}")
    if opened.carried is None:
        return
    inner = opened.carried.inner and f"{opened.carried.inner}/"
    for file in opened.carried.found:
        item = Item(Kind.FILE, file.path)
        if opened.carried.folder / file.path in taken:
            yield item, Said(Fate.KEPT, "")
        elif file.path.removeprefix(inner) in _ITEMIZED or file.path in target.texts:
            yield item, Said(Fate.DERIVED, "written anew, from what it says")
        else:
            again = _AGAIN.fullmatch(file.path.rpartition("/")[2])
            yield item, _fate(file, lost[:-1] if again else lost, why if file.reason is Reason.TRAINER else "")


def _fate(file: Leftover, lost: Collection[Reason], why: str) -> Said:
    """What becomes of a file that stays where it is."""
    if file.path in _COPIES:
        return Said(Fate.LEFT, "the same weights once more", Reason.WEIGHTS)
    folder, _, name = file.path.rpartition("/")
    if folder in ("", *SPLIT) and name in _OF_RANKS:
        return Said(Fate.LEFT, Reason.OF_LAYOUT.value, Reason.OF_LAYOUT)
    reason, what = file.reason or Reason.NO_PLACE, of_trainer(file.path)
    if what and reason in (Reason.TRAINER, Reason.NO_PLACE):
        text = f"{file.path}: {what}; the file lies beside what was read, and was not opened"
        return Said(Fate.LOST, (what in WITH_OPTIMIZER and why) or text)
    if reason in lost:
        return Said(Fate.LOST, why or f"{file.path}: {reason.value}")
    return Said(Fate.LEFT, reason.value, reason)

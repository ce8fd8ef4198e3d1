"""The optimizer's file: torch's numbered state dict, and whose the numbers are.

They count ``named_parameters()`` group by group; in which order these are, the model's table knows
(:func:`~mcore_rlhf.models.huggingface.order.module_order`), and which group each is in follows from how many each has, and from every
shape. Source: torch 2.13.0, ``optim/optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import FLOATING, Shape
from mcore_rlhf.errors import LayoutMismatch, Problems, Unportable, Unsupported
from mcore_rlhf.families.fsdp.groups import STEP, Collected, name_numbers
from mcore_rlhf.families.lora.names import BASE_LAYER, LORA_A, AdapterTensor, in_memory, in_original
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.models.huggingface.order import module_order
from mcore_rlhf.models.spec import ModelSpec
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import PtFile, read_pt
from mcore_rlhf.storage.stored import StoredTensor

GROUPS, STATE, PARAMS = "param_groups", "state", "params"
_EXPERTS, _PACKED = ".experts", "gate_up_proj"
_WEIGHTS_ALONE = "--no-optimizer takes the weights alone."


@dataclass(slots=True)
class OptimizerFile:
    """An optimizer's file that was opened.

    Args:
        opened: The file.
        states: What lies there of every number, in tensors with dimensions.
        collected: Its groups, and what else it keeps of every number.
        names: Whose the numbers are; empty until :meth:`name`.
    """

    opened: PtFile
    states: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    collected: Collected = field(default_factory=Collected)
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, root: ReadablePath, file: str, stubs: tuple[str, ...]) -> OptimizerFile:
        """Open one.

        Raises:
            CheckpointError: It is damaged, or is no such state dict.
        """
        found = cls(read_pt(root, file, stubs=stubs))
        tree = found.opened.tree
        groups, kept = (tree.get(key) for key in (GROUPS, STATE)) if isinstance(tree, Mapping) else (None, None)
        inside = [*groups, *kept.values()] if isinstance(groups, list) and isinstance(kept, Mapping) else [None]
        if not all(isinstance(one, Mapping) for one in inside) or not isinstance(groups, list):
            raise Unsupported(f"{root / file}: is not the state dict of one of torch's optimizers\n{_WEIGHTS_ALONE}")
        found.collected.fields = {
            number: {str(key): found.opened.materialize(value) for key, value in group.items()}
            for number, group in enumerate(groups)
        }
        for number, values in (kept or {}).items():
            found._take(str(number), values)
        found._check_numbers()
        return found

    def _take(self, number: str, values: Mapping[Any, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, StoredTensor) and key != STEP and value.shape:
                self.states.setdefault(number, {})[str(key)] = value
            else:
                self.collected.scalars.setdefault(number, {})[str(key)] = self.opened.materialize(value)

    def _check_numbers(self) -> None:
        """Every number is in one group, and nothing has states that is in none."""
        listed: list[str] = []
        for number, fields in self.collected.fields.items():
            members = fields.get(PARAMS)
            if not isinstance(members, list) or not all(type(one) is self.key for one in members):
                raise Unsupported(
                    f"{self.where}: param group {number} does not list its parameters by number, nor all by name\n{_WEIGHTS_ALONE}"
                )
            listed += map(str, members)
        problems = Problems()
        advice = "The file is damaged or forged: copy it again."
        if len(set(listed)) < len(listed):
            twice = next(one for one in listed if listed.count(one) > 1)
            problems.add(LayoutMismatch, f"{self.where}: {self.called} {twice} is in param groups twice", advice)
        for stranger in sorted({*self.states, *self.collected.scalars}.difference(listed)):
            text = f"{self.where}: has states of {self.called} {stranger}, which is in no param group"
            problems.add(LayoutMismatch, text, advice)
        problems.raise_if_any()

    @property
    def key(self) -> type:
        """What its parameters are listed by: numbers, or the names that FSDP's own functions give them."""
        members = (fields.get(PARAMS) for fields in self.collected.fields.values())
        return next((str for listed in members if isinstance(listed, list) for one in listed if type(one) is str), int)

    @property
    def called(self) -> str:
        """What :attr:`key` is, in a word."""
        return "number" if self.key is int else "parameter"

    @property
    def where(self) -> str:
        """The file, for messages."""
        return str(self.opened.directory.path)

    @property
    def count(self) -> int:
        """How many parameters it has."""
        members = (fields[PARAMS] for fields in self.collected.fields.values())
        return sum(len(listed) for listed in members if isinstance(listed, list))

    def name(self, order: list[str], shapes: Mapping[str, Shape], notes: Report, tied: Mapping[str, str]) -> None:
        """Find out whose the numbers are.

        Args:
            order: The parameters that it may have, as the module has them.
            shapes: Of these.
            notes: Told how.
            tied: Second names of parameters: ``{alias: owner}``.

        Raises:
            Unsupported: They fit in no way, or in several, or a state has not a value for each element.
            LayoutMismatch: There are more than the model has.
        """
        if self.count > len(order):
            raise LayoutMismatch(
                f"{self.where}: has {self.count} parameters, and the model beside it {len(order)}: they are of two runs\n{_WEIGHTS_ALONE}"
            )
        unlike = next((of for of in self.states.values() if len({held.shape for held in of.values()}) > 1), {})
        if unlike:
            kept = ", ".join(f"{state} of the shape {held.shape}" for state, held in unlike.items())
            raise Unportable(
                f"{self.where}: keeps of one parameter {kept}; only states with one value per element can be converted\n{_WEIGHTS_ALONE}"
            )
        problems = Problems()
        one = {number: next(iter(states.values())).shape for number, states in self.states.items()}
        if self.key is str:
            self._own_names(order, tied)
        else:
            known = {name: shapes[name] for name in order}
            self.names = name_numbers(self.collected, known, one, self.opened.root / self.opened.file, notes)
        for number, states in self.states.items():
            name = self.names[number]
            for state, held in states.items():
                if held.shape != shapes[name]:
                    text = f"{self.where}: {name} has the shape {shapes[name]}, its {state} {held.shape}; only states with one value"
                    problems.add(Unsupported, f"{text} per element can be converted", _WEIGHTS_ALONE)
        problems.raise_if_any()

    def _own_names(self, order: Collection[str], tied: Mapping[str, str]) -> None:
        """The names that it has, each parameter's first one."""
        listed = [str(one) for fields in self.collected.fields.values() for one in cast(list[object], fields[PARAMS])]
        self.names = {name: tied.get(name, name) for name in listed}
        if strange := [name for name, own in self.names.items() if own not in order]:
            raise LayoutMismatch(
                f"{self.where}: has the parameter {strange[0]}, which is not among the weights beside it\n{_WEIGHTS_ALONE}"
            )
        if len({*self.names.values()}) < len(self.names):
            twice = next(name for name in self.names if name in tied and tied[name] in self.names)
            raise LayoutMismatch(
                f"{self.where}: has {twice} and {tied[twice]}, which are one parameter\n{_WEIGHTS_ALONE}"
            )
        for fields in self.collected.fields.values():
            fields[PARAMS] = [self.names[str(one)] for one in cast(list[object], fields[PARAMS])]
        self.collected.scalars = {self.names[name]: kept for name, kept in self.collected.scalars.items()}

    def groups(self, order: list[str], notes: Report) -> tuple[ParamGroup, ...]:
        """The groups, with names."""
        return self.collected.groups(self.opened.root, order, notes, self.of_names())

    def of_names(self) -> dict[str, dict[str, StoredTensor]]:
        """What lies in the file, by parameter and state."""
        return {self.names[number]: states for number, states in self.states.items()}


def trainable_order(config: Mapping[str, object], model: ModelSpec, frozen: Collection[str] = ()) -> list[str]:
    """The parameters of a model that an optimizer may have, as its module has them: an adapter's where their modules are.

    Args:
        config: The model's description; may be empty.
        model: It.
        frozen: What cannot be among them: buffers.

    Raises:
        Unsupported: No table knows.
    """
    names = [spec.name for spec in model.params if spec.dtype in FLOATING and spec.name not in frozen]
    adapted = {name: found for name in names if (found := in_memory(name)) is not None}
    if not adapted:
        return module_order(config, names)
    _refuse_several(adapted.values())
    bases = {name: _base_of(name) for name in names}
    places = {name: at for at, name in enumerate(module_order(config, set(bases.values())))}
    last: dict[str, int] = {}  # of the layer that a module with an adapter has inside, its bias included
    for name in names:
        module = bases[name].rpartition(".")[0]
        last[module] = max(last.get(module, 0), places[bases[name]])

    def place(name: str) -> tuple[int, ...]:
        found = adapted.get(name)
        if found is None:
            return places[bases[name]], 0
        module, wrapped = _unwrapped(found.module)
        return last[module], 1, -wrapped, 1 if found.kind == LORA_A else 2

    return sorted(names, key=place)


def _refuse_several(adapted: Iterable[AdapterTensor]) -> None:
    """Of two adapters of a module, the one that was added first comes first in its optimizer; safetensors are sorted by name."""
    first: dict[tuple[str, str], AdapterTensor] = {}
    for tensor in adapted:
        other = first.setdefault((tensor.module, tensor.kind), tensor)
        if other.adapter != tensor.adapter:
            raise Unsupported(
                f"{tensor.module} has the adapters {other.adapter} and {tensor.adapter}, and no file says which was added first\n"
                "Save a run in which each module has one adapter."
            )


def _base_of(name: str) -> str:
    """What the base calls the weight that a tensor of an adapter changes, or the first one of its module."""
    found = in_memory(name)
    if found is None:
        return in_original(name)
    module, last = _unwrapped(found.module)[0], name.rpartition(".")[2]
    if module.endswith(_EXPERTS):
        return f"{module}.{_PACKED}"
    return f"{module}.{last if last == 'bias' else 'weight'}"


def _unwrapped(module: str) -> tuple[str, int]:
    """A module that adapters wrap, and how often there: each of the ``target_parameters`` of one puts another layer around it.

    Source: peft 0.21.2, ``tuners/lora/layer.py`` (``ParamWrapper``); transformers 5.23.0, where experts are one module with two parameters.
    """
    plain = module
    while plain.endswith(f".{BASE_LAYER}"):
        plain = plain.removesuffix(f".{BASE_LAYER}")
    return plain, (len(module) - len(plain)) // len(f".{BASE_LAYER}")

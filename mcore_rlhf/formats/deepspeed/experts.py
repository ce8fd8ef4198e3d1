"""DeepSpeed's own mixture-of-experts layer: which expert a rank's local number means, and who shares its optimizer state.

Every expert of every layer has a weight file of its own, under global numbers: ``layer_L_expert_E_mp_rank_XX_model_states.pt``.
The optimizer's files and ``param_shapes`` have local numbers, the same on all expert-parallel ranks: rank 1 of two that share
four experts calls its own 0 and 1, and they are 2 and 3. A group of experts is not cut over all data-parallel ranks, but over
those that have the same experts.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_save_moe_checkpoint``), ``utils/groups.py``
(``_create_expert_and_data_parallel``), ``moe/utils.py`` (``split_params_into_different_moe_groups_for_optimizer``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_rlhf.errors import Corrupt, Incomplete, LayoutMismatch, Problems, Unsupported

_NAME = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")
_DATA_FIRST = "use_data_before_expert_parallelism"


@dataclass(frozen=True, slots=True)
class ExpertName:
    """The name of an expert's parameter.

    Args:
        layer: What comes before the expert's number: one per layer.
        number: The expert's number, global or local.
        rest: What comes after it.
    """

    layer: str
    number: int
    rest: str

    def __str__(self) -> str:
        return f"{self.layer}{self.number}{self.rest}"


def expert_name(name: str) -> ExpertName | None:
    """The parts of a name, or None for what is no expert's."""
    found = _NAME.fullmatch(name)
    return None if found is None else ExpertName(found[1], int(found[2]), found[3])


@dataclass(slots=True)
class ExpertLayout:
    """How the experts of every layer are dealt to ranks; empty for a model without any.

    Args:
        dp: Data-parallel ranks.
        data_first: Whether ranks with the same experts are neighbours; otherwise those with different ones are.
        held: By layer, how many experts there are.
        local: By layer, how many of them a rank has.
    """

    dp: int
    data_first: bool = False
    held: dict[str, int] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)

    def degree(self, layer: str) -> int:
        """Expert-parallel ranks that share a layer."""
        return self.held[layer] // self.local[layer]

    def global_name(self, name: str, ep_rank: int) -> str:
        """What a rank's local name means.

        Args:
            name: As ``param_shapes`` has it.
            ep_rank: The expert-parallel rank.
        """
        expert = expert_name(name)
        if expert is None:
            return name
        return str(ExpertName(expert.layer, expert.number + ep_rank * self.local[expert.layer], expert.rest))

    def local_name(self, name: str) -> str:
        """What a rank that has it calls a parameter."""
        expert = expert_name(name)
        if expert is None or expert.layer not in self.local:
            return name
        return str(ExpertName(expert.layer, expert.number % self.local[expert.layer], expert.rest))

    def owners(self, names: tuple[str, ...]) -> list[range]:
        """The data-parallel ranks that share a flat group, for every expert-parallel rank; all of them where it has no experts.

        Args:
            names: The group's parameters, under local names.

        Raises:
            LayoutMismatch: It has experts of layers that are dealt differently.
        """
        experts = [expert_name(name) for name in names]
        degrees = {1 if expert is None else self.degree(expert.layer) for expert in experts} or {1}
        if len(degrees) > 1:
            raise LayoutMismatch(f"the flat group with {names[0]} has parameters of different expert-parallel degrees")
        (degree,) = degrees
        share = self.dp // degree
        if self.data_first:
            return [range(rank * share, (rank + 1) * share) for rank in range(degree)]
        return [range(rank, self.dp, degree) for rank in range(degree)]


def expert_layout(
    where: str, dp: int, trees: Mapping[tuple[int, int], Mapping[str, Any]], top: Mapping[str, Any]
) -> ExpertLayout:
    """Find out how experts are dealt.

    Args:
        where: The folder, for messages.
        dp: Data-parallel ranks.
        trees: The content of the weight file of every (layer, expert).
        top: The content of a model file.

    Raises:
        CheckpointError: Expert files are missing, or are not those that ``param_shapes`` speaks of.
    """
    config = top.get("ds_config")
    layout = ExpertLayout(dp, isinstance(config, Mapping) and bool(config.get(_DATA_FIRST)))
    problems = Problems()
    for layer, numbers in _numbers(name for tree in trees.values() for name in tree).items():
        if numbers != set(range(len(numbers))):
            gone = sorted(set(range(max(numbers))) - numbers)
            problems.add(Incomplete, f"{where}: of {layer}… the files of experts {gone} are missing")
        layout.held[layer] = len(numbers)
    stored = _numbers(name for group in top.get("param_shapes") or () for name in group)
    layout.local = {layer: len(stored.get(layer, ())) or held for layer, held in layout.held.items()}
    for layer in stored.keys() - layout.held.keys():
        problems.add(Incomplete, f"{where}: 'param_shapes' has {layer}…, but there are no files of its experts")
    for layer, held in layout.held.items():
        _check_degree(where, layer, held, layout, problems)
    _check_counts(where, trees, top, problems)
    problems.raise_if_any()
    return layout


def _check_degree(where: str, layer: str, held: int, layout: ExpertLayout, problems: Problems) -> None:
    local = layout.local[layer]
    if held % local or layout.dp % (held // local):
        text = f"{where}: {held} experts of {layer}…, {local} on a rank, do not go into {layout.dp} data-parallel ranks"
        problems.add(LayoutMismatch, text, "Expert files are missing, or of another run.")


def _check_counts(
    where: str, trees: Mapping[tuple[int, int], Mapping[str, Any]], top: Mapping[str, Any], problems: Problems
) -> None:
    """``num_experts`` lists the layers: the only word on experts whose files are missing at the end."""
    counts = top.get("num_experts")
    for layer, count in enumerate(counts if isinstance(counts, list) else ()):
        gone = [number for number in range(count) if (layer, number) not in trees]
        if gone:
            name = f"layer_{layer}_expert_{gone[0]}_mp_rank_00_model_states.pt"
            text = f"{where}: {name} is missing; layer {layer} has {count} experts, {len(gone)} of them without a file"
            problems.add(Incomplete, text, "Copy the checkpoint again from where it came from, or use an older tag.")


def _numbers(names: Iterator[str]) -> dict[str, set[int]]:
    """The experts of every layer, by what is before their number."""
    found: dict[str, set[int]] = {}
    for expert in map(expert_name, names):
        if expert is not None:
            found.setdefault(expert.layer, set()).add(expert.number)
    return found


def expert_tensors(where: str, tree: object, number: int) -> Iterator[tuple[str, Any]]:
    """The parameters in a weight file.

    Args:
        where: The file, for messages.
        tree: Its content.
        number: The expert's number, as the file's name says.

    Raises:
        Unsupported: It is not such a file.
    """
    if not isinstance(tree, Mapping):
        raise Unsupported(f"{where}: expected the parameters of one expert by name, found another object")
    for name, value in tree.items():
        expert = expert_name(str(name))
        if expert is None or expert.number != number:
            raise Corrupt(f"{where}: expected parameters of expert {number}, found {str(name)[:120]!r}")
        yield str(name), value

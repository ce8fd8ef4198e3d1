"""Which optimizer group a parameter belongs to: ``distrib_optim.pt`` does not say, so it is derived as Megatron does.

Sources: megatron-core 0.16.1, ``optimizer/__init__.py`` (``get_standard_config_overrides``, ``_get_param_groups``,
``get_megatron_optimizer``); megatron-core 0.19.2, ``optimizer/emerging_optimizers.py`` (``_is_nonlinear_or_embedding``),
``optimizer/optimizer.py`` (``param_group_identifier_keys``), ``optimizer_param_scheduler.py`` (``ParamGroupOverride``),
``optimizer/__init__.py`` (``get_mup_config_overrides``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from mcore_rlhf.core.catalog import DType, Shape
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule
from mcore_rlhf.errors import LayoutMismatch, Lossy
from mcore_rlhf.families.inventory import Unplaced, of_torch
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.megatron import is_routed_expert
from mcore_rlhf.models.spec import ParamSpec, Rules
from mcore_rlhf.storage.stored import StubType

from .arguments import Arguments

_KINDS = ("wd_mult", "lr_mult", "is_decoupled_lr", "pre_wd_mult", "pre_lr_mult")
_IDENTIFIERS = (
    "wd_mult", "lr_mult", "is_decoupled_lr", "is_expert_parallel", "pre_wd_mult", "pre_lr_mult", "max_lr", "min_lr", "start_wd",
    "end_wd", "optimizer", "eps",
)  # fmt: skip
"""A missing one and None are the same."""
_WORDS = ("embedding.word_embeddings.weight", "output_layer.weight")

_MEMBER = (
    "optimizer", "optimizer_state_dict", "param_groups", "state", "fp32_from_fp16_params", "fp32_from_fp16", "grad_scaler",
    "param_state_sharding_type",
)  # fmt: skip
_PARTS = "param_state"
"""What parts leave empty behind where the first rank trains nothing. Source: megatron-core 0.19.2, ``optimizer/distrib_optimizer.py``
(``sharded_state_dict``)."""
_COMMON_STEP = "common_step"
"""One for all parameters. Source: megatron-core 0.16.1, ``optimizer/optimizer.py`` (``sharded_state_dict``)."""


def by_sgd(args: Mapping[str, object]) -> bool:
    """Whether SGD trains, which no distributed optimizer takes.

    Source: megatron-core 0.19.2, ``optimizer/distrib_optimizer.py`` (``DistributedOptimizer.__init__``).
    """
    return args.get("optimizer") == "sgd"


def keeps_nothing(args: Mapping[str, object]) -> bool:
    """Whether SGD trains without momentum, and so has nothing but its groups, and of half a type its masters."""
    return by_sgd(args) and not args.get("sgd_momentum")


def by_adam(args: Mapping[str, object]) -> bool | None:
    """Whether Adam alone trains a run, so that its parameters have both moments; None where nobody says what does.

    Args:
        args: The run's arguments.
    """
    name = args.get("optimizer")
    return None if name is None else name == "adam"


@dataclass(frozen=True, slots=True)
class LocalParam:
    """A trainable parameter of one rank.

    Args:
        name: Global name, as it stands in this rank's state dict (a tied copy keeps its own).
        vpp_rank: Its model chunk.
        shape: Local shape.
        dtype: Element type in the model.
        shared_embedding: Whether pipeline stages share it.
    """

    name: str
    vpp_rank: int
    shape: Shape
    dtype: DType
    shared_embedding: bool

    @property
    def numel(self) -> int:
        """Number of local elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ChainedOptimizer:
    """One of the chained optimizers.

    Args:
        vpp_ranks: The model chunks whose parameters it holds.
        expert: Whether it holds the experts that are dealt over ranks, or everything else; None for both.
        matrices: Whether it holds matrices, or everything else; None for both.
    """

    vpp_ranks: tuple[int, ...]
    expert: bool | None
    matrices: bool | None = None

    def owns(self, param: LocalParam, apart: bool) -> bool:
        """Whether it holds a parameter, where experts are trained apart or not."""
        if param.vpp_rank not in self.vpp_ranks:
            return False
        if self.expert not in (None, apart and is_routed_expert(param.name)):
            return False
        return self.matrices is None or self.matrices == is_matrix(param.name, len(param.shape))


def members(
    args: Arguments, parallel: ParallelConfig, specs: Iterable[ParamSpec] | None = None
) -> tuple[ChainedOptimizer, ...]:
    """The chained optimizers of every rank, in the order in which they are saved.

    Sources: megatron-core 0.16.1, ``optimizer/muon.py``; 0.19.2, ``optimizer/__init__.py`` (``_get_megatron_emerging_optimizer``):
    Muon, then the rest; experts that are dealt over ranks apart, unless it is layer-wise. Of experts, biases alone are no matrices.
    Where all experts are frozen there is none for them (``get_megatron_optimizer``).

    Args:
        args: The run's.
        parallel: Its layout.
        specs: The model's parameters; without them experts count as trained.
    """
    chunks = tuple(range(parallel.vpp))
    apart = args.experts_apart(parallel) and (specs is None or any(_is_routed(spec) for spec in specs))
    if args.has_matrix_optimizer:
        biases = args.flag("add_bias_linear", True)
        halves = ((True, apart), (False, apart and biases))
        if args.layer_wise:
            return tuple(ChainedOptimizer(chunks, None, half) for half, _ in halves)
        kinds = [(half, expert) for half, two in halves for expert in ([False, True] if two else [False])]
        return tuple(ChainedOptimizer(chunks, expert, half) for half, expert in kinds)
    dense = [ChainedOptimizer(chunks, expert=False)]
    if args.flag("overlap_param_gather_with_optimizer_step") and parallel.vpp > 1:
        dense = [ChainedOptimizer(chunks[:1], expert=False), ChainedOptimizer(chunks[1:], expert=False)]
    return (*dense, *([ChainedOptimizer(chunks, expert=True)] if apart else []))


def _is_routed(spec: ParamSpec) -> bool:
    """Whether it is an expert's parameter that is trained."""
    return spec.trainable and is_routed_expert(spec.name)


def as_stored(chained: tuple[ChainedOptimizer, ...], count: int) -> tuple[ChainedOptimizer, ...]:
    """The chained optimizers of which so many are stored: all but the experts', where these are frozen."""
    dense = tuple(member for member in chained if member.expert is not True)
    return dense if len(dense) == count else chained


@dataclass(frozen=True, slots=True)
class Membership:
    """Decides group membership from names and shapes.

    Args:
        args: The run's arguments.
        rules: The user's own rules, which win.
    """

    args: Arguments
    rules: Rules

    def wd_mult(self, name: str, ndim: int) -> float:
        """The weight-decay multiplier of a parameter: none for vectors and biases."""
        said = self.rules.wd_mult(name)
        if said is not None:
            return said
        vector = ndim == 1 or name.endswith(".bias")
        spared = self.args.flag("apply_wd_to_qk_layernorm") and ("q_layernorm." in name or "k_layernorm." in name)
        return 0.0 if vector and not spared else 1.0

    def decoupled(self, name: str) -> bool:
        """Whether a parameter has a learning rate of its own (``--decoupled-lr``): embeddings and the output layer."""
        if self.args.number("decoupled_lr") is None:
            return False
        return name.endswith(_WORDS)

    def index(self, name: str, ndim: int, groups: Sequence[ParamGroup]) -> int:
        """The position among ``groups`` of the one that a parameter belongs to.

        Raises:
            LayoutMismatch: No group, or more than one, fits.
        """
        fits = self._fitting(name, ndim, groups)
        if len(fits) > 1 and self.args.flag("use_mup"):
            fits = [index for index in fits if self._has_other_rate(groups[index].fields) == self._scaled(name, ndim)]
        if len(fits) != 1:
            raise self._unfit(name, ndim, groups, fits)
        return fits[0]

    def require(self, file: str, params: Iterable[tuple[str, int]], groups: Sequence[ParamGroup], apart: bool) -> None:
        """Check that each parameter has a group, where which of several that is does not matter.

        Args:
            file: Where the groups are.
            params: Names, and how many dimensions each has.
            groups: Those of one chained optimizer, or of all.
            apart: Whether experts are trained apart.

        Raises:
            LayoutMismatch: One has none: a group is gone, and no loader of Megatron's goes on without it.
        """
        of_both = len({group.expert for group in groups}) > 1
        kinds: dict[tuple[float, bool, bool, bool], tuple[str, int]] = {}
        for name, ndim in params:
            expert = of_both and apart and is_routed_expert(name)
            kind = (self.wd_mult(name, ndim), self.decoupled(name), is_matrix(name, ndim), expert)
            kinds.setdefault(kind, (name, ndim))
        for (_, _, _, expert), (name, ndim) in kinds.items():
            own = [group for group in groups if not of_both or group.expert == expert]
            if not self._fitting(name, ndim, own):
                unfit = self._unfit(name, ndim, own, [])
                raise LayoutMismatch(f"{file}: {unfit}")

    def _fitting(self, name: str, ndim: int, groups: Sequence[ParamGroup]) -> list[int]:
        wd_mult, decoupled, matrices = self.wd_mult(name, ndim), self.decoupled(name), of_matrices(groups)
        return [
            index
            for index, group in enumerate(groups)
            if _wd_mult(group.fields) == wd_mult
            and self._is_decoupled(group.fields) == decoupled
            and (len(set(matrices)) < 2 or matrices[index] == is_matrix(name, ndim))
        ]

    def _unfit(self, name: str, ndim: int, groups: Sequence[ParamGroup], fits: Sequence[int]) -> LayoutMismatch:
        apart = _differences([groups[index].fields for index in fits])
        return LayoutMismatch(
            f"{name}: {len(fits)} of the {len(groups)} param groups have weight-decay multiplier {self.wd_mult(name, ndim)}"
            f"{' and a decoupled learning rate' if self.decoupled(name) else ''}, expected one"
            f"{f'; they differ in {apart}, and nothing says which parameters have which' if apart else ''}\n"
            "Say which group it belongs to with --rules (wd_mult), or convert the weights alone with --no-optimizer."
        )

    def _scaled(self, name: str, ndim: int) -> bool:
        """Whether muP scales the rate of a parameter: of all matrices but embeddings, and with SGD of everything else."""
        embedding = "embedding" in name or (self.args.tied and name.endswith("output_layer.weight"))
        return (ndim > 1 and not embedding) != by_sgd(self.args.values)

    def _has_other_rate(self, fields: Mapping[str, object]) -> bool:
        return fields.get("max_lr") != self.args.number("lr")

    def _is_decoupled(self, fields: Mapping[str, object]) -> bool:
        decoupled_lr = self.args.number("decoupled_lr")
        if decoupled_lr is None:
            return False
        return bool(fields.get("is_decoupled_lr")) or fields.get("max_lr") == decoupled_lr


def _differences(several: Sequence[Mapping[str, object]]) -> str:
    """In which fields groups differ, and how."""
    keys = dict.fromkeys(key for fields in several for key in fields if key not in ("params", "lr", "step"))
    values = {key: [fields.get(key) for fields in several] for key in keys}
    return ", ".join(f"{key} ({', '.join(map(str, v))})" for key, v in values.items() if any(one != v[0] for one in v))


def _wd_mult(fields: Mapping[str, object]) -> object:
    return fields.get("wd_mult", fields.get("pre_wd_mult"))


def is_matrix(name: str, ndim: int) -> bool:
    """Whether a parameter is one that Muon and its kind train: every matrix but those that stand for words."""
    return ndim == 2 and not name.endswith(_WORDS)


def of_matrices(groups: Sequence[ParamGroup]) -> list[bool]:
    """For every group of a run whether Muon or its kind trains it: the groups of everything else name their optimizer.

    Before 0.18 no group names one, and Muon's have a momentum and no betas. Where one optimizer trains everything, all are alike.
    """
    named = [group.fields.get("optimizer") is not None for group in groups]
    if any(named):
        return [not name for name in named]
    return [not group.fields.keys().isdisjoint(("momentum", "momentum_beta")) for group in groups]


def merged_groups(per_rank: Sequence[Sequence[ParamGroup]]) -> tuple[ParamGroup, ...]:
    """The groups of all ranks: equal ones once, in the order of the first rank that has them.

    A group that is empty on a rank takes no step there, and lacks what another rank's has.

    Raises:
        Lossy: Two ranks give one group different steps or rates.
    """
    merged: dict[tuple[object, ...], ParamGroup] = {}
    for groups in per_rank:
        for group, matrices in zip(groups, of_matrices(groups), strict=True):
            said = (group.fields.get(name) for name in _IDENTIFIERS)
            key = (
                group.expert,
                matrices,
                *(one if isinstance(one, int | float | str | None) else repr(one) for one in said),
            )
            known = merged.setdefault(key, group)
            merged[key] = replace(known, fields={**group.fields, **known.fields})
            different = [f for f in group.fields.keys() & known.fields.keys() if group.fields[f] != known.fields[f]]
            if different:
                raise Lossy(
                    f"param group with weight-decay multiplier {_wd_mult(group.fields)}: ranks disagree on "
                    + ", ".join(f"{f} ({known.fields[f]} and {group.fields[f]})" for f in sorted(different))
                )
    return tuple(merged.values())


def groups_by_member(
    chained: Sequence[ChainedOptimizer],
    groups: Sequence[ParamGroup],
    apart: bool,
    specs: Sequence[ParamSpec],
    membership: Membership,
) -> list[list[ParamGroup]]:
    """The groups of every chained optimizer in a layout; see :func:`groups_for`.

    Args:
        chained: The chained optimizers of the new layout.
        groups: All groups of the source.
        apart: Whether experts are trained apart there (:meth:`.Arguments.experts_apart`).
        specs: The model's parameters.
        membership: Decides which group a parameter is in.
    """
    found: dict[bool | None, tuple[list[ParamGroup], list[ParamGroup]]] = {}
    for kind in {member.matrices: None for member in chained}:
        own = [group for group, of in zip(groups, of_matrices(groups), strict=True) if kind in (None, of)]
        inside = [s for s in specs if kind in (None, is_matrix(s.name, len(s.global_shape)))]
        found[kind] = groups_for(own, apart, inside, membership)
    return [
        [*(found[m.matrices][0] if not m.expert else []), *(found[m.matrices][1] if m.expert is not False else [])]
        for m in chained
    ]


def _classes(groups: Sequence[ParamGroup]) -> list[str]:
    return list(
        dict.fromkeys(key for group in groups for key, value in group.fields.items() if isinstance(value, StubType))
    )


CLASSES: Sequence[Rule[Sequence[ParamGroup]]] = [
    Rule(Fate.DERIVED, "param groups: {names}: classes, which every run gives its groups itself",
         lambda groups: (names := _classes(groups)) and {"names": names, "of": [Item(Kind.GROUP, key) for key in names]}),
]  # fmt: skip
"""What is said of the fields that go; see :func:`without_classes`."""


def without_classes(groups: Sequence[ParamGroup]) -> tuple[ParamGroup, ...]:
    """Param groups without the classes that those of an offloaded optimizer name, and that every run gives itself.

    Megatron reads ``common.pt`` with ``weights_only``, and would refuse it; another trainer would have to import Transformer Engine.
    Sources: megatron-core 0.16.1 and 0.19.2, ``optimizer/cpu_offloading/hybrid_optimizer.py``, ``dist_checkpointing/strategies/common.py``.

    Args:
        groups: Megatron's.
    """
    classes = _classes(groups)
    return tuple(replace(one, fields={k: v for k, v in one.fields.items() if k not in classes}) for one in groups)


def groups_for(
    groups: Sequence[ParamGroup], apart: bool, specs: Sequence[ParamSpec], membership: Membership
) -> tuple[list[ParamGroup], list[ParamGroup]]:
    """The groups of the dense and of the expert optimizer in a layout.

    With experts trained apart there are two optimizers, without there is one, whatever the source had. A group is there
    only if some parameter of the model belongs to it.

    Args:
        groups: All groups of the source.
        apart: Whether experts are trained apart there (:meth:`.Arguments.experts_apart`).
        specs: The model's parameters.
        membership: Decides which group a parameter is in.

    Raises:
        Lossy: Experts and dense parameters had different steps or rates, and would have to share a group.
    """
    dense = [group for group in groups if not group.expert]
    expert = [group for group in groups if group.expert]
    routed = [spec for spec in specs if _is_routed(spec)]
    if not apart or not routed:
        return dense + [lone for group in expert for lone in _without_counterpart(group, dense)], []
    if not expert:
        used = {membership.index(spec.name, len(spec.global_shape), dense) for spec in routed}
        expert = [_marked(group, expert=True) for index, group in enumerate(dense) if index in used]
    return dense, expert


def _marked(group: ParamGroup, expert: bool) -> ParamGroup:
    fields = dict(group.fields)
    if "is_expert_parallel" in fields:
        fields["is_expert_parallel"] = expert
    return ParamGroup(fields, expert)


def _without_counterpart(expert: ParamGroup, dense: Sequence[ParamGroup]) -> list[ParamGroup]:
    """An expert group as a dense one, unless there is such a group already, which must then agree with it."""
    twins = [group for group in dense if all(group.fields.get(f) == expert.fields.get(f) for f in _KINDS)]
    told = [f for f in _IDENTIFIERS if f != "is_expert_parallel"]
    twins = [one for one in twins if all(one.fields.get(f) == expert.fields.get(f) for f in told)] or twins
    for group in twins:
        different = [f for f in group.fields if f != "is_expert_parallel" and group.fields[f] != expert.fields.get(f)]
        if different:
            raise Lossy(
                "experts and dense parameters have different "
                + ", ".join(f"{f} ({expert.fields.get(f)} and {group.fields[f]})" for f in different)
                + ", but share one param group at EP 1\nKeep --ep above 1."
            )
    return [] if twins else [_marked(expert, expert=False)]


def inner_state(member: Mapping[str, object]) -> Mapping[str, object]:
    """The dictionary with ``param_groups``: mixed precision nests it once more than fp32."""
    for key in ("optimizer", "optimizer_state_dict"):
        inner = member.get(key)
        if isinstance(inner, dict):
            return inner
    return member


def look_at_optimizer(found: Unplaced, file: str, stored: object) -> None:
    """Look at the optimizers of ``model_optim_rng.pt`` and ``common.pt``: one dictionary, or several that are chained.

    Args:
        found: Told of everything that is not read.
        file: The file.
        stored: What it has under ``optimizer``.
    """
    numbered = isinstance(stored, Mapping) and bool(stored) and all(isinstance(key, int) for key in stored)
    members = list(stored.values()) if isinstance(stored, Mapping) and numbered else stored
    for member in members if isinstance(members, list) else [members]:
        if isinstance(member, Mapping):
            inner = inner_state(member)
            known = of_torch(inner)
            placed = {key: value for key, value in member.items() if key != _PARTS or value}
            found.look(file, placed, dict.fromkeys(_MEMBER), "optimizer")
            states = {**(known["state"] or {}), _COMMON_STEP: None}
            found.look(
                file,
                inner,
                {**(dict.fromkeys(_MEMBER) if inner is member else known), "state": states},
                "optimizer.optimizer",
            )

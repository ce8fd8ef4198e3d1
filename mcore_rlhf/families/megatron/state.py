"""What a source of Megatron's family has besides tensors, and the RNG states of a new layout.

RNG states are kept where ranks stay the same, otherwise derived, or written fresh. Megatron stops when ``rng_tracker_states`` is
missing, so there are always valid states.

Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``get_rng_state``); megatron-core 0.16.1,
``tensor_parallel/random.py`` (``model_parallel_cuda_manual_seed``), Megatron-LM ``training/initialize.py``
(``_set_random_seed``).
"""

from __future__ import annotations

import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any, ClassVar

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import PARAM, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Inventory, Item, Kind, Rule, Values
from mcore_rlhf.core.rows import Tensor
from mcore_rlhf.families.inventory import items_in, state_dict_of
from mcore_rlhf.families.run_folders import gone_beside
from mcore_rlhf.families.source import Family, NewNames
from mcore_rlhf.models.spec import ModelSpec, ParamSpec
from mcore_rlhf.storage.nested import PICKLED_NONE, is_none
from mcore_rlhf.storage.stored import Namespace, StoredTensor
from mcore_rlhf.storage.torch_values import SmallTensor, cpu_generator_state, cuda_generator_state, is_tensor

from .arguments import Arguments, stored_arguments
from .folders import FileRank, FoundIteration

SCHEDULER_KEYS = ("opt_param_scheduler", "lr_scheduler")
"""Megatron-LM's, and of trainers that save Megatron-core's parts themselves, each of which counts a step where Megatron-LM counts samples;
Megatron-LM before 3.0 had the second as well, in its files of ranks.

Sources: verl 0.9.1 ``workers/engine/megatron/transformer_impl.py`` (``lr_scheduler_step``: ``step(1)``), SkyRL 0.3.0
``distributed/megatron/megatron_strategy.py`` (``optimizer_step``), AReaL 1.0.4 ``engine/megatron_engine.py`` (``lr_scheduler_step``); by
samples: Megatron-Bridge, NeMo-RL 7ea279a ``megatron_policy_worker.py`` (``step(increment=gbs)``), RLinf a3816b5 ``megatron_worker.py``
(``increment``), slime 624b824 and miles 31f1ca9 ``megatron_utils/model.py``, ms-swift 4.6.0 ``trainers/base.py``.
"""
RNG_KEYS = ("rng_state",)
OLD_RNG_KEYS = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
PER_RANK_KEYS = ("rerun_state_machine",)
COUNTER = "num_floating_point_operations_so_far"
SAMPLES = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
TIMELESS = "mcore_rlhf_timeless"
"""Key by which a model file of ours says that it is the same at every step: see :func:`timeless`."""
_OF_A_MOMENT = {"iteration", "curr_iteration", COUNTER, *SAMPLES}
LAID_OUT = "mcore_rlhf_laid_out"
"""Argument by which our engine, which asked the optimizer, says that it deals by a layout; for Megatron's see :class:`MegatronState`."""
_SHOWN = 40
OF_RANKS = {
    **{key: Item(Kind.RNG, key) for key in (*RNG_KEYS, *OLD_RNG_KEYS)},
    **{key: Item(Kind.VALUE, key) for key in PER_RANK_KEYS},
}
"""Keys of which every rank has a value of its own, and the items that these values are."""


def timeless(top: Mapping[str, object], rng: Sequence[object]) -> dict[str, object]:
    """A model file that trains nothing, as it is at every step: so it can be one file of all of them.

    Iteration and random states are there for Megatron-LM, which exits without them; they are a release's and those of a start. Counters are
    left out: it takes 0. Source: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``load_checkpoint``).

    Args:
        top: What it holds at a step.
        rng: The random states that go into it.
    """
    kept, args = {key: value for key, value in top.items() if key != COUNTER}, stored_arguments(top)
    still = Namespace({name: value for name, value in args.items() if name not in _OF_A_MOMENT})
    return {**kept, "args": still, "iteration": 0, RNG_KEYS[0]: list(rng), TIMELESS: True}


def is_timeless(top: Mapping[str, object]) -> bool:
    """Whether a model file is the same at every step, as :func:`timeless` made it; what has an optimizer never is."""
    return top.get(TIMELESS) is True and "optimizer" not in top


def of_its_step(top: Mapping[str, object]) -> Mapping[str, object]:
    """What a model file holds, without an iteration that is no step's: where it is the same at every step, its folder says which."""
    return {key: value for key, value in top.items() if key not in (TIMELESS, "iteration")} if is_timeless(top) else top


@dataclass(slots=True)
class ModelPart:
    """One model chunk in one rank's file.

    Args:
        vpp_rank: Its number on this rank.
        tensors: Global name → where the local tensor lies, in registration order.
        opaque: Global name → whatever else the state dict has there (``_extra_state``).
        local_layers: Decoder layers found in it.
    """

    vpp_rank: int
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    opaque: dict[str, object] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    local_layers: int = 0


@dataclass(slots=True)
class RankValues:
    """What a source has for one rank that belongs to it alone, whichever format stored it.

    Args:
        at: Which rank it is.
        top: Values by the key that they have at the top of a legacy file: ``args``, ``rng_state``, counters.
        parts: Its model chunks, as far as they have values that are no parameters.
        materialize: Gives a value of ``top`` or ``parts`` with real tensors in it.
    """

    at: FileRank
    top: Mapping[str, object]
    parts: Sequence[ModelPart]
    materialize: Callable[[object], Any]


@dataclass(slots=True)
class MegatronTensors(ABC):
    """What both formats' tensors have in common: every parameter, and every state of those that are trained.

    Args:
        role: Role of all tensors.
        model: Shapes and partitions.
        states: Names of the optimizer's tensor states.
        own: Those of parameters that have not all of them, since another optimizer trains them.
        unrounded: Parameters that are stored as their fp32 masters alone.
    """

    role: str
    model: ModelSpec
    states: tuple[str, ...]
    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict, kw_only=True)
    unrounded: frozenset[str] = field(default=frozenset(), kw_only=True)

    def table(self) -> Chunks:
        """Where the elements of every tensor lie."""
        found = Chunks()
        for spec in self.model.params:
            of_optimizer = self.own.get(spec.name, self.states) if spec.trainable else ()
            for state in of_optimizer if spec.name in self.unrounded else (PARAM, *of_optimizer):
                name = TensorName(self.role, spec.name, state)
                tensor = self.tensor(spec, name)
                if tensor is not None:
                    found.add(name, tensor)
        return found

    @abstractmethod
    def tensor(self, spec: ParamSpec, name: TensorName) -> Tensor | None:
        """One of them, or None where nothing of it is stored."""


def says_nothing(value: object) -> bool:
    """Whether there is nothing in a value under a parameter's name: None, no element, or None itself, pickled or saved.

    Transformer Engine's modules without fp8 have such values. Sources: Transformer Engine 2.9, ``pytorch/module/base.py``
    (``get_extra_state``: no element); 1.11, the same (``torch.save`` of None in a ``BytesIO``); megatron-core 0.19.2,
    ``extensions/transformer_engine.py`` (``_get_extra_state``).

    Args:
        value: As it is stored; a tensor may be one that was not read.
    """
    if value is None or 0 in getattr(value, "shape", ()):
        return True
    data = value.getvalue() if isinstance(value, BytesIO) else value
    if is_tensor(value) and getattr(value, "shape", ()) == (len(PICKLED_NONE),):
        data = value.numpy().tobytes()  # type: ignore[attr-defined]
    return isinstance(data, bytes) and (not data or is_none(data))


@dataclass(frozen=True, slots=True)
class OpaqueValue:
    """What a rank's state dict has under a parameter's name though it is no tensor: ``_extra_state``.

    Args:
        shard: The rank.
        stored: The value, as it is stored.
    """

    shard: RankValues
    stored: object

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it."""
        small = isinstance(self.stored, StoredTensor) and self.stored.shape == (len(PICKLED_NONE),)
        return says_nothing(self.shard.materialize(self.stored) if small else self.stored)

    @property
    def digest(self) -> bytes:
        """A hash of what it holds."""
        value = self.shard.materialize(self.stored)
        return _digest(value.getvalue() if isinstance(value, BytesIO) else value)


def opaque_item(name: str) -> Item:
    """The item that a value under a parameter's name is."""
    return Item(Kind.MODEL, name)


def names_of(names: Iterable[str]) -> str:
    """Names of opaque values for people: all of them, up to a number that nobody reads on from."""
    every = list(names)
    more = f", … ({len(every)}; all of them in the account of --json)" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more


def of_opaque(names: Collection[str]) -> Values | None:
    """What a rule says of values under parameters' names, if there are any: how many, which, and their items."""
    return {"count": len(names), "names": names_of(names), "of": [*map(opaque_item, names)]} if names else None


UNKNOWN: Rule[Values] = Rule(Fate.NOTE, "{name} is in no table; it is {how}", dict)
"""Of a parameter: how it is taken to be cut, by what the files show."""
NO_RNG = "RNG states: Megatron's belong to its ranks, and formats under module names store none"


def scheduler_in(top: Mapping[str, object], notes: Report) -> Mapping[str, object] | None:
    """The scheduler's state among the values at the top of a file, under whichever key it is there."""
    key = next((key for key in SCHEDULER_KEYS if top.get(key) is not None), SCHEDULER_KEYS[0])
    return state_dict_of(top.get(key), key, notes)


UNSCHEDULED: Rule[tuple[str | None, object]] = Rule(
    Fate.NOTE,
    "there is an optimizer, but no scheduler state, without which Megatron-LM loads no optimizer",
    lambda asked: asked[0] is not None and asked[1] is None,
)
"""Of a run's optimizer and scheduler."""
GONE: Rule[FoundIteration] = Rule(
    Fate.LOST, "{text}", lambda located: [{"text": text} for text in gone_beside(located.root, located.folder)]
)
"""Of where a checkpoint lies: files that are not there, and that its trainer writes together with those that are."""


@dataclass(slots=True)
class MegatronState(Family):
    """What only a Megatron target needs of a Megatron source.

    Args:
        located: Where it is; None for a source of another family that is seen as Megatron's.
        args: The stored arguments.
        shards: All ranks: their opaque values and RNG states; none where Megatron did not write the files.
        order: All names, opaque ones included, in registration order.
        unknown: Parameters about which nothing is known, because there is one tensor-parallel rank only.
        scalars: Values that the plain optimizer keeps per parameter and that are equal for all.
        by_size: Whether a layer-wise optimizer dealt parameters by their size, whatever ``use_layer_wise_param_layout`` says: runs of
            ``pretrain_gpt.py`` do so even where that is true. Source: megatron-core 0.19.2, ``training/models/dist_utils.py``.
        sharding: How ``torch_dist`` has a distributed optimizer's states; None elsewhere.
    """

    names: ClassVar[str] = "megatron"
    located: FoundIteration | None
    args: Arguments
    shards: Sequence[RankValues]
    order: list[str]
    unknown: list[str]
    scalars: dict[str, object] = field(default_factory=dict)
    by_size: bool = field(default=False, kw_only=True)
    sharding: str | None = field(default=None, kw_only=True)

    @property
    def rng_ranks(self) -> int:
        """Data-parallel ranks that have random states of their own: all, in a run with ``--data-parallel-random-init``."""
        stored = (shard.top.get("rng_state") for shard in self.shards)
        return max((len(states) for states in stored if isinstance(states, list)), default=0)

    def inventory(self) -> Inventory:
        """What its ranks have, item by item, beside what all of them share."""
        keys = dict.fromkeys(key for shard in self.shards for key in shard.top if key in OF_RANKS)
        return {
            **{OF_RANKS[key]: tuple(shard.top.get(key) for shard in self.shards) for key in keys},
            **dict(items_in(self, "scalars")),
            **{opaque_item(name): tuple(v.stored for v in values) for name, values in self.opaque().items()},
        }

    def opaque(self) -> dict[str, list[OpaqueValue]]:
        """Values under parameters' names that are no tensors, of all ranks that have one with anything in it."""
        found: dict[str, list[OpaqueValue]] = {}
        for shard in self.shards:
            for part in shard.parts:
                for name, stored in part.opaque.items():
                    value = OpaqueValue(shard, stored)
                    if not value.empty:
                        found.setdefault(name, []).append(value)
        return found

    def renamed(self, names: NewNames) -> MegatronState:
        """Names stay: of those that are left out, the opaque values of their modules go along."""
        there = set(names.owners.values())
        modules = {name.rpartition(".")[0] for name in there}
        order = [
            name
            for name in self.order
            if name in there or (name.endswith("._extra_state") and name.rpartition(".")[0] in modules)
        ]
        return replace(self, order=order, unknown=[name for name in self.unknown if name in there])


_PHILOX_NBYTES = 16
"""A CUDA generator's state: seed and offset, 8 bytes each. The CPU's has 5056 bytes."""

RngState = dict[str, object]

NAMES = {
    "python": "random_rng_state",
    "numpy": "np_rng_state",
    "torch": "torch_rng_state",
    "cuda": "cuda_rng_state",
    "tracker": "rng_tracker_states",
}
"""The manager's names for a rank's random states, and Megatron's."""


@dataclass(frozen=True, slots=True)
class RngMaker:
    """Makes the RNG states of new ranks.

    Args:
        saved: The state of the source's first rank; None where the source has none.
        iteration: Goes into derived seeds, so that two steps do not repeat each other.
        seed: The run's ``--seed``, for fresh states.
    """

    saved: Mapping[str, object] | None
    iteration: int
    seed: int

    def derived(self, at: FileRank, dp_rank: int = 0) -> RngState:
        """States seeded by a hash of (saved state of coordinate 0, own coordinate, iteration).

        The default and data-parallel states are equal within a tensor-parallel group, model-parallel ones differ per
        (tp, pp), expert ones per (ep, etp, pp).
        """
        from hashlib import sha256

        base = sha256(_digest(self.saved) + struct.pack("<q", self.iteration)).digest()

        def seed(*coordinate: object) -> int:
            place = (*coordinate, dp_rank) if dp_rank else coordinate
            return int.from_bytes(sha256(base + repr(place).encode()).digest()[:8], "little") >> 1

        return self._states(
            default=seed("default", at.pp_rank),
            tracker={
                "data-parallel-rng": seed("data", at.pp_rank),
                "model-parallel-rng": seed("model", at.tp_rank, at.pp_rank),
                "expert-parallel-rng": seed("expert", at.ep_rank, at.etp_rank, at.pp_rank),
            },
        )

    def fresh(self, at: FileRank, dp_rank: int = 0) -> RngState:
        """The states that Megatron itself has right after it was started with the run's seed."""
        seed = self.seed + 100 * at.pp_rank + 10 * dp_rank
        return self._states(
            default=seed,
            tracker={
                "data-parallel-rng": seed,
                "model-parallel-rng": seed + 2718 + at.tp_rank,
                "expert-parallel-rng": seed + 1024 + 100 * at.ep_rank + at.etp_rank,
            },
        )

    def _states(self, default: int, tracker: Mapping[str, int]) -> RngState:
        import numpy as np  # opening a source needs it not

        generator = random.Random(default)
        return {
            "random_rng_state": generator.getstate(),
            "np_rng_state": np.random.RandomState(default % 2**32).get_state(),
            "torch_rng_state": _cpu_state(default),
            "cuda_rng_state": self._device_state("cuda_rng_state", default),
            "rng_tracker_states": {name: self._device_state(name, seed) for name, seed in tracker.items()},
        }

    def _device_state(self, name: str, seed: int) -> SmallTensor:
        """A state of the kind that the source has: a CUDA generator's, or the CPU's where the run had no GPU."""
        if self._nbytes(name) != _PHILOX_NBYTES:
            return _cpu_state(seed)
        return cuda_generator_state(seed)

    def _nbytes(self, name: str) -> int:
        saved = self.saved or {}
        tracker = saved.get("rng_tracker_states")
        value = saved.get(name, tracker.get(name) if isinstance(tracker, dict) else None)
        if value is None:
            value = saved.get("cuda_rng_state")
        numel = getattr(value, "numel", None)
        return int(numel()) if callable(numel) else _PHILOX_NBYTES


def _cpu_state(seed: int) -> SmallTensor:
    return cpu_generator_state(seed % 2**63)


def _digest(state: object) -> bytes:
    """A hash of a nest of dictionaries, sequences, arrays and tensors."""
    from hashlib import sha256

    import numpy as np

    digest = sha256()

    def feed(value: object) -> None:
        tensor = is_tensor(value)
        digest.update(b"Tensor" if tensor else type(value).__name__.encode())
        if isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                digest.update(repr(key).encode())
                feed(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                feed(item)
        elif tensor:
            digest.update(value.numpy().tobytes())  # type: ignore[attr-defined]
        elif isinstance(value, np.ndarray):
            digest.update(value.tobytes())
        else:
            digest.update(repr(value).encode())

    feed(state)
    return digest.digest()


def saved_rng(shard: RankValues) -> list[Mapping[str, object]]:
    """The RNG states that a rank of the source stored, with real tensors."""
    stored = shard.top.get("rng_state")
    if stored is None and "rng_tracker_states" in shard.top:
        stored = [{key: shard.top[key] for key in OLD_RNG_KEYS if key in shard.top}]
    listed = shard.materialize(stored)
    return listed if isinstance(listed, list) else []


NO_PARAMETERS: Rule[MegatronState] = Rule(
    Fate.LOST, "values that are no parameters: {names}", lambda family: of_opaque(list(family.opaque()))
)
"""What becomes of them where there are no ranks."""

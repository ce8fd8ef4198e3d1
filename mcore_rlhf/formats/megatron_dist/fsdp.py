"""Checkpoints of Megatron-FSDP (``--ckpt-format fsdp_dtensor``): torch's DCP under names of its own, seen as a ``torch_dist`` folder.

There is no ``common.pt`` and no ``metadata.json``: the nest of dictionaries that was saved lies item by item, and ``.metadata`` says by
which path. The model's tensors are those that the optimizer trains, fp32 in a half-precision run: masters, of which the parameters are
rounded. Gate and up of a first feed-forward matrix are two tensors, experts have their global numbers, layers are not stacked, and the
chunks are as uneven as the flat buffers that were cut.

Sources: megatron-core 0.19.2, ``training/checkpointing.py`` (``save_checkpoint``, ``preprocess_fsdp_dtensor_state_dict``,
``get_rng_state``), ``core/transformer/fsdp_dtensor_checkpoint.py``, ``core/optimizer/distrib_optimizer.py``
(``sharded_param_state_fsdp_dtensor``, ``_param_groups_to_param2group_meta``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from mcore_rlhf.core.catalog import FLOAT32, MASTER, PARAM
from mcore_rlhf.core.facts import distinct
from mcore_rlhf.errors import Incomplete, Unsupported
from mcore_rlhf.families.megatron.arguments import Arguments, stored_arguments
from mcore_rlhf.families.megatron.folders import FoundIteration
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.models.megatron import is_buffer
from mcore_rlhf.storage.dcp.folder import DcpFolder, DcpObject, DcpTensor
from mcore_rlhf.storage.dcp.metadata import Path_
from mcore_rlhf.storage.dcp.writer import saved

from .folders import DistFolder, ShardKey, without_wrapper

FSDP_DTENSOR = "fsdp_dtensor"
_TENSORS, _STATES, _GROUPS = "model", "state", "param_to_group_meta"


@dataclass(slots=True)
class FsdpFolder(DistFolder):
    """Such a folder, opened.

    Args:
        rng: Random states of each (stage, tensor-parallel rank), by that pair.
        masters_of_model: The model's tensors that are masters of parameters in half precision.
    """

    rng: dict[tuple[int, int], object] = field(default_factory=dict)
    masters_of_model: dict[str, DcpTensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """The tensors by state and name; everything else was read with :attr:`top`."""
        args = Arguments(stored_arguments(self.top))
        half = args.flag("bf16") or args.flag("fp16")
        for fqn, tensor in self.dcp.tensors.items():
            match self.dcp.planner_data[fqn]:
                case (str(part), str(name)) if part == _TENSORS:
                    key = without_wrapper(name)
                    self.tensors.setdefault(PARAM, {})[key] = tensor
                    if half and tensor.dtype == FLOAT32 and not is_buffer(key):
                        self.masters_of_model[key] = tensor
                case ("optimizer", str(part), str(name), str(state)) if part == _STATES:
                    if tensor.global_shape:  # numbers are steps, which the groups count as well
                        self.tensors.setdefault(state, {})[without_wrapper(name)] = tensor
        if self.masters_of_model:
            self.tensors[MASTER] = self.masters_of_model
        ranks = (1, args.integer("tensor_model_parallel_size", 1) or 1)
        for pair, content in self.rng.items():
            place = next(iter(self.dcp.metadata.places.values()))
            self.objects[ShardKey("rng_state", pair, ranks)] = Loaded("rng_state", place, self.dcp, content)

    @classmethod
    def open(cls, located: FoundIteration, options: ReadOptions) -> FsdpFolder:
        """Open a folder.

        Raises:
            CheckpointError: It is incomplete, damaged, or asks for code.
            Unsupported: It has pipeline stages, or several model chunks, whose layers have the same names.
        """
        dcp = DcpFolder.open(located.folder, located.root, options.stubs)
        if not dcp.planner_data:
            raise Incomplete(f"{located.folder}: its .metadata does not say what its items are\nCopy the folder again.")
        require_items(dcp)
        nest: dict[str, Any] = {}
        for fqn, path in dcp.planner_data.items():
            if path[0] not in (_TENSORS, "optimizer") or _GROUPS in path[:2]:
                put(nest, path, item_value(dcp, fqn))
        if any(str(path[0]).startswith("model") and path[0] != _TENSORS for path in dcp.planner_data.values()):
            raise Unsupported(f"{located.folder}: {_PIPELINE}")
        strange = [fqn for fqn, path in dcp.planner_data.items() if not _is_known(path, fqn in dcp.tensors)]
        if strange:
            raise Unsupported(
                f"{located.folder}: {len(strange)} items of the model or the optimizer are not known, such as {strange[0]}\n"
                "Save it with --ckpt-format torch_dist, or use a later mcore_rlhf."
            )
        groups = nest.pop("optimizer", {}).get(_GROUPS, {})
        rng = {_pair(key): value for key, value in nest.pop("rng_state", {}).items()}
        if groups:
            nest["optimizer"] = {
                "param_groups": [one for one, _ in distinct(groups)],
                "param_state_sharding_type": FSDP_DTENSOR,
            }
        if Arguments(stored_arguments(nest)).integer("pipeline_model_parallel_size", 1) != 1:
            raise Unsupported(f"{located.folder}: {_PIPELINE}")
        return cls(located, f"{located.folder.name}: args", nest, dcp, rng=rng)

    def value(self, item: DcpObject) -> object:
        """An object's value: it is in no list here."""
        return item.load()


@dataclass(frozen=True, slots=True)
class Loaded(DcpObject):
    """An object that was put together of several.

    Args:
        content: It.
    """

    content: object = None

    def load(self) -> Any:
        """See :meth:`.DcpObject.load`."""
        return [self.content]

    def data(self) -> bytes:
        """See :meth:`.DcpObject.data`."""
        return saved([self.content], self.fqn)


_PIPELINE = (
    "is of Megatron-FSDP with several pipeline stages or model chunks, whose layers go by the same names\n"
    "Save it with --ckpt-format torch_dist, or without pipeline parallelism."
)


def _is_known(path: Path_, is_tensor: bool) -> bool:
    """Whether an item is one that is read: nobody else would say that it is not."""
    match path:
        case ("model", str()):
            return is_tensor
        case ("optimizer", "state", str(), state):
            return is_tensor or state == "step"  # which the groups count as well
        case ("optimizer", "param_to_group_meta", *_):
            return True
    return path[0] not in (_TENSORS, "optimizer")


def require_items(dcp: DcpFolder) -> None:
    """Every path is an item's, and every item has one, where there are paths at all.

    Raises:
        Incomplete: One is not, or has none.
    """
    items = dcp.tensors.keys() | dcp.objects.keys()
    gone, unsaid = dcp.planner_data.keys() - items, items - dcp.planner_data.keys() if dcp.planner_data else set[str]()
    for name, text in ((gone, "has a path for {}, and no such item"), (unsaid, "has no path for {}")):
        if name:
            raise Incomplete(f"{dcp.folder}: .metadata {text.format(min(name))}\nCopy the folder again.")


def item_value(dcp: DcpFolder, fqn: str) -> object:
    """An object, or a small tensor: random states.

    Args:
        dcp: The folder.
        fqn: The item.
    """
    if fqn in dcp.objects:
        return dcp.objects[fqn].load()
    tensor = dcp.tensors[fqn]
    (box,) = tensor.boxes  # of a rank's own tensor
    return DcpObject(fqn, dcp.metadata.places[fqn, box.offset], dcp).load()


def put(nest: dict[str, Any], path: Path_, value: object) -> None:
    """Place a value in a nest of dictionaries and lists.

    Args:
        nest: The nest.
        path: Where.
        value: The value.
    """
    at: Any = nest
    for step, following in pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(step, int):
            at += [empty] * (step + 1 - len(at))
            at = at[step]
        else:
            at = at.setdefault(step, empty)
    if isinstance(path[-1], int):
        at += [None] * (path[-1] + 1 - len(at))
    at[path[-1]] = value


def _pair(key: str) -> tuple[int, int]:
    """``(0, 1)``: stage and tensor-parallel rank."""
    try:
        pp_rank, tp_rank = map(int, key.strip("()").split(","))
    except ValueError:
        raise Unsupported(f"rng_state: expected a stage and a tensor-parallel rank, found {key!r}") from None
    return pp_rank, tp_rank

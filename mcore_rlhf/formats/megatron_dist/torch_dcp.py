"""Checkpoints of Megatron with torch's FSDP2 (``--use-torch-fsdp2 --ckpt-format torch_dcp``), seen as a ``torch_dist`` folder.

They are what the ``torch`` format's file has (the model under Megatron's names, a plain optimizer whose parameters are numbered, its
masters in a list for every param group), saved by torch's DCP item by item: no ``common.pt``, no ``metadata.json``, layers one by one.
``.metadata`` lists the model's parameters in registration order, from which their numbers in the optimizer follow.

Sources: megatron-core 0.19.2, ``training/checkpointing.py`` (``generate_state_dict``, ``save_checkpoint``), ``training/arguments.py``
(TP and PP are 1), ``core/optimizer/optimizer.py`` (``Float16OptimizerWithFloat16Params.state_dict``); torch 2.13.0,
``distributed/checkpoint/_nested_dict.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rlhf.core.catalog import FLOAT32, MASTER, PARAM
from mcore_rlhf.core.facts import same
from mcore_rlhf.errors import Incomplete, Lossy, Unsupported
from mcore_rlhf.families.megatron.arguments import Arguments, stored_arguments
from mcore_rlhf.families.megatron.dealing import Dealing
from mcore_rlhf.families.megatron.folders import FoundIteration
from mcore_rlhf.families.megatron.groups import LocalParam, Membership, members
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.models.megatron import is_buffer
from mcore_rlhf.storage.dcp.folder import DcpFolder, DcpObject, DcpTensor

from .folders import DistFolder, ShardKey, without_wrapper
from .fsdp import Loaded, item_value, put, require_items

_MODEL, _OPTIMIZER, _MASTERS, _STEP = "model", "optimizer", "fp32_from_fp16_params", "step"
_LEFT = "Convert the weights alone with --no-optimizer, or save it once with --ckpt-format torch_dist."


@dataclass(slots=True)
class TorchDcpFolder(DistFolder):
    """Such a folder, opened.

    Args:
        options: Whether the optimizer is wanted, and which parameters it does not train.
    """

    options: ReadOptions = field(default_factory=ReadOptions)

    def __post_init__(self) -> None:
        """The tensors by state and name; everything else was read with :attr:`top`."""
        numbered: dict[str, dict[str, DcpTensor]] = {}
        masters: dict[tuple[int, int], DcpTensor] = {}
        for fqn, path in self.dcp.planner_data.items():
            tensor = self.dcp.tensors.get(fqn)
            match path:
                case ("model", str(name)) if tensor is not None:
                    self.tensors.setdefault(PARAM, {})[without_wrapper(name)] = tensor
                case ("model", str(name)):
                    self.objects[ShardKey(without_wrapper(name), (0,), (1,))] = self.dcp.objects[fqn]
                case ("optimizer", "optimizer", "state", number, str(state)) if (
                    tensor is not None and tensor.global_shape
                ):
                    numbered.setdefault(str(number), {})[state] = tensor
                case ("optimizer", "state", number, str(state)) if tensor is not None and tensor.global_shape:
                    numbered.setdefault(str(number), {})[state] = tensor
                case ("optimizer", "fp32_from_fp16_params", int(group), int(number)) if tensor is not None:
                    masters[group, number] = tensor
        self._place_rng()
        if numbered and self.options.optimizer:
            self._place_states(numbered, masters)

    @classmethod
    def open(cls, located: FoundIteration, options: ReadOptions) -> TorchDcpFolder:
        """Open a folder.

        Raises:
            CheckpointError: It is incomplete, damaged, or asks for code.
            Unsupported: It has items of which it is not known what they are.
        """
        dcp = DcpFolder.open(located.folder, located.root, options.stubs)
        require_items(dcp)
        strange = [fqn for fqn, path in dcp.planner_data.items() if not _is_known(path, fqn in dcp.tensors)]
        if strange or not dcp.planner_data:
            some = strange[0] if strange else "all of them, since .metadata does not say by which path they lie"
            raise Unsupported(
                f"{located.folder}: a checkpoint of Megatron's by --ckpt-format torch_dcp; {len(strange)} items of its model or optimizer "
                f"are not known, such as {some}\nSave it with --ckpt-format torch_dist, or use a later mcore_rlhf."
            )
        nest: dict[str, Any] = {}
        steps: list[object] = []
        for fqn, path in dcp.planner_data.items():
            if path[-1] == _STEP and "state" in path:
                steps.append(item_value(dcp, fqn))
            elif not _is_placed(path):
                put(nest, path, item_value(dcp, fqn))
        if options.optimizer and any(not same(step, steps[0]) for step in steps):
            raise Lossy(
                f"{located.folder}: parameters have taken different numbers of steps, which no other layout can hold\n{_LEFT}"
            )
        if steps:
            _inner(nest)["state"] = {"common_step": steps[0]}
        return cls(located, f"{located.folder.name}: args", nest, dcp, options=options)

    def value(self, item: DcpObject) -> object:
        """An object's value: it is in no list here."""
        return item.load()

    def _place_rng(self) -> None:
        """The random states of the rank that stored them, as ``torch_dist`` has them."""
        stored = self.top.get("rng_state")
        if isinstance(stored, list):
            place = next(iter(self.dcp.metadata.places.values()))
            self.objects[ShardKey("rng_state", (0, 0), (1, 1))] = Loaded("rng_state", place, self.dcp, stored)

    def _place_states(
        self, numbered: Mapping[str, Mapping[str, DcpTensor]], masters: Mapping[tuple[int, int], DcpTensor]
    ) -> None:
        """Whose states the numbered ones are: a param group's parameters are numbered in registration order, one group after the other.

        Raises:
            Unsupported: Numbers and parameters do not fit together.
            Incomplete: Masters are missing.
        """
        stored = _inner(self.top).get("param_groups", [])
        for number, (inside, group) in enumerate(zip(self._dealt(stored), stored, strict=True)):
            numbers = group.get("params", [])
            shapes = [next(iter(numbered.get(str(at), {}).values()), None) for at in numbers]
            if len(numbers) != len(inside) or any(
                tensor is not None and tensor.global_shape != param.shape
                for tensor, param in zip(shapes, inside, strict=True)
            ):
                raise Unsupported(
                    f"{self.located.folder}: param group {number} has {len(numbers)} parameters, and names and shapes make "
                    f"{len(inside)}, or others: some may be frozen, or in another group\n"
                    f"Mark those that were frozen with 'trainable: false' in --rules. {_LEFT}"
                )
            half = [param for param in inside if param.dtype != FLOAT32]
            copies = [masters.get((number, at)) for at in range(len(half))]
            for param, at in zip(inside, numbers, strict=True):
                for state, tensor in numbered.get(str(at), {}).items():
                    self.tensors.setdefault(state, {})[param.name] = tensor
            for param, master in zip(half, copies, strict=True):
                if master is None or master.global_shape != param.shape:
                    found = "is missing" if master is None else f"has shape {master.global_shape}, not {param.shape}"
                    raise Incomplete(f"{self.located.folder}: {_MASTERS} of {param.name} {found}\n{_LEFT}")
                self.tensors.setdefault(MASTER, {})[param.name] = master

    def _dealt(self, stored: Sequence[Mapping[str, object]]) -> list[list[LocalParam]]:
        """The parameters of every param group, in registration order."""
        args, rules = Arguments(stored_arguments(self.top)), self.options.rules
        parallel = args.parallel()
        chained = members(args, parallel)
        if len(chained) > 1:
            raise Unsupported(f"{self.located.folder}: several chained optimizers by --ckpt-format torch_dcp\n{_LEFT}")
        groups = [ParamGroup({k: v for k, v in group.items() if k != "params"}) for group in stored]
        params = [
            LocalParam(name, 0, tensor.global_shape, tensor.dtype, shared_embedding=False)
            for name, tensor in self.model.items()
            if not is_buffer(name) and rules.trainable(name) is not False
        ]
        return Dealing(chained, [groups], Membership(args, rules), args.experts_apart(parallel)).whole(params)[0]


def _inner(nest: dict[str, Any] | Mapping[str, Any]) -> dict[str, Any]:
    """The dictionary with ``param_groups``: mixed precision nests it once more than fp32."""
    optimizer: dict[str, Any] = nest.get(_OPTIMIZER, {})
    inner: dict[str, Any] = optimizer.get(_OPTIMIZER, optimizer)
    return inner


def _paths(path: tuple[object, ...]) -> Iterator[object]:
    """The path below the optimizer, without the nest of mixed precision."""
    below = path[1:]
    yield from below[1:] if below[:1] == (_OPTIMIZER,) else below


def _is_placed(path: tuple[object, ...]) -> bool:
    """Whether an item is a tensor, or an opaque value, that the folder finds by its path."""
    below = tuple(_paths(path))
    return path[0] == _MODEL or (path[0] == _OPTIMIZER and below[:1] in (("state",), (_MASTERS,)))


def _is_known(path: tuple[object, ...], is_tensor: bool) -> bool:
    """Whether an item is one that is read: nobody else would say that it is not."""
    below = tuple(_paths(path))
    match path[0], below:
        case ("model", _):
            return len(path) == 2
        case ("optimizer", ("state", _, state)):
            return is_tensor or state == _STEP
        case ("optimizer", ("fp32_from_fp16_params", int(), int())):
            return is_tensor
        case ("optimizer", (part, *_)):
            return part in ("param_groups", "grad_scaler")
    return not str(path[0]).startswith(_MODEL) and path[0] != _OPTIMIZER

"""The parameters of a ``torch_dist`` checkpoint: which keys hold each, whole shapes, and how it is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import FLOATING, Shape
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Problems
from mcore_rlhf.families.megatron.arguments import Arguments, is_gated
from mcore_rlhf.families.megatron.state import UNKNOWN
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.tensor import block_sizes
from mcore_rlhf.models.megatron import EMBEDDING, Traits, is_buffer, is_routed_expert, layer_of, partition_of
from mcore_rlhf.models.spec import COLUMN, REPLICATED, ParamSpec, Partition, Rules
from mcore_rlhf.storage.dcp.folder import DcpTensor

from .names import Home, KeySpelling, names_in

_ADVICE = "Say how such parameters are cut with --rules rules.yaml (pattern → replicated, column, row, …)."


@dataclass(slots=True)
class Parameters:
    """The model's tensors under the names of its parameters.

    Args:
        tensors: By key.
        spelling: Which names the keys stand for.
    """

    tensors: Mapping[str, DcpTensor]
    spelling: KeySpelling
    homes: dict[str, tuple[Home, ...]] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, tensor in self.tensors.items():
            for name, home in names_in(key, tensor.global_shape, self.spelling):
                self.homes[name] = tuple(sorted((*self.homes.get(name, ()), home), key=lambda h: h.part or 0))
                self.axes[key] = len(home.index)

    def shape(self, name: str) -> Shape:
        """The whole shape of a parameter."""
        home, *more = self.homes[name]
        shape = home.turned(self.tensors[home.key].global_shape[len(home.index) :])
        return (shape[0] + sum(map(self.rows, more)), *shape[1:]) if more else shape

    def rows(self, part: Home) -> int:
        """Rows of a part of a parameter."""
        return self.tensors[part.key].global_shape[len(part.index)]

    def local_shape(self, name: str) -> Shape:
        """The shape of the first stored part of a parameter."""
        home = self.homes[name][0]
        boxes = self.tensors[home.key].boxes
        return home.turned(boxes[0].shape[len(home.index) :]) if boxes else self.shape(name)

    def num_layers(self) -> int:
        """Decoder layers."""
        layers = (layer_of(name) for name in self.homes if name.startswith("decoder.layers."))
        return max((layer + 1 for layer in layers if layer is not None), default=0)


@dataclass(slots=True)
class SpecFinder:
    """Builds the ParamSpec of every parameter: the user's rules, then the table, then how the files cut it.

    Args:
        parameters: Of the checkpoint.
        args: The run's arguments.
        parallel: The run's degrees.
        rules: The user's own rules.
        notes: Told what was found out from the files.
        unknown: Collects parameters about which nothing is known, because one rank held each whole.
    """

    parameters: Parameters
    args: Arguments
    parallel: ParallelConfig
    rules: Rules
    notes: Report
    unknown: list[str]

    def specs(self, names: Sequence[str]) -> list[ParamSpec]:
        """The specs of all parameters, in the given order.

        Raises:
            LayoutMismatch: Parameters need a rule, or shapes contradict the arguments; all problems together.
        """
        problems, specs = Problems(), []
        shapes = {name: self.parameters.shape(name) for name in names}
        traits = Traits(is_gated(shapes, self.args), self.args.transformer_engine, self.args.values)
        words = shapes.get(EMBEDDING, (None,))[0]
        for name in names:
            try:
                specs.append(self._spec(name, shapes[name], traits, words))
            except CheckpointError as error:
                problems.add_error(error)
        problems.raise_if_any()
        return specs

    def _spec(self, name: str, shape: Shape, traits: Traits, words: int | None) -> ParamSpec:
        partition = self.rules.partition(name) or self._known(name, shape, traits, words)
        if partition is None:
            partition = self._as_stored(name, shape)
        if partition.dim is not None and partition.dim >= len(shape):
            raise LayoutMismatch(f"{name}: {partition} does not fit its shape {shape}\n{_ADVICE}")
        if partition.parts:
            self._check_parts(name, shape, partition)
        dtype = self.parameters.tensors[self.parameters.homes[name][0].key].dtype
        said = self.rules.trainable(name)
        trainable = (dtype in FLOATING and not is_buffer(name)) if said is None else said
        return ParamSpec(name, shape, dtype, partition, trainable)

    def _check_parts(self, name: str, shape: Shape, partition: Partition) -> None:
        """The blocks of a parameter must be there, as large as the arguments make them."""
        try:
            block_sizes(partition, shape[0])
        except LayoutMismatch as error:
            stored = self.parameters
            found = ", ".join(f"{home.key} {stored.rows(home)}" for home in stored.homes[name])
            raise LayoutMismatch(f"{name}: {error}; found {found}") from None

    def _known(self, name: str, shape: Shape, traits: Traits, words: int | None) -> Partition | None:
        partition = partition_of(name, traits)
        if partition is None:
            return None
        if partition.vocabulary and name != EMBEDDING and words is not None and shape[0] != words:
            return REPLICATED if shape[0] == 1 else None  # a value head takes the place of the output layer
        if "_down_proj." in name and self.parallel.tp > 1:  # Transformer Engine's are whole on every rank
            return REPLICATED if self.parameters.local_shape(name) == shape else COLUMN
        return partition

    def _as_stored(self, name: str, shape: Shape) -> Partition:
        """How the files cut a parameter that nobody knows: each rank stored its part as one chunk."""
        degree = self.parallel.etp if is_routed_expert(name) else self.parallel.tp
        local = self.parameters.local_shape(name)
        cut = [dim for dim, (whole, part) in enumerate(zip(shape, local, strict=True)) if whole != part]
        if degree == 1:
            if shape and prod(shape) > 1:  # a single number cannot be cut
                self.unknown.append(name)
            return REPLICATED
        if not cut:
            self.notes.through([UNKNOWN], {"name": name, "how": "replicated, since one rank stored it whole"})
            return REPLICATED
        blocks, rest = divmod(shape[cut[0]] // max(local[cut[0]], 1), degree)
        if len(cut) > 1 or rest or not blocks:
            raise LayoutMismatch(f"{name}: unknown parameter of shape {shape}, stored in parts {local}\n{_ADVICE}")
        self.notes.through([UNKNOWN], {"name": name, "how": f"cut in dim {cut[0]}, as it is stored"})
        return Partition(cut[0], blocks)

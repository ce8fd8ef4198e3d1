"""Finding an adapter in a checkpoint: which of its tensors peft would save, and what else it says of the adapter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mcore_rlhf.core.facts import Fate, Item, Kind, Rule
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.families.selection import renamed
from mcore_rlhf.families.source import Source

from .config import AdapterConfig, given_config, read_adapter_config
from .names import (
    BASE_LAYER,
    CONFIG,
    LORA_A,
    PREFIX,
    SAVED_MODULE,
    AdapterTensor,
    in_base,
    in_file,
    in_memory,
    without_prefix,
)

CARRIED = "mcore_rlhf_adapter"
"""The key of client state under which an adapter's configuration and base travel through formats that have no place for them."""

_EMBEDDING_A = ".lora_embedding_A."
_HEAD = "lm_head"
_SAVED = re.compile(rf"(?:^|\.)(?:embed_tokens|{_HEAD})\.{BASE_LAYER}\.")
"""What alone of the base peft saves with an adapter, where it is adapted."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter in a checkpoint.

    Args:
        tensors: Those that peft would save; ``memory`` is the checkpoint's own name.
        ranks: The rank of every adapted module, by the base model's name for it.
    """

    tensors: tuple[AdapterTensor, ...]
    ranks: Mapping[str, int]

    @property
    def saved_modules(self) -> tuple[str, ...]:
        """Modules that are saved whole."""
        return tuple(dict.fromkeys(tensor.module for tensor in self.tensors if tensor.kind == SAVED_MODULE))


def adapter_in(source: Source, bias: str = "none") -> Adapter:
    """The adapter in a source under a module's names.

    Args:
        source: An opened checkpoint: of an adapter alone, or of a model that has one.
        bias: What the configuration says of biases: ``none``, ``all`` or ``lora_only``.

    Raises:
        Unsupported: It has none.
        UsageError: It has several, under names or wrappers of their own.
    """
    own = [tensor for spec in source.model.params if (tensor := in_memory(spec.name)) is not None]
    if not own:
        raise Unsupported(
            f"{source.root}: no tensor of this {source.format} checkpoint belongs to an adapter (….lora_A.default.weight): it is a "
            "whole model\nA model that was merged is converted --to hf; a LoRA's checkpoint must hold its own names."
        )
    _refuse_several(source, own)
    tensors = [*own, *_of_base(source, own, bias)]
    return Adapter(tuple(tensors), dict(_ranks(source, own)))


_WITHOUT_BASE: Rule[int] = Rule(
    Fate.CHANGED, "{found} tensors of the base model are left out, which an adapter's folder does not have", int,
    [Item(Kind.TENSOR), Item(Kind.MODEL)],
)  # fmt: skip


def adapter_alone(source: Source, reference: str | None) -> Source:
    """The adapter of a source and nothing of its base, under the names that peft gives it in memory.

    Args:
        source: See :func:`adapter_in`.
        reference: ``--reference-config``, which may say that biases belong to the adapter.

    Raises:
        CheckpointError: See :func:`adapter_in`.
    """
    found = adapter_in(source, known_config(source, reference).bias)
    names = {tensor.memory: in_file(tensor.file, found.saved_modules).memory for tensor in found.tensors}
    part = renamed(source, names.get)
    part.notes.through([_WITHOUT_BASE], len(source.model.params) - len(part.model.params))
    return part


def _ranks(source: Source, tensors: list[AdapterTensor]) -> Iterator[tuple[str, int]]:
    for tensor in tensors:
        spec = source.model.get(tensor.memory)
        if tensor.kind == LORA_A and spec is not None:
            yield tensor.module, spec.global_shape[0]


def _of_base(source: Source, own: list[AdapterTensor], bias: str) -> Iterator[AdapterTensor]:
    """What peft saves of the base: trained biases, and embeddings that are adapted, the output's as well.

    Source: peft 0.21.2, ``utils/save_and_load.py`` (``get_peft_model_state_dict``), ``utils/constants.py`` (``EMBEDDING_LAYER_NAMES``).
    """
    adapted = {tensor.module for tensor in own if tensor.kind == LORA_A}
    embeddings = {tensor.module for tensor in own if _EMBEDDING_A in tensor.memory}
    embeddings |= {module for module in adapted if module.rpartition(".")[2] == _HEAD}
    alone = _is_alone(source, adapted - embeddings)
    for spec in source.model.params:
        if in_memory(spec.name) is not None:
            continue
        base = without_prefix(spec.name)
        module, _, last = base.rpartition(".")
        layer = module.removesuffix(f".{BASE_LAYER}")
        wanted = (
            layer in embeddings and layer != module
            if last != "bias"
            else bias == "all" or (bias == "lora_only" and layer in adapted)
        )
        if (
            wanted or alone
        ):  # a head tied to an embedding that is saved whole, where peft is to ensure it (``ensure_weight_tying``)
            yield AdapterTensor(PREFIX + base, spec.name, "base", layer)


def _is_alone(source: Source, adapted: set[str]) -> bool:
    """Whether there is no base: none of what is adapted, embeddings aside, has its own weight there."""
    others = [without_prefix(spec.name) for spec in source.model.params if in_memory(spec.name) is None]
    weights = {f"{module}.weight" for module in adapted}
    return bool(weights) and not any(
        in_base(name) in weights or (f".{BASE_LAYER}." in name and _SAVED.search(name) is None) for name in others
    )


def _refuse_several(source: Source, tensors: list[AdapterTensor]) -> None:
    names = sorted({tensor.adapter for tensor in tensors})
    if len(names) > 1:
        raise UsageError(
            f"{source.root}: has {len(names)} adapters: {', '.join(names)}\nName one: --only '*.{names[0]}*' takes {names[0]} alone."
        )
    files: dict[str, str] = {}
    for tensor in tensors:
        other = files.setdefault(tensor.file, tensor.memory)
        if other != tensor.memory:
            raise UsageError(
                f"{source.root}: {other} and {tensor.memory} are {tensor.file} both: there are several models with adapters\n"
                "Name one with --only, such as --only policy."
            )


def carried(source: Source) -> Mapping[str, object]:
    """What a source says of its adapter besides tensors: ``config``, ``base``."""
    found = source.state.other.get(CARRIED)
    return found if isinstance(found, Mapping) else {}


def known_config(source: Source, reference: str | None) -> AdapterConfig:
    """What is known of a source's adapter besides its tensors: given by the user, or carried by the source; may be nothing.

    Args:
        source: An opened checkpoint.
        reference: ``--reference-config``.

    Raises:
        CheckpointError: It cannot be understood.
    """
    stored, given = carried(source).get("config"), given_config(reference)
    beside = None if source.carried is None else source.carried.files.get(CONFIG)
    if (
        given is None and not isinstance(stored, dict) and beside is not None
    ):  # beside the tag that a Trainer's DeepSpeed wrote
        return read_adapter_config(beside)
    return given or AdapterConfig.checked(stored if isinstance(stored, dict) else {}, str(source.root))

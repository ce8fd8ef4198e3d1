"""What a tensor of an adapter is called in peft's file, and in the memory of a model that has it: one table, read both ways.

Source: peft 0.21.2, ``utils/save_and_load.py`` (``get_peft_model_state_dict``), ``tuners/tuners_utils.py``
(``_remove_adapter_name_from_state_dict_key``), ``tuners/lora/model.py``, ``utils/other.py`` (``ModulesToSaveWrapper``).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from mcore_rlhf.models.spec import ModelSpec

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
BIN = "adapter_model.bin"
WEIGHTS = (SAFETENSORS, BIN)
"""The first that is there counts, as for peft."""

DEFAULT = "default"
"""What an adapter is called in memory unless it is told otherwise."""
PREFIX = "base_model.model."
"""What wraps the base model: ``PeftModel.base_model`` is a ``LoraModel``, whose ``model`` is the base."""
BASE_LAYER = "base_layer"

LORA_A, LORA_B = "lora_A", "lora_B"
SAVED_MODULE = "modules_to_save"
_ORIGINAL = ".original_module."
_WRAPPED = re.compile(rf"(?:\.{BASE_LAYER})+\.")
BRIDGE_ADAPTER = re.compile(
    r"(?P<linear>.+)\.adapter\.(?:adapter_(?P<part>[a-z]+)\.)?linear_(?P<side>in|out)\.(?P<kind>weight|bias)"
)
"""Megatron-Bridge's name of an adapter's matrix; see :mod:`.bridge`."""

_ROWS = (
    ("{module}.lora_A.{part}", "{module}.lora_A.{adapter}.{part}", LORA_A),
    ("{module}.lora_B.{part}", "{module}.lora_B.{adapter}.{part}", LORA_B),
    ("{module}.lora_embedding_A", "{module}.lora_embedding_A.{adapter}", LORA_A),
    ("{module}.lora_embedding_B", "{module}.lora_embedding_B.{adapter}", LORA_B),
    ("{module}.lora_magnitude_vector", "{module}.lora_magnitude_vector.{adapter}.weight", "magnitude"),
    ("{module}.token_adapter.trainable_tokens_delta", "{module}.token_adapter.trainable_tokens_delta.{adapter}", "tokens"),
    ("{module}.{part}", "{module}.modules_to_save.{adapter}.{part}", SAVED_MODULE),
)  # fmt: skip
"""In the file, in memory, kind. The last one has no mark in the file: the configuration lists these modules."""
_GROUPS = {"module": r"(?P<module>.+?)", "part": r"(?P<part>.+)", "adapter": r"(?P<adapter>[^.]+)"}


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", lambda found: _GROUPS[found.group(1)], re.escape(template)))


_IN_FILE = tuple((_pattern(file), memory, kind) for file, memory, kind in _ROWS)
_IN_MEMORY = tuple((_pattern(memory), file, kind) for file, memory, kind in _ROWS)
OF_ADAPTER = re.compile("|".join(re.sub(r"\?P<\w+>", "?:", pattern.pattern) for pattern, _, _ in _IN_MEMORY))
"""Any name in memory that :func:`in_memory` knows."""


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """A tensor that belongs to an adapter.

    Args:
        file: Its name in peft's file.
        memory: Its name in the model.
        kind: :data:`LORA_A`, :data:`LORA_B`, :data:`SAVED_MODULE`, …
        module: The module that it changes, as the base model calls it; empty for a bias of the base itself.
        adapter: The adapter's name in memory; empty where it has none.
    """

    file: str
    memory: str
    kind: str
    module: str
    adapter: str = ""


def in_memory(memory: str) -> AdapterTensor | None:
    """The tensor of an adapter that has this name in a model; None where it is the base's own.

    What is in front of ``base_model.model.`` are wrappers (``module.``), which peft's file does not have; a model whose adapter was
    injected without ``PeftModel`` has no such prefix, and peft's file does.
    """
    for pattern, template, kind in _IN_MEMORY:
        match = pattern.fullmatch(memory)
        if match is not None:
            parts = match.groupdict()
            file = PREFIX + without_prefix(template.format(**parts))
            return AdapterTensor(file, memory, kind, without_prefix(parts["module"]), parts["adapter"])
    return None


def of_file(file: str) -> bool:
    """Whether a name is one of peft's file that no other tensor has."""
    return any(pattern.fullmatch(file) for pattern, _, _ in _IN_FILE[:-1]) and in_memory(file) is None


def in_file(file: str, saved_modules: Collection[str]) -> AdapterTensor:
    """The tensor that has this name in a file of peft's.

    Args:
        file: Its name there.
        saved_modules: ``modules_to_save`` of the configuration: the ends of modules' names.
    """
    for pattern, template, kind in _IN_FILE[:-1]:
        match = pattern.fullmatch(file)
        if match is not None:
            memory = template.format(**match.groupdict(), adapter=DEFAULT)
            return AdapterTensor(file, memory, kind, without_prefix(match["module"]), DEFAULT)
    module = _saved_module(file, saved_modules)
    if module is None:  # a bias, or the base layer of an adapted embedding
        return AdapterTensor(file, file, "base", "")
    memory = _ROWS[-1][1].format(module=module, adapter=DEFAULT, part=file[len(module) + 1 :])
    return AdapterTensor(file, memory, SAVED_MODULE, without_prefix(module), DEFAULT)


def _saved_module(file: str, saved_modules: Collection[str]) -> str | None:
    """The part of a name that is a module of ``modules_to_save``: ``norm`` stands for ``post_attention_layernorm``, too.

    Source: peft 0.21.2, ``utils/other.py`` (``_set_trainable``: ``key.endswith(target_key)``).
    """
    parts = without_prefix(file).split(".")
    prefix = file.removesuffix(".".join(parts))
    for count in range(1, len(parts)):
        module = ".".join(parts[:count])
        if any(name and module.endswith(name) for name in saved_modules):
            return prefix + module
    return None


def without_prefix(name: str) -> str:
    """A name as the base model has it: without peft's wrapper, and what wraps that."""
    return name.rpartition(PREFIX)[2]


def in_base(memory: str) -> str | None:
    """What the base model calls a tensor that is no adapter's; None for the original of a module that is saved whole."""
    if _ORIGINAL in memory:
        return None
    return _WRAPPED.sub(".", without_prefix(memory))


def in_original(memory: str) -> str:
    """What the base model calls a tensor that is no adapter's, the originals of modules that are saved whole included."""
    return _WRAPPED.sub(".", without_prefix(memory).replace(_ORIGINAL, "."))


def adapters_alone(model: ModelSpec) -> ModelSpec | None:
    """A model of Megatron's with Megatron-Bridge's adapters, of which alone the optimizer has states; None where it has none.

    The base is frozen, and flat buffers do not say so. Source: NVIDIA-NeMo/Megatron-Bridge, ``src/megatron/bridge/peft/base.py``
    (``freeze_model``).

    Args:
        model: All of it.
    """
    adapters = {spec.name for spec in model.params if BRIDGE_ADAPTER.fullmatch(spec.name)}
    if not adapters or len(adapters) == len(model.params):
        return None
    return model.having(replace(s, trainable=s.trainable and s.name in adapters) for s in model.params)

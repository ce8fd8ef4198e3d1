"""A LoRA in rank files: what the folder says of it besides tensors, and which parameters are its where its base is not saved.

Source: verl 0.9.1, ``verl/utils/checkpoint/fsdp_checkpoint_manager.py`` (``_save_lora_train_meta``, ``save_lora_only``),
``verl/model_merger/base_model_merger.py`` (``_load_lora_train_meta``: without the file the adapter is given a ``lora_alpha`` of 0); 0.7.0,
``verl/workers/fsdp_workers.py`` (``save_checkpoint``: ``lora_adapter``, as peft has it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mcore_rlhf.errors import Corrupt
from mcore_rlhf.families.fsdp.groups import PARAMS
from mcore_rlhf.families.inventory import Unplaced
from mcore_rlhf.families.lora.names import CONFIG, OF_ADAPTER
from mcore_rlhf.families.lora.parts import CARRIED, carried
from mcore_rlhf.families.source import Source
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath

META = "lora_train_meta.json"
_SAYS = (META, f"lora_adapter/{CONFIG}")
_AGAIN = "Copy the file again from where it was written; without it, --reference-config says the adapter's lora_alpha."
_FIELDS = {"r": int, "lora_alpha": int, "task_type": str}


def saying(root: ReadablePath) -> list[str]:
    """The files of a role's folder that say something of its adapter, relative to it.

    Args:
        root: The folder.
    """
    return [name for name in _SAYS if (root / name).is_file()]


def said_of(root: ReadablePath, unplaced: Unplaced) -> dict[str, object]:
    """What they say, as it travels in a source's state; empty where none does. verl's SFT writes an alpha of 0 where it does not know it.

    Args:
        root: The folder.
        unplaced: Told of what verl's own file says besides.

    Raises:
        Corrupt: One is damaged.
    """
    found: dict[str, object] = {}
    for name in saying(root):
        try:
            said = reading.read_json(root / name)
        except ValueError as error:
            raise Corrupt(f"{root / name}: is no JSON: {error}\n{_AGAIN}") from None
        if isinstance(said, dict):
            unplaced.look(name, said, dict.fromkeys(_FIELDS if name == META else said))
            found |= {key: value for key, value in said.items() if name != META or type(value) is _FIELDS.get(key)}
    return {CARRIED: {"config": found}} if found.get("lora_alpha") else {}


def texts_of(source: Source) -> dict[str, str]:
    """The file that verl has beside the files of a LoRA, by name; none where nothing says its alpha.

    Args:
        source: What is written.
    """
    config = carried(source).get("config")
    said = config if isinstance(config, Mapping) else {}
    wanted = {key: said[key] for key, kind in _FIELDS.items() if type(said.get(key)) is kind}
    return {META: json.dumps(wanted, indent=4)} if "lora_alpha" in wanted and is_alone(source, some=True) else {}


def is_alone(source: Source, *, some: bool = False) -> bool:
    """Whether all tensors of a source are an adapter's, or some of them.

    Args:
        source: An opened checkpoint.
        some: Whether one is enough.
    """
    return (any if some else all)(OF_ADAPTER.fullmatch(spec.name) for spec in source.model.params)


def numbers_in(model: Any, optimizer: Any, states: Mapping[object, object]) -> tuple[int, tuple[int, ...]] | None:
    """How many parameters the optimizer of an adapter without its base lists, and which of them have states.

    Args:
        model, optimizer: What a rank's files hold.
        states: The latter's, by number.

    Returns:
        Both; None where the base is there, or the optimizer's one group does not say it.
    """
    names = [str(name) for name in model] if isinstance(model, dict) else []
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    group = groups[0] if isinstance(groups, list) and len(groups) == 1 else None
    listed = group.get(PARAMS) if isinstance(group, dict) else None
    if not names or not all(map(OF_ADAPTER.fullmatch, names)) or not isinstance(listed, list):
        return None
    numbers = tuple(number for number in listed if number in states)
    return (len(listed), numbers) if listed == [*range(len(listed))] and len(numbers) == len(names) else None

"""What the frameworks declare: fields and defaults, read off the installed packages, for ``models/meaning/declared.json``.

``python -m tests.reference.declared --write`` brings the stored snapshot up to what is installed: of megatron-core the installed
version's part, while those of others stay. Arguments of Megatron-LM itself are read off a checkout where ``--megatron-lm DIR``
gives one.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import sys
import types
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from mcore_rlhf.models import meaning
from mcore_rlhf.models.huggingface import ARCHITECTURES, OF_TEXTS

STORED = Path(meaning.__file__).parent / "declared.json"
REGENERATE = "python -m tests.reference.declared --write"


def megatron_core() -> dict[str, Any]:
    """``TransformerConfig`` and ``MLATransformerConfig``."""
    from mcore_rlhf.demo.cpu_megatron import import_megatron

    import_megatron()
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    classes = {kind.__name__: fields_of(kind) for kind in (TransformerConfig, MLATransformerConfig)}
    return {installed_megatron(): classes}


def installed_megatron() -> str:
    """The version that is imported, without the commit of the checkout that it is run in, which it takes for its own."""
    from megatron.core import package_info

    return str(package_info.__version__).partition("+")[0]


def transformers() -> dict[str, Any]:
    """The configuration class of every architecture, and what all of them have."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    base = fields_of(PreTrainedConfig)
    classes: dict[str, Any] = {"PreTrainedConfig": {"fields": base}}
    for name in dict.fromkeys([*(known.model_type for known in ARCHITECTURES), *OF_TEXTS]):
        kind = CONFIG_MAPPING[name]
        own = {name: value for name, value in fields_of(kind).items() if name not in base or base[name] != value}
        rope = dict(kind().rope_parameters)  # with what the class adds to it when it is made
        classes[name] = {"fields": own, "rope_parameters": rope, "aliases": dict(kind.attribute_map)}
    return {"version": importlib.metadata.version("transformers"), "classes": classes}


def fields_of(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass and their defaults, as JSON has them."""
    found = {}
    for field in dataclasses.fields(kind):
        default = field.default
        if default is dataclasses.MISSING:
            default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        found[field.name] = plain(default)
    return found


def plain(value: Any) -> Any:
    """A default as JSON has it: enumerations and functions by name."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {key: plain(item) for key, item in value.items()} if isinstance(value, Mapping) else str(value)


def megatron_lm(checkout: Path) -> dict[str, Any]:
    """All arguments of Megatron-LM, from its own parser; nothing else of its training loop is run.

    Since 0.19 the package megatron-core has it: its folder is the checkout.
    """
    sys.path.insert(0, str(checkout))
    package = types.ModuleType("megatron.training")
    package.__path__ = [str(checkout / "megatron" / "training")]
    for name in ("get_args", "get_timers", "get_adlr_autoresume"):
        setattr(package, name, None)
    sys.modules["megatron.training"] = package
    from megatron.training.arguments import add_megatron_arguments  # type: ignore[import-not-found,unused-ignore]

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    defaults = {action.dest: plain(parser.get_default(action.dest)) for action in parser._actions}
    return {installed_megatron(): dict(sorted(defaults.items()))}


def main() -> None:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--show", action="store_true", help="print what is installed, as JSON")
    parser.add_argument("--megatron-lm", type=Path, metavar="DIR")
    options = parser.parse_args()
    old = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    arguments = megatron_lm(options.megatron_lm) if options.megatron_lm else {}
    installed = {"megatron-core": megatron_core(), "megatron-lm": arguments, "transformers": transformers()}
    new = {
        **installed, **{kind: {**old.get(kind, {}), **installed[kind]} for kind in ("megatron-core", "megatron-lm")}
    }  # fmt: skip
    if options.write:
        STORED.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    if options.show:
        print(json.dumps(installed))
        return
    print("the snapshot is that of the installed packages" if new == old else "the snapshot is another")


if __name__ == "__main__":
    main()

"""Save, resume, convert and prove the checkpoints of RLHF runs on Megatron-core, DeepSpeed and FSDP.

The public names stand in ``__init__.pyi``, each with its module; they are imported when first used, so that ``import mcore_rlhf``
costs nothing (SPEC 1 of Scientific Python).
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

__version__ = "0.2.0"

_LINE = re.compile(r"^from \.([\w.]+) import (\w+) as (\w+)$", re.MULTILINE)
_PLACES = {
    public: (module, name)
    for module, name, public in _LINE.findall(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
}
__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    try:
        return getattr(import_module(f".{module}", __name__), attribute)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from .installation import to_install

        needs = f"{__name__}.{name} needs torch, which is not installed here"
        raise ImportError(f"{needs}; install it with: {to_install('torch')}", name="torch") from error

"""``mcore_rlhf_adapter.json``: to which base model an adapter belongs, and when it was saved.

::

    {"version": 1, "iteration": 50, "base": {"path": "/models/base", "fingerprint": {"tensors": 291, …}}}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.errors import Corrupt, Unsupported, shown
from mcore_rlhf.families.lora.base_model import BaseModel
from mcore_rlhf.families.lora.names import ORIGIN
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import cannot_open

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """The content of the file.

    Args:
        iteration: When the adapter was saved.
        base: What it belongs to; None where nobody said.
    """

    iteration: int = 0
    base: BaseModel | None = None

    def text(self) -> str:
        """The file's content."""
        base = {} if self.base is None else {"base": self.base.as_json()}
        return json.dumps({"version": _VERSION, "iteration": self.iteration, **base}, indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Origin | None:
        """What stands beside an adapter; None where nothing does.

        Raises:
            Corrupt: It is no JSON.
            Unsupported: It is of another version.
        """
        path = folder / ORIGIN
        try:
            values = reading.read_json(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise cannot_open(error, path) from error
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"{path}: is no JSON: {error}") from None
        if (
            not isinstance(values, dict)
            or values.get("version") != _VERSION
            or type(values.get("iteration")) is not int
        ):
            raise Unsupported(f"{path}: expected version {_VERSION} and an iteration, found {shown(values, 80)}")
        base = values.get("base")
        return cls(values["iteration"], None if base is None else BaseModel.parse(base, str(path)))

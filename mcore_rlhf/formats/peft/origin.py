"""``mcore_rlhf_adapter.json``: to which base model an adapter belongs, and when it was saved.

::

    {"version": 1, "iteration": 50, "base": {"path": "/models/base", "fingerprint": {"tensors": 291, …}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.errors import Corrupt, LayoutMismatch, Unsupported, shown
from mcore_rlhf.formats.adapters.fingerprint import ModelFingerprint
from mcore_rlhf.storage import regular
from mcore_rlhf.storage.paths import cannot_open

from .names import ORIGIN

_VERSION = 1


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that an adapter was trained on.

    Args:
        path: Where it was, as the run was told; empty where nobody said.
        fingerprint: What it was; None where nobody looked.
    """

    path: str = ""
    fingerprint: ModelFingerprint | None = None

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        found = {} if self.fingerprint is None else {"fingerprint": self.fingerprint.as_json()}
        return {"path": self.path, **found}

    @classmethod
    def parse(cls, values: object, where: str) -> BaseModel:
        """Understand :meth:`as_json`.

        Raises:
            Unsupported: It is something else.
        """
        if not isinstance(values, Mapping) or not isinstance(values.get("path", ""), str):
            raise Unsupported(f"{where}: does not describe a base model: {values!r:.80}")
        found = values.get("fingerprint")
        fingerprint = None if found is None else ModelFingerprint.parse(found, where)
        return cls(str(values.get("path", "")), fingerprint)

    def check(self, found: ModelFingerprint, where: str) -> None:
        """Whether a model is this one.

        Args:
            found: What it is.
            where: The model, for the message.

        Raises:
            LayoutMismatch: It is another one.
        """
        if self.fingerprint is not None and found != self.fingerprint:
            raise LayoutMismatch(
                f"{where}: is not the model on which the adapter was trained{f' ({self.path})' if self.path else ''}:\n"
                f"  expected {self.fingerprint}\n  found    {found}\n"
                f"Give that model. If this one is known to be the right one, remove the fingerprint from the adapter's {ORIGIN}."
            )


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
            values = regular.read_json(path)
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

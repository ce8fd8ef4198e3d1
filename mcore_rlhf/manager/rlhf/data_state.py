"""The content of ``data/data.pt``: which kind of loader wrote it, its state, and the dataset's fingerprint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from ...errors import Corrupt, Incomplete, LayoutMismatch, Problems, Unsupported
from .fingerprint import Fingerprint

VERSION = 1
WHERE = "data/data.pt"

DataState: TypeAlias = "dict[str, Any]"
"""``{"version", "kind", "state", "fingerprint"}``, of plain values (and tensors, for other people's loaders)."""

_FIELDS = ("version", "kind", "state", "fingerprint")


def pack(kind: str, state: Mapping[str, Any], dataset: Fingerprint | None) -> DataState:
    """What is to be written.

    Args:
        kind: ``prompt_sampler`` or ``stateful``.
        state: The loader's own.
        dataset: Fingerprint of the dataset, where it is known.
    """
    mark = dataset.to_dict() if dataset is not None else None
    return {"version": VERSION, "kind": kind, "state": dict(state), "fingerprint": mark}


def unpack(saved: object, kind: str) -> tuple[dict[str, Any], Fingerprint | None]:
    """The loader's state and the dataset's fingerprint.

    Args:
        saved: What :func:`pack` made.
        kind: The kind of the loader that is to be restored.

    Raises:
        CheckpointError: It is not such a state, of another kind or of a newer version, or fields are missing or
            unknown; they are named.
    """
    if not isinstance(saved, Mapping):
        raise Corrupt(f"{WHERE}: expected a dictionary with {', '.join(_FIELDS)}, found {type(saved).__name__}")
    _check_version(saved.get("version"))
    check_fields(saved, _FIELDS, WHERE).raise_if_any()
    if saved["kind"] != kind:
        raise LayoutMismatch(
            f"{WHERE}: kind: expected {kind!r}, found {saved['kind']!r}\n"
            "Resume with the kind of loader that saved it (prompt_sampler: PromptSampler; stateful: Carried), "
            "or start the data anew by not loading this file."
        )
    if not isinstance(saved["state"], Mapping):
        raise Corrupt(f"{WHERE}: state: expected a dictionary, found {type(saved['state']).__name__}")
    return dict(saved["state"]), _fingerprint(saved["fingerprint"])


def _fingerprint(saved: object) -> Fingerprint | None:
    if saved is None:
        return None
    try:
        return Fingerprint.from_dict(saved)
    except ValueError as error:
        raise Corrupt(f"{WHERE}: fingerprint: {error}") from None


def _check_version(version: object) -> None:
    if version is None:
        raise Incomplete(
            f"{WHERE}: has no version; this is another program's state\n"
            "The bare state of a torchdata loader, as RLinf writes it, is loaded by Carried(loader)."
        )
    if type(version) is not int or not 1 <= version <= VERSION:
        raise Unsupported(
            f"{WHERE}: version {version!r} of the data state; this release reads up to {VERSION}\n"
            "Upgrade: pip install --upgrade mcore_rlhf"
        )


def check_fields(found: Mapping[Any, Any], expected: Collection[str], where: str) -> Problems:
    """The fields that are missing, and those that nobody here knows."""
    problems = Problems()
    unknown = sorted(str(name) for name in found if name not in expected)
    missing = [name for name in expected if name not in found]
    if unknown:
        advice = "A newer release may have written it: pip install --upgrade mcore_rlhf"
        problems.add(Unsupported, f"{where}: unknown fields: {', '.join(unknown)}", advice)
    if missing:
        advice = "Use an older step: this one's data state is not whole."
        problems.add(Incomplete, f"{where}: missing fields: {', '.join(missing)}", advice)
    return problems

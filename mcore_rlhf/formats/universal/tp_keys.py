"""What a universal file says beside its tensor, for a loader with tensor parallelism.

Source: DeepSpeed 0.19.8, ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``) and ``checkpoint/universal_checkpoint.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.module import ModuleState

from .files import CAT_DIM, N_SUB_PARAMS, VOCAB_TENSOR

_VOCABULARY = "vocabulary_parameter_patterns"
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_ROW = "parameter_with_row_parallelism_patterns"
_WITHOUT_CAT_DIM = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
_SUB_PARAMS = "parameter_with_sub_params"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"


@dataclass(frozen=True, slots=True)
class TensorParallelKeys:
    """Answers for each parameter which keys its files have besides ``param``.

    Args:
        info: ``universal_checkpoint_info`` of the run, or nothing where it was not tensor-parallel.
        known: Keys of a universal source, which are kept.
    """

    info: Mapping[str, Any]
    known: Mapping[str, Mapping[str, object]]

    @classmethod
    def of(cls, info: object, native: ModuleState) -> TensorParallelKeys:
        """From what a source carries."""
        return cls(info if isinstance(info, dict) else {}, native.keys)

    def of_param(self, name: str) -> dict[str, object]:
        """The keys of one parameter.

        Raises:
            LayoutMismatch: Two patterns of one kind match it.
            Unsupported: The layout of its shards is one that DeepSpeed cannot convert either.
        """
        if name in self.known:
            return dict(self.known[name])
        if (reason := self._match(name, _UNSUPPORTED)) is not None:
            raise Unsupported(f"{name}: universal_checkpoint_info says that it cannot be converted ({reason})")
        keys = self._layout(name)
        return keys | ({VOCAB_TENSOR: True} if self._match(name, _VOCABULARY) is not None else {})

    def vocabulary_rows(self, name: str) -> int | None:
        """Rows that are kept of a vocabulary that is padded for tensor parallelism, or None."""
        size = self.info.get("original_vocab_size")
        if isinstance(size, int) and self.of_param(name).get(VOCAB_TENSOR):
            return size
        return None

    def check(self, names: Sequence[str]) -> None:
        """Every pattern must be there for something.

        Raises:
            LayoutMismatch: Patterns match no parameter; all of them.
        """
        problems = Problems()
        for kind in (*_WITHOUT_CAT_DIM, _ROW, _VOCABULARY, _HALVES):
            for pattern in _patterns(self.info.get(kind)):
                if not any(re.match(pattern, name) for name in names):
                    problems.add(
                        LayoutMismatch,
                        f"universal_checkpoint_info: {kind}: {pattern!r} matches no parameter",
                        "The patterns are those of another model, or a parameter's file is missing.",
                    )
        problems.raise_if_any()

    def _layout(self, name: str) -> dict[str, object]:
        affine = self.info.get("affine_map")
        if isinstance(affine, dict) and _first(affine.get("params") or {}, name) is not None:
            return {}
        if any(self._match(name, kind) is not None for kind in _WITHOUT_CAT_DIM):
            return {}
        if self._match(name, _HALVES) is not None:
            return {CAT_DIM: 0, N_SUB_PARAMS: 2}
        sub_params = self.info.get(_SUB_PARAMS) or []
        if any(_first(entry.get("patterns", ()), name) is not None for entry in sub_params):
            raise Unsupported(
                f"{name}: is made of sub-parameters of different widths ({_SUB_PARAMS}), which is not written yet\n"
                "Convert it with DeepSpeed's own ds_to_universal; the result is read."
            )
        return {CAT_DIM: 1 if self._match(name, _ROW) is not None else 0}

    def _match(self, name: str, kind: str) -> str | None:
        matched = [pattern for pattern in _patterns(self.info.get(kind)) if re.match(pattern, name)]
        if len(matched) > 1:
            raise LayoutMismatch(
                f"universal_checkpoint_info: {kind}: {name} matches {' and '.join(map(repr, matched))}; at most one may match"
            )
        return matched[0] if matched else None


def _patterns(value: object) -> list[str]:
    return [str(pattern) for pattern in value] if isinstance(value, list | tuple | dict) else []


def _first(patterns: Iterable[str], name: str) -> str | None:
    return next((pattern for pattern in patterns if re.match(pattern, name)), None)

"""``adapter_config.json``: what it says of an adapter, what follows from the adapter's shapes, and whether both agree.

Source: peft 0.21.2, ``tuners/lora/{config,model,layer}.py``, ``utils/other.py`` (``get_pattern_key``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from mcore_rlhf.errors import Corrupt, LayoutMismatch, Problems, Unsupported, UsageError
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath

from .names import CONFIG

LORA = "LORA"
_NUMBER = re.compile(r"\.(\d{1,18})\.")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter's configuration.

    Args:
        values: What ``adapter_config.json`` says.
        where: Where that stands, for messages.
    """

    values: Mapping[str, object]
    where: str

    @classmethod
    def checked(cls, values: object, where: str) -> AdapterConfig:
        """A configuration that can be understood.

        Raises:
            Corrupt: It is no object, or a value has another type than peft gives it; all of them.
            Unsupported: It is not of a LoRA.
        """
        if not isinstance(values, dict):
            raise Unsupported(f'{where}: expected an object such as {{"r": 16}}, found {type(values).__name__}')
        kind = values.get("peft_type", LORA)
        if kind != LORA:
            raise Unsupported(
                f"{where}: peft_type is {kind}, and only {LORA} adapters are known\n"
                "Let peft merge it where it can (merge_and_unload) and convert the model; the run itself goes on from its own step alone."
            )
        problems = Problems()
        for name, types in _TYPES.items():
            value = values.get(name)
            if value is not None and (not isinstance(value, types) or isinstance(value, bool) != (types is bool)):
                problems.add(Unsupported, f"{where}: {name} is {value!r:.80}, which peft cannot have written")
        problems.raise_if_any()
        return cls(values, where)

    @property
    def saved_modules(self) -> tuple[str, ...]:
        """Modules that are saved whole."""
        return tuple(str(name) for name in _listed(self.values.get("modules_to_save")))

    @property
    def bias(self) -> str:
        """Which biases are trained: ``none``, ``all`` or ``lora_only``."""
        return str(self.values.get("bias") or "none")

    def flag(self, name: str) -> bool:
        """Whether an option is on."""
        return bool(self.values.get(name))

    def rank(self, module: str) -> int | None:
        """The rank of a module's adapter, as far as it is said."""
        found = self._of(module, "rank_pattern", "r")
        return found if isinstance(found, int) else None

    def scaling(self, module: str) -> float:
        """What ``B·A`` is multiplied by: ``alpha / r``, or ``alpha / sqrt(r)``.

        Raises:
            UsageError: Rank or alpha are not said.
        """
        rank, alpha = self.rank(module), self._of(module, "alpha_pattern", "lora_alpha")
        if not rank or not isinstance(alpha, int | float):
            raise UsageError(
                f"{self.where}: does not say r and lora_alpha, without which nobody knows how much {module} changes"
            )
        return float(alpha / sqrt(rank)) if self.flag("use_rslora") else float(alpha / rank)

    def _of(self, module: str, pattern: str, default: str) -> object:
        patterns = self.values.get(pattern)
        for key, value in patterns.items() if isinstance(patterns, Mapping) else ():
            try:
                if re.match(rf"(.*\.)?({key})$", module):
                    return value
            except re.error:
                continue
        return self.values.get(default)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "r": int, "lora_alpha": (int, float), "rank_pattern": dict, "alpha_pattern": dict, "use_rslora": bool, "use_dora": bool,
    "fan_in_fan_out": bool, "modules_to_save": (list, tuple), "target_modules": (str, list, tuple), "bias": str,
    "base_model_name_or_path": str, "target_parameters": (list, tuple),
}  # fmt: skip


def read_adapter_config(path: ReadablePath) -> AdapterConfig:
    """Read ``adapter_config.json``.

    Args:
        path: The file, or its folder.

    Raises:
        UsageError: It cannot be read.
        Corrupt: It is no JSON, or none of peft's.
        Unsupported: It is not of a LoRA.
    """
    path = path / CONFIG if path.is_dir() else path
    try:
        values = reading.read_json(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the adapter's configuration: {error.strerror}") from None
    except ValueError as error:
        raise Corrupt(f"{path}: is no JSON: {error}\nCopy the file again from where it came from.") from None
    return AdapterConfig.checked(values, str(path))


def given_config(reference: str | None) -> AdapterConfig | None:
    """What ``--reference-config`` says of an adapter; None where it is about the model alone.

    Args:
        reference: A folder, or a file: ``adapter_config.json``, or one that says as much of it as is known.

    Raises:
        CheckpointError: See :func:`read_adapter_config`.
    """
    if reference is None:
        return None
    path = Path(reference).expanduser()
    if path.is_dir():
        return read_adapter_config(path) if (path / CONFIG).is_file() else None
    found = read_adapter_config(path)
    return found if {"lora_alpha", "peft_type"} & set(found.values) else None


def model_reference(reference: str | None) -> str | None:
    """``--reference-config`` for those who want the model's ``config.json``: None where it is about an adapter alone."""
    if reference is None or given_config(reference) is None:
        return reference
    return reference if (Path(reference).expanduser() / "config.json").is_file() else None


def completed(given: AdapterConfig, ranks: Mapping[str, int], saved: Iterable[str]) -> AdapterConfig:
    """The configuration with everything that follows from the adapter's tensors, where it does not say it itself.

    Args:
        given: What is known; at least ``lora_alpha``.
        ranks: The rank of every adapted module, by the base model's name for it.
        saved: Modules that are saved whole.

    Raises:
        UsageError: It does not say ``lora_alpha``.
        LayoutMismatch: It says other ranks than the tensors have; all of them.
    """
    values = dict(given.values)
    if not isinstance(values.get("lora_alpha"), int | float):
        raise UsageError(ALPHA.format(where=given.where))
    values.setdefault("peft_type", LORA)
    if values.get("r") is None and ranks:
        common = Counter(ranks.values()).most_common(1)[0][0]
        values["r"] = common
        values.setdefault("rank_pattern", {name: rank for name, rank in ranks.items() if rank != common})
    if values.get("target_modules") is None and not values.get("target_parameters"):
        values["target_modules"] = _targets(ranks)
    whole = sorted({name.rpartition(".")[2] for name in saved})
    values.setdefault("modules_to_save", whole or None)
    for name, default in _DEFAULTS.items():
        values.setdefault(name, default)
    config = AdapterConfig.checked(values, given.where)
    _check_ranks(config, ranks)
    return config


ALPHA = (
    "{where}: does not say lora_alpha, and the tensors do not tell: an adapter changes the weights by lora_alpha / r · B·A\n"
    'Give --reference-config the run\'s adapter_config.json (or its folder), or a file with {{"lora_alpha": 32}}: what it '
    "leaves out follows from the tensors."
)
_DEFAULTS: dict[str, object] = {
    "base_model_name_or_path": None, "task_type": None, "bias": "none", "lora_dropout": 0.0, "fan_in_fan_out": False,
    "inference_mode": True, "use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {},
}  # fmt: skip


def _targets(ranks: Mapping[str, int]) -> list[str]:
    """The ends of module names where all layers have them; otherwise whole names, which fit nothing else."""
    layers: dict[str, set[str]] = {}
    for module in ranks:
        layers.setdefault(module.rpartition(".")[2], set()).update(_NUMBER.findall(f".{module}.")[:1])
    every = set().union(*layers.values()) if layers else set()
    short = {end for end, found in layers.items() if found in (every, set())}
    return sorted({m.rpartition(".")[2] if m.rpartition(".")[2] in short else m for m in ranks})


def _check_ranks(config: AdapterConfig, ranks: Mapping[str, int]) -> None:
    """Packed experts have a multiple of the rank; which parameter of them a name means, only peft knows."""
    problems = Problems()
    packed = bool(config.values.get("target_parameters"))
    for module, found in ranks.items():
        said = config.rank(module)
        if said is not None and said != found and not packed:
            problems.add(
                LayoutMismatch,
                f"{module}: its tensors have rank {found}, but {config.where} says {said}",
                "Give --reference-config the adapter_config.json of this very run.",
            )
    problems.raise_if_any()


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []

"""A live model as adapter and base: whose tensor is whose, and what the base is. peft itself is not needed.

Source: peft 0.21.2, ``tuners/tuners_utils.py`` (``merged_adapters``), ``peft_model.py`` (``peft_config``), ``config.py``
(``save_pretrained``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from mcore_rlhf.core.dtype import dtype_of
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.formats.adapters.fingerprint import ModelFingerprint, Runs, Sampled, fingerprint
from mcore_rlhf.formats.peft.config import AdapterConfig
from mcore_rlhf.formats.peft.names import BASE_LAYER, DEFAULT, PREFIX, in_memory, in_original, without_prefix

from ..writable import no_bytes


@dataclass(frozen=True, slots=True, eq=False)
class LiveAdapter:
    """A model with an adapter.

    Args:
        model: The model.
        config: The adapter's configuration.
        name: What the adapter is called in the model.
    """

    model: torch.nn.Module
    config: AdapterConfig
    name: str = DEFAULT

    @classmethod
    def of(cls, model: torch.nn.Module, name: str, config: Mapping[str, object] | None) -> LiveAdapter:
        """The adapter of that name.

        Args:
            model: What ``get_peft_model`` made, or any model with an adapter of peft's.
            name: What the adapter is called in it.
            config: Its configuration, where the model does not have it.

        Raises:
            UsageError: The model has no such adapter, or no configuration.
        """
        if config is None:
            configs = getattr(model, "peft_config", {})
            if name not in configs:
                known = ", ".join(configs) or "none"
                raise UsageError(
                    f"AdapterEngine: the model has no peft_config of an adapter {name!r} (it has: {known})\n"
                    "Give what get_peft_model made, or the adapter's configuration: AdapterEngine(model, config={...})."
                )
            config = _dictionary(configs[name])
        plain = {str(key): _plain(value) for key, value in config.items()}
        found = cls(model, AdapterConfig.checked({**plain, "inference_mode": True}, "the model's peft_config"), name)
        if not found.tensors():
            raise UsageError(f"AdapterEngine: no parameter of the model belongs to an adapter {name!r}")
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """The adapter's own tensors, by their names in peft's file."""
        bias, own, adapted = self.config.values.get("bias"), {}, set()
        state = _own_state(self.model)
        for memory, tensor in state.items():
            found = in_memory(memory)
            if found is not None and found.adapter == self.name:
                own[found.file] = tensor
                adapted.add(found.module)
        for memory, tensor in state.items():
            base = without_prefix(memory)
            module = base.rpartition(".")[0].removesuffix(f".{BASE_LAYER}")
            wanted = bias == "all" or (bias == "lora_only" and module in adapted)
            if wanted and base.endswith(".bias") and in_memory(memory) is None:
                own[PREFIX + base] = tensor
        return own

    def others(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that are trained and belong to no adapter: a value head, say."""
        own = {id(tensor) for tensor in self.tensors().values()}
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and id(parameter) not in own and in_memory(name) is None
        }

    def refuse_merged(self) -> None:
        """See that the base is what it was.

        Raises:
            Unsupported: An adapter has been added to it, as for generation.
        """
        merged = [name for name, module in self.model.named_modules() if getattr(module, "merged_adapters", None)]
        if merged:
            raise Unsupported(
                f"the adapter is merged into the base weights of {len(merged)} modules such as {merged[0]}: neither is what was trained\n"
                "Call model.unmerge_adapter() before saving or loading."
            )

    def base(self) -> ModelFingerprint:
        """The fingerprint of everything that is not trained, under the base model's own names."""
        return fingerprint(self._base())

    def _base(self) -> Iterator[Sampled]:
        trained = {id(tensor) for tensor in self.others().values()}
        seen: set[int] = set()
        for memory, tensor in _own_state(self.model).items():
            if in_memory(memory) is not None or id(tensor) in trained or tensor.data_ptr() in seen:
                continue
            if why := no_bytes(tensor):
                raise Unsupported(f"{memory} {why}; the base model's fingerprint cannot be taken")
            seen.update({tensor.data_ptr()} if tensor.numel() else set())
            yield Sampled(in_original(memory), tuple(tensor.shape), dtype_of(tensor.dtype), _Reader(tensor))


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    """Gives parts of a live tensor."""

    tensor: torch.Tensor

    def __call__(self, runs: Runs) -> bytes:
        """The bytes of the runs."""
        flat = self.tensor.detach().reshape(-1)
        parts = torch.cat([flat[start:stop].reshape(-1) for start, stop in runs])
        return bytes(parts.contiguous().view(torch.uint8).cpu().numpy().data)


def _own_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers themselves, tied ones under every name."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _dictionary(config: object) -> Mapping[str, object]:
    if isinstance(config, Mapping):
        return config
    found = config.to_dict()  # type: ignore[attr-defined]
    assert isinstance(found, dict)  # peft's own
    return found


def _plain(value: object) -> object:
    """As JSON has it: peft keeps names in sets, and kinds in enumerations."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value

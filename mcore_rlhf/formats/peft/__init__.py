"""LoRA adapters as peft stores them: ``adapter_model.safetensors`` and ``adapter_config.json``.

``names`` says what a tensor is called in a file and in memory, ``config`` what ``adapter_config.json`` says, ``parts`` finds
the adapter in a checkpoint of any format; ``reader`` and ``writer`` are made of them. ``verl`` reads what verl saves of an adapter.
"""

from __future__ import annotations

from mcore_rlhf.families.lora.names import CONFIG, WEIGHTS
from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import Format, Target
from mcore_rlhf.storage.paths import ReadablePath


class PeftFormat(Format):
    """peft's folder of one adapter."""

    name = "peft"
    adapter = True
    holds_adapters = True
    weights_only = True
    takes = (Takes.DTYPE, Takes.MASTERS)
    model_folder = own_sidecar = True

    def load_hint(self, path: ReadablePath, *, optimizer: bool = True) -> str:
        """How the framework is told to load it."""
        return f'PeftModel.from_pretrained(base_model, "{path}")'

    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder has an adapter's configuration or weights, or verl's adapter files."""
        from .verl import is_verl_adapter

        return any((path / name).is_file() for name in (CONFIG, *WEIGHTS)) or is_verl_adapter(path)

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open an adapter: peft's, or what verl saves of one."""
        from .reader import read_peft
        from .verl import is_verl_adapter, read_verl_adapter

        if is_verl_adapter(path):
            return read_verl_adapter(path, options)
        return read_peft(path, options)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new adapter's folder."""
        from .writer import peft_target

        return peft_target(source, options)


FORMAT: Format = PeftFormat()

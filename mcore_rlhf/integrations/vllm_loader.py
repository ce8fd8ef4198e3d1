"""vLLM's models out of any checkpoint: ``LLM(model=BASE, load_format="mcore_rlhf", model_loader_extra_config={"checkpoint": "RUN"})``.

``BASE`` is the Hugging Face folder of the model, for its config and tokenizer; weights are read from ``RUN``, whole, and cut by each of
vLLM's ranks as it does with those of a folder. vLLM calls :func:`register` as it starts: entry point ``vllm.general_plugins``.

Read, not run. Source: vLLM 00b5ad0, ``vllm/model_executor/model_loader/default_loader.py`` (``DefaultModelLoader.load_weights``), 01f62d3,
``base_loader.py`` (``BaseModelLoader``), ``__init__.py`` (``register_model_loader``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.weights import iter_weights

LOAD_FORMAT = "mcore_rlhf"


@dataclass(frozen=True, slots=True)
class LoaderExtra:
    """``model_loader_extra_config``.

    Args:
        checkpoint: A root, a step, a role's folder, a URL.
        role: Whose model, where a step holds several.
        step: Which step of a root.
        reference_config: The model's ``config.json``, where nothing in the checkpoint describes it.
    """

    checkpoint: str
    role: str | None = None
    step: int | None = None
    reference_config: str | None = None

    @classmethod
    def of(cls, given: object) -> LoaderExtra:
        """Understand what the user gave.

        Raises:
            UsageError: It says no checkpoint, or what is not known.
        """
        known = ", ".join(cls.__dataclass_fields__)
        if not isinstance(given, dict) or not isinstance(given.get("checkpoint"), str):
            raise UsageError(
                f'model_loader_extra_config: expected {{"checkpoint": "RUN"}}, found {given!r}\nKnown: {known}.'
            )
        try:
            return cls(**given)
        except TypeError as error:
            raise UsageError(f"model_loader_extra_config: {error}\nKnown: {known}.") from None


def register() -> None:
    """Add the loader to vLLM's."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class McoreRlhfLoader(BaseModelLoader):
        """Weights of any checkpoint."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            self.extra = LoaderExtra.of(load_config.model_loader_extra_config)

        def download_model(self, model_config: Any) -> None:
            """Nothing: weights are read where they lie."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Read them, and see that every parameter has got one."""
            extra, base = self.extra, self.extra.reference_config or model_config.model
            dtype = str(model_config.dtype).removeprefix("torch.")
            read = ReadOptions(role=extra.role, step=extra.step)
            loaded = model.load_weights(iter_weights(extra.checkpoint, dtype=dtype, reference_config=base, read=read))
            missing = {name for name, _ in model.named_parameters()} - set(loaded or ())
            if loaded is not None and missing:
                named = ", ".join(sorted(missing)[:5])
                raise UsageError(f"{extra.checkpoint}: has no weights for {len(missing)} parameters of {base}: {named}")

    register_model_loader(LOAD_FORMAT)(McoreRlhfLoader)

"""vLLM's loader, held against the signatures of vLLM's own source: vLLM cannot be installed here, and is not what is tested."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.integrations.vllm_loader import LOAD_FORMAT, register

RUN = Path(__file__).parents[2] / "goldens" / "megatron" / "tp2pp2dp2_bf16_do"


class BaseModelLoader(ABC):
    """As vLLM 01f62d3 has it, ``vllm/model_executor/model_loader/base_loader.py``."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None: ...

    @abstractmethod
    def load_weights(self, model: Any, model_config: Any) -> None: ...


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[BaseModelLoader]]:
    found: dict[str, type[BaseModelLoader]] = {}

    def register_model_loader(load_format: str) -> Callable[[type[BaseModelLoader]], type[BaseModelLoader]]:
        def registered(kind: type[BaseModelLoader]) -> type[BaseModelLoader]:
            assert issubclass(kind, BaseModelLoader)
            return found.setdefault(load_format, kind)

        return registered

    names = ["vllm", "vllm.model_executor", "vllm.model_executor.model_loader"]
    modules = {name: ModuleType(name) for name in [*names, f"{names[-1]}.base_loader"]}
    modules[names[-1]].register_model_loader = register_model_loader  # type: ignore[attr-defined]
    modules[f"{names[-1]}.base_loader"].BaseModelLoader = BaseModelLoader  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


class Model(torch.nn.Module):
    """Takes what it is given, as vLLM's models do, and says what it has got."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))
        self.found: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.found.update(weights)
        return {name.replace(".", "_") for name in self.found}


def load(kind: type[BaseModelLoader], model: Model, base: Path) -> None:
    """Load a run as vLLM does, whose ``model`` is the Hugging Face folder that the run began from."""
    convert(RUN, base, ConvertOptions(to="hf", fsync=False, write=WriteOptions(no_optimizer=True)))
    for file in base.glob("*.safetensors"):
        file.unlink()  # of that folder the config is what is asked for
    config = SimpleNamespace(model_loader_extra_config={"checkpoint": str(RUN)})
    kind(config).load_weights(model, SimpleNamespace(model=str(base), dtype=torch.float16))


def test_it_is_registered_and_reads(loaders: dict[str, type[BaseModelLoader]], tmp_path: Path) -> None:
    register()
    model = Model("model_norm_weight")
    load(loaders[LOAD_FORMAT], model, tmp_path / "base")
    assert len(model.found) == 39
    assert {tensor.dtype for tensor in model.found.values()} == {torch.float16}


def test_what_gets_no_weight_is_named(loaders: dict[str, type[BaseModelLoader]], tmp_path: Path) -> None:
    register()
    with pytest.raises(UsageError, match=r"no weights for 1 parameters of .*: model_nowhere"):
        load(loaders[LOAD_FORMAT], Model("model_norm_weight", "model_nowhere"), tmp_path / "base")


@pytest.mark.parametrize("given", [{}, None, {"checkpoint": 1}, {"checkpoint": "RUN", "rank": 0}])
def test_what_is_not_understood_is_refused(loaders: dict[str, type[BaseModelLoader]], given: object) -> None:
    register()
    with pytest.raises(
        UsageError, match=r"model_loader_extra_config: .*[\s\S]*Known: checkpoint, role, step, reference_config"
    ):
        loaders[LOAD_FORMAT](SimpleNamespace(model_loader_extra_config=given))

"""What ``adapter_config.json`` says of ranks and scales, and what is inferred where it is silent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.lora.config import AdapterConfig, completed

RANKS = {
    "model.layers.0.q": 4,
    "model.layers.1.q": 4,
    "model.layers.0.o": 2,
    "model.layers.1.o": 2,
    "model.layers.1.v": 4,
}


def test_ranks_that_differ_become_a_pattern() -> None:
    found = completed(AdapterConfig({"lora_alpha": 8}, "here"), RANKS, ["lm_head"])
    assert (found.values["r"], found.values["modules_to_save"]) == (4, ["lm_head"])
    assert all(found.rank(module) == rank for module, rank in RANKS.items())
    assert found.values["target_modules"] == ["model.layers.1.v", "o", "q"]  # v is not in every layer
    assert (found.scaling("model.layers.0.q"), found.scaling("model.layers.0.o")) == (2.0, 4.0)


def test_scaling_is_pefts() -> None:
    config = AdapterConfig(
        {"r": 4, "lora_alpha": 6, "rank_pattern": {"layers.1.q": 9}, "alpha_pattern": {r".*\.q": 3}}, "here"
    )
    assert config.scaling("model.layers.1.q") == 3 / 9
    assert config.scaling("model.layers.2.v") == 6 / 4
    assert replace(config, values={**config.values, "use_rslora": True}).scaling("model.layers.1.q") == 1.0
    with pytest.raises(UsageError, match="lora_alpha"):
        AdapterConfig({"r": 4}, "here").scaling("q")

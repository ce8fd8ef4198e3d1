"""What the tests over all formats share: each conversion of the small model is made once."""

from __future__ import annotations

import pytest

from tests.helpers.six_formats import Zoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("six"))


NOT_READ_YET = (
    "dist_muon_layerwise_dp2_bf16",
    "dist_muon_pingpong_dp2_bf16",
    "dist_muon_tp2_bf16",
    "dist_precisionaware_dp2_bf16_do",
    "dist_tp2pp2_bf16_do_dpreshardable",
    "dist_tp2pp2_bf16_do_fullyreshardable",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Goldens that are not read yet fail, strictly: who makes one readable takes it out of the list."""
    for item in items:
        if any(f"megatron_0_19-{name}]" in item.name for name in NOT_READ_YET):
            item.add_marker(pytest.mark.xfail(reason="megatron-core 0.19 is not read yet", strict=True))

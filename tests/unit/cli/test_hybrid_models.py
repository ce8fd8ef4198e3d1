"""Hybrid models on the command line."""

from __future__ import annotations

from pathlib import Path

from .conftest import GOLDENS, Cli

NEW = GOLDENS.parent / "megatron_0_19"


def test_inspect_shows_the_pattern(cli: Cli, tp2pp2: Path) -> None:
    golden = NEW / "hybrid_mamba_tp2_bf16_do"
    assert "model 4 layers, hybrid M-*-, embedding" in cli("inspect", golden).words()
    assert cli("inspect", golden, "--json").json["model"]["hybrid_layer_pattern"] == "M-*-"
    assert cli("inspect", tp2pp2, "--json").json["model"]["hybrid_layer_pattern"] is None


def test_verify_finds_copies_and_masters_of_hybrid_models_in_order(cli: Cli) -> None:
    for kind in ("attn_mlp", "mamba", "gdn"):
        assert cli("verify", NEW / f"hybrid_{kind}_tp2_bf16_do", "--deep").code == 0

"""Words that the tables of architectures use: who spells names how, and what kinds of layers there are."""

from __future__ import annotations

LOCAL = "local"
TRANSFORMER_ENGINE = "transformer_engine"
"""Values of Megatron's ``--transformer-impl``: they name a few parameters differently."""

SEQUENTIAL, GROUPED, STACKED = "sequential", "grouped", "stacked"
"""How Megatron names experts."""

EXPERTS = {SEQUENTIAL: "SequentialMLP", GROUPED: "TEGroupedMLP", STACKED: "GroupedMLP"}
"""The classes that name them so."""

MTP_LAYER, MTP_MODEL_LAYER = "transformer_layer", "mtp_model_layer"
"""What the decoder layer inside a multi-token-prediction layer is called: in 0.16.1, and in newer Megatron-LM."""

DENSE, MIXTURE = "dense", "mixture"
"""Kinds of decoder layers."""

LAYER, NEXT, EXPERT = "{i}", "{k}", "{e}"
"""Stand for the number of a decoder layer, of a multi-token-prediction layer, and of a routed expert."""

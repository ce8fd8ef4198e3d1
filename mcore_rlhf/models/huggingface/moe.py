"""The rows of layers that are mixtures of experts.

Sources: transformers 5.23.0, ``models/{qwen2_moe,qwen3_moe,mixtral,deepseek_v3,glm4_moe}/modeling_*.py`` and
``conversion_mapping.py``; megatron-core 0.16.1, ``transformer/moe/{router,experts,shared_experts,moe_layer}.py``.
Transformer Engine keeps the norm before a mixture apart. Its experts (``TEGroupedMLP``) were read, not run.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.models.meaning.kinds import Field

from . import dense
from .fields import same
from .table import GROUPED, MIXTURE, SEQUENTIAL, STACKED, Arrangement, HfTensor, Packed, Row

_LAYER = "decoder.layers.{i}."
_HF = "model.layers.{i}."
_GATE_UP, _DOWN = ("expert_ffn", "hidden"), ("hidden", "expert_ffn")

NORM = Row(f"{_LAYER}pre_mlp_layernorm.weight", dense.MLP_IN, needs=(MIXTURE,))


def router(gate: str) -> Row:
    """The router's row.

    Args:
        gate: What Hugging Face calls it, within a layer.
    """
    tensor = HfTensor(f"{_HF}{gate}.weight", ("experts", "hidden"))
    return Row(f"{_LAYER}mlp.router.weight", (tensor,), needs=(MIXTURE,))


ROUTER = router("mlp.gate")
EXPERT_BIAS = Row(
    f"{_LAYER}mlp.router.expert_bias",
    (HfTensor(f"{_HF}mlp.gate.e_score_correction_bias", ("experts",)),),
    needs=(MIXTURE,),
)


def experts(inside: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """The rows of routed experts, under all of Megatron's spellings.

    Args:
        inside: Where Hugging Face has an expert on disk, within a layer; ``{e}`` is its number.
        gate, up, down: What it calls an expert's matrices.
    """
    first = tuple(HfTensor(f"{_HF}{inside}.{name}.weight", _GATE_UP) for name in (gate, up))
    second = (HfTensor(f"{_HF}{inside}.{down}.weight", _DOWN),)
    here = f"{_LAYER}mlp.experts."
    local, grouped, stacked = ((MIXTURE, kind) for kind in (SEQUENTIAL, GROUPED, STACKED))
    return (
        Row(f"{here}weight1", first, Arrangement.EXPERTS, needs=stacked),
        Row(f"{here}weight2", second, Arrangement.EXPERTS, needs=stacked),
        Row(f"{here}linear_fc1.weight{{e}}", first, Arrangement.STACKED, needs=grouped),
        Row(f"{here}linear_fc2.weight{{e}}", second, needs=grouped),
        Row(f"{here}local_experts.{{e}}.linear_fc1.weight", first, Arrangement.STACKED, needs=local),
        Row(f"{here}local_experts.{{e}}.linear_fc2.weight", second, needs=local),
    )


EXPERTS = experts("mlp.experts.{e}", "gate_proj", "up_proj", "down_proj")


def shared(inside: str) -> tuple[Row, ...]:
    """The rows of the shared experts, which are one feed-forward.

    Args:
        inside: Where Hugging Face has it, within a layer.
    """
    gate_up = tuple(HfTensor(f"{_HF}{inside}.{part}_proj.weight", ("shared", "hidden")) for part in ("gate", "up"))
    here, needs = f"{_LAYER}mlp.shared_experts.", (MIXTURE, "shared")
    return (
        Row(f"{here}linear_fc1.weight", gate_up, Arrangement.STACKED, needs=needs),
        Row(
            f"{here}linear_fc2.weight",
            (HfTensor(f"{_HF}{inside}.down_proj.weight", ("hidden", "shared")),),
            needs=needs,
        ),
    )


SHARED = shared("mlp.shared_experts")
SHARED_GATE = Row(
    f"{_LAYER}mlp.shared_experts.gate_weight",
    (HfTensor(f"{_HF}mlp.shared_expert_gate.weight", ("one", "hidden")),),
    needs=(MIXTURE, "shared"),
)

NEEDS = ("experts",)
"""What all of these architectures have."""

DENSE_MLP = (dense.MLP_NORM, dense.FUSED_MLP_NORM, dense.FC1, dense.FC2)
"""The feed-forward of layers that are none."""

ROUTER_ORDER = (f"{_HF}mlp.gate.weight", f"{_HF}mlp.gate.e_score_correction_bias")
EXPERT_ORDER = tuple(f"{_HF}mlp.experts.{{e}}.{part}_proj.weight" for part in ("gate", "up", "down"))


def shared_order(inside: str) -> tuple[str, ...]:
    """``parameters()`` of the shared experts."""
    return tuple(f"{_HF}{inside}.{part}_proj.weight" for part in ("gate", "up", "down"))


def packed(inside: str, gate: str, up: str, down: str) -> tuple[Packed, ...]:
    """Experts as transformers 5 has them in memory: all in one tensor each for gate and up, and for down."""
    return (
        Packed(f"{_HF}mlp.experts.gate_up_proj", (f"{_HF}{inside}.{gate}.weight", f"{_HF}{inside}.{up}.weight")),
        Packed(f"{_HF}mlp.experts.down_proj", (f"{_HF}{inside}.{down}.weight",)),
    )


PACKED = packed("mlp.experts.{e}", "gate_proj", "up_proj", "down_proj")


def fields(experts: str, *also: str, ffn: str = "moe_intermediate_size") -> tuple[Field, ...]:
    """What the descriptions of routed experts have in common.

    Args:
        experts: What ``config.json`` calls their number.
        also: Further names of it.
        ffn: What it calls their width.
    """
    return (
        same(experts, "num_experts", also),
        same("num_experts_per_tok", "moe_router_topk"),
        same(ffn, "moe_ffn_hidden_size"),
    )


def optional(*rows: Row) -> tuple[Row, ...]:
    """Rows that a model may lack."""
    return tuple(replace(row, optional=True) for row in rows)

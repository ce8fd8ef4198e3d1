"""Hugging Face's names and shapes, and how they relate to Megatron-core's: one table per architecture."""

from __future__ import annotations

from .arcee import ARCEE
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .dots1 import DOTS1
from .ernie4_5 import ERNIE4_5
from .glm import GLM
from .glm4_moe import GLM4_MOE, GLM4_MOE_LITE, SOLAR_OPEN
from .gpt_oss import GPT_OSS
from .llama import LLAMA
from .mistral import MINISTRAL, MISTRAL
from .mixtral import MIXTRAL
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from .qwen_moe import QWEN2_MOE, QWEN3_MOE
from .seed_oss import SEED_OSS
from .smollm3 import SMOLLM3
from .table import Architecture
from .youtu import YOUTU

ARCHITECTURES: tuple[Architecture, ...] = (
    QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, DEEPSEEK_V3, GLM4_MOE_LITE, DEEPSEEK_V2, GLM4_MOE, MIXTRAL,
    GPT_OSS, LLAMA, MISTRAL, SEED_OSS, ARCEE, MINISTRAL, SMOLLM3, ERNIE4_5, GLM, PHI3, YOUTU, DOTS1, SOLAR_OPEN,
)  # fmt: skip
"""Those that are known. Where nothing but the tensors tells, the first one that fits counts: the most particular ones
come first, since Llama's rows are all but a subset of the others'. Mistral's are Llama's, GLM-4.7-Flash's are DeepSeek-V3's,
Seed-OSS's are Qwen2's; and Qwen3.5's with experts are Qwen3-Next's in Megatron."""

TEXTS = {"qwen3_5": QWEN3_5, "qwen3_5_moe": QWEN3_5_MOE, "qwen2_vl": QWEN2, "qwen2_5_vl": QWEN2, "qwen3_vl": QWEN3}
"""Models of text and images, by ``model_type``, each with its text, which alone is Megatron's GPT."""

OF_TEXTS = tuple(f"{kind}_text" for kind in TEXTS)
"""What transformers calls the configurations of their texts, each of which has defaults of its own."""

_ZERO_CENTRED = "its norms multiply by 1 + weight, and its embeddings by the root of the hidden size"
_FOUR_NORMS = "its layers have four norms, after attention and feed-forward as well, for which Megatron has no place"
_NORMS_OF_ALL = "it norms all query heads together, and all key heads; Megatron norms each by itself"
_NO_FIRST_NORMS = f"it has no norm before attention and feed-forward, and {_NORMS_OF_ALL.removeprefix('it ')}"
_SPARSE = "its attention chooses tokens by an indexer; Megatron's sparse attention is experimental, and was not tried"
_IMAGES = "its text lies below a model of images, and no table has it"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("qwen3_vl_moe", "kimi_k25", "mistral3", "llama4"), _IMAGES),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text"), _FOUR_NORMS),
    **dict.fromkeys(("olmo2", "olmo3"), _NO_FIRST_NORMS),
    **dict.fromkeys(("olmoe", "minimax_m2"), _NORMS_OF_ALL),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _SPARSE),
    "gemma": f"{_ZERO_CENTRED}, which Megatron's GPT does with options of its own that were not tried",
    "glm4": _FOUR_NORMS,
    "llama4_text": "its attention sees chunks, and scales queries by their position, which Megatron does not",
    "ministral3": "it scales queries by their position, which Megatron does not",
    "granite": "it multiplies what every layer adds, which Megatron does not",
    "exaone4": "its layers have norms behind attention and feed-forward, and none before; Megatron's have them before",
    "hunyuan_v1_dense": "it norms queries and keys behind the rotation; Megatron does so before it",
    "ernie4_5_moe": "a bias corrects which experts its softmax chooses, which Megatron does not do to a softmax's",
    "kimi_linear": "its attention is Kimi's delta rule, which Megatron-core does not have",
    "apertus": "its activation is xIELU, which Megatron-core does not have",
    "nemotron_h": "it is a HybridModel in Megatron, whose names no table has yet",
}
"""Architectures that Megatron-core's plain GPT cannot express, by ``model_type``, with the reason. Between formats under Hugging
Face's names they convert as any other model does.

Sources: transformers 5.23.0, ``models/*/modeling_*.py``; megatron-core 0.16.1 and 0.19.2, ``models/gpt``, ``ssm``,
``transformer/attention.py``, ``transformer/moe/moe_utils.py``;
NVIDIA-NeMo/Megatron-Bridge ``src/megatron/bridge/models``; THUDM/slime ``slime/backends/megatron_utils/megatron_to_hf/glm4.py``.
"""

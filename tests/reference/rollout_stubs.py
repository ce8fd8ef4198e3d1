"""What ``train_rl.py`` wants beside Megatron: packages that it names, an environment, and a stand-in for the inference engine.

The engine samples with the very model that is trained, token by token, from seeds of its own: Megatron's needs a GPU, a server and HTTP.
Source: Megatron-LM core_v0.19.0, ``megatron/rl/rl_utils.py``, ``megatron/rl/inference/megatron.py``.
"""

from __future__ import annotations

import sys
import types
from typing import Any
from unittest.mock import MagicMock

import torch

PACKAGES = {
    "wandb": ("wandb_run",),
    "openai": ("AsyncOpenAI", "DefaultAioHttpClient"),
    "httpx": ("Limits",),
    "fastapi": ("FastAPI",),
    "uvicorn": ("Config", "Server"),
    "torch.utils.tensorboard": ("SummaryWriter",),
}
"""Imported at the top of modules whose use of them is never reached here."""
NEW_TOKENS = 8


def stand_in_for_packages() -> None:
    """Before ``megatron.training`` is imported: it looks for ``megatron.rl`` then, and does without where that cannot be imported."""
    for name, content in PACKAGES.items():
        module = types.ModuleType(name)
        vars(module).update(dict.fromkeys(content, MagicMock), wandb_run=types.SimpleNamespace(Run=MagicMock))
        sys.modules[name] = module


def stand_in_for_packed_attention() -> None:
    """Let plain attention take one sequence in the packed form that ``train_rl.py`` always asks for; Transformer Engine has a kernel."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    plain = DotProductAttention.forward

    def forward(
        self: Any, query: Any, key: Any, value: Any, *args: Any, packed_seq_params: Any = None, **named: Any
    ) -> Any:
        if packed_seq_params is None:
            return plain(self, query, key, value, *args, **named)
        assert len(packed_seq_params.cu_seqlens_q) == 2, "one sequence, from its first token to its last"
        return plain(self, *(one.unsqueeze(1) for one in (query, key, value)), *args, **named)

    DotProductAttention.forward = forward


def stand_in_for_engine() -> None:
    """Put the engine and the environment where ``rl_utils`` looks for them."""
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
    from megatron.rl import rl_utils
    from megatron.rl.agent.registry import AGENT_REGISTRY
    from megatron.rl.agent.reward_only_agent import RewardOnlyAgent
    from megatron.rl.inference.api import InferenceResponse, LLMChatMessage
    from megatron.rl.inference.inference_interface import ReturnsRaw, ReturnsTokens
    from megatron.rl.server.api import InferenceServer
    from megatron.training import get_args, get_tokenizer
    from pydantic import PrivateAttr

    class Engine(InferenceServer, ReturnsTokens, ReturnsRaw):
        _model: Any = PrivateAttr(None)
        _sampled: int = PrivateAttr(0)

        @classmethod
        async def launch(cls, model: Any, **_: Any) -> Any:
            engine = cls()
            engine._model = model
            return engine

        def set_generation_epoch(self, epoch: int) -> None:
            self._sampled = 1000 * epoch

        async def kill(self) -> None: ...

        async def base_generate(self, request: Any) -> Any:
            self._sampled += 1
            generator = torch.Generator().manual_seed(self._sampled)
            prompt = get_tokenizer().tokenize(request.prompt[-1].content)
            tokens, logprobs = list(prompt), []
            end = get_tokenizer().eod
            for _ in range(NEW_TOKENS):
                probabilities = next_token(self._model, tokens)
                tokens.append(int(torch.multinomial(probabilities[:end], 1, generator=generator)))
                logprobs.append(float(probabilities[tokens[-1]].log()))
            text = " ".join(map(str, tokens[len(prompt) :]))
            tokens, logprobs = [*tokens, end], [*logprobs, float(next_token(self._model, tokens)[end].log())]
            return InferenceResponse(
                response=LLMChatMessage(role="assistant", content=text), raw_text=text, token_ids=tokens, logprobs=logprobs,
                prompt_length=len(prompt), finish_reason="length", policy_epoch=[(0, get_args().curr_iteration)], kv_cache_epoch=[(0, 0)],
                num_evictions=0,
            )  # fmt: skip

    class EvenTokens(RewardOnlyAgent):
        """Pays for even tokens."""

        env_id: str = "even"
        asked: int = 0

        async def get_prompt(self, validation: bool = False) -> tuple[str, Any]:
            self.asked += 1
            return f"{self.asked} {get_args().curr_iteration + 7} 11", {"problem_id": str(self.asked)}

        async def get_reward(self, response: str, golden: Any, finish_reason: str) -> float:
            return sum(int(token) % 2 == 0 for token in response.split()) / NEW_TOKENS

    NullTokenizer.bos_id = None
    rl_utils.MegatronLocal = Engine
    AGENT_REGISTRY["EvenTokens"] = f"{__name__}:EvenTokens"
    globals()["EvenTokens"] = EvenTokens


def next_token(model: Any, tokens: list[int]) -> torch.Tensor:
    """Probabilities of what follows, by the model itself."""
    positions = torch.arange(len(tokens))[None]
    logits = model(torch.tensor([tokens]), positions, None, runtime_gather_output=True)
    return logits[0, -1].float().softmax(-1)

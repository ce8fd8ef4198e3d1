"""Qwen3-Next and Qwen3.5 against their authors: transformers writes a folder, megatron-core 0.19 computes the same logits, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.crossing.packing import from_files, from_modules
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.models.huggingface.config import architecture_of, sizes_of_config
from mcore_rlhf.models.huggingface.relation import from_huggingface
from mcore_rlhf.models.huggingface.table import TRANSFORMER_ENGINE, Spelling
from tests.reference.architectures_jobs import forget_where_it_came_from
from tests.reference.test_architectures import VISION

WORDS, TOLERANCE = 61, 2e-4  # of logits up to 7, with a recurrence over the whole sequence in another order
TOKENS = torch.randint(WORDS, (1, 17), generator=torch.Generator().manual_seed(3))


_MIXTURE = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_MIXTURE, "intermediate_size": 44, "decoder_sparse_step": 1, "mlp_only_layers": [2]},
    "qwen3_5_text": {"intermediate_size": 44, "tie_word_embeddings": True},
    "qwen3_5_moe_text": _MIXTURE,
}


def config(kind: str) -> Any:
    """Unequal sizes wherever two could be mistaken for one another; of Qwen3-Next one layer has no mixture."""
    same = {
        "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    return transformers.AutoConfig.for_model(kind, **{**same, **KINDS[kind]})


Saved = tuple[Path, torch.Tensor]


def saved(kind: str, root: Path) -> Saved:
    """A model of random weights, norms among them, and its logits."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config(kind)).eval()
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn_like(param)
            param.add_(0.2 * noise) if param.dim() == 1 else param.copy_(0.3 * noise)
        model.save_pretrained(root)
        return root, model(TOKENS, use_cache=False).logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved("qwen3_next", tmp_path_factory.mktemp("qwen3_next"))


def to(source: Path, target: Path, kind: str, **write: Any) -> Any:
    return convert(source, target, ConvertOptions(kind, write=WriteOptions(**write), fsync=False))


def logits(ranks: WorkerPool, root: Path, tp: int) -> torch.Tensor:
    """What megatron-core computes."""
    job = "tests.reference.qwen3_next_worker:logits"
    found: list[torch.Tensor] = ranks.run(job, str(root), TOKENS.tolist(), world_size=tp, timeout=250)
    return found[0][..., :WORDS]


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_what_transformers_has(kind: str) -> None:
    """Names, shapes and order of parameters in memory, of the real class; only sizes come from its config."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(kind))
    real = {key: tuple(param.shape) for key, param in model.named_parameters()}
    (known,) = architecture_of(config(kind).to_dict())
    files = from_modules(real, known.packed).files
    sizes = replace(sizes_of_config(config(kind).to_dict()), mtp=0)
    relation = from_huggingface(files, sizes, Spelling(TRANSFORMER_ENGINE, "grouped"), [known])
    assert relation.huggingface.keys() == files.keys()
    assert list(from_files(relation.huggingface, known.packed).modules.items()) == list(real.items())


@pytest.mark.parametrize(
    ("kind", "tp"), [("qwen3_next", 1), ("qwen3_next", 2), ("qwen3_5_text", 2), ("qwen3_5_moe_text", 2)]
)
def test_megatron_computes_the_same_logits(
    kind: str, tp: int, kernels_pool: WorkerPool, folder: Saved, tmp_path: Path
) -> None:
    root, expected = folder if kind == "qwen3_next" else saved(kind, tmp_path / "hf")
    job = to(root, tmp_path / "mcore", "megatron", tp=tp)
    assert any("3 norms such as" in text and "counts from 1" in text for _, text in job.report.lines)
    assert expected.abs().max() > 1
    assert (logits(kernels_pool, tmp_path / "mcore", tp) - expected).abs().max() < TOLERANCE
    if kind != "qwen3_5_moe_text":  # which in Megatron is a Qwen3-Next, and becomes one where nobody says otherwise
        forget_where_it_came_from(str(tmp_path / "mcore"))
    assert_back(root, tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert back.config.model_type == kind
    with torch.no_grad():
        assert (back(TOKENS, use_cache=False).logits - expected).abs().max() < TOLERANCE


def assert_back(root: Path, tmp_path: Path) -> None:
    to(tmp_path / "mcore", tmp_path / "back", "hf")
    first, back = (load_file(path / "model.safetensors") for path in (root, tmp_path / "back"))
    assert first.keys() == back.keys()
    for name, tensor in first.items():  # a shifted norm in fp32 may lose its last bits outside of 0.5 to 2
        assert torch.allclose(tensor, back[name], rtol=0, atol=2e-7 if name.endswith("attn.norm.weight") else 0), name


@pytest.mark.slow
def test_a_released_folder_gives_its_text(kernels_pool: WorkerPool, tmp_path: Path) -> None:
    """Text below a model of images: Megatron gets the text alone, said as a loss, and its folder is of a class of text."""
    same = config("qwen3_5_moe_text").to_dict()
    vision = {**VISION["qwen2_5_vl"], "out_hidden_size": 32}
    described = transformers.AutoConfig.for_model(
        "qwen3_5_moe", text_config=same, vision_config=vision, tie_word_embeddings=False
    )
    torch.manual_seed(2)
    model = transformers.AutoModelForImageTextToText.from_config(described).eval()
    model.save_pretrained(tmp_path / "hf")
    with torch.no_grad():
        expected = model(TOKENS, use_cache=False).logits
    job = to(tmp_path / "hf", tmp_path / "mcore", "megatron")
    images, norms = (text for fate, text in job.report.lines if fate is Fate.LOST)
    assert images.startswith("the model of images, ")
    assert norms.startswith("3 norms such as model.layers.0.linear_attn.norm.weight: -1 on every element")
    assert (logits(kernels_pool, tmp_path / "mcore", 1) - expected).abs().max() < TOLERANCE
    to(tmp_path / "mcore", tmp_path / "back", "hf")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert (back.config.model_type, type(back).__name__) == ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")
    with torch.no_grad():
        assert (back(TOKENS, use_cache=False).logits - expected).abs().max() < TOLERANCE
    text = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf"
    ).state_dict()  # as transformers takes it out
    for name, tensor in back.state_dict().items():
        assert torch.allclose(tensor, text[name], rtol=0, atol=2e-7), name


@pytest.mark.parametrize(
    "packed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["all_in_one", "one_by_one"]
)
def test_further_tokens_are_a_layer_beside_the_model(packed: bool, kernels_pool: WorkerPool, tmp_path: Path) -> None:
    """As in released folders, whose ``mtp.`` transformers passes over; Megatron has it in its own module, which loads."""
    root, _ = saved("qwen3_5_moe_text", tmp_path / "hf")
    path = root / "model.safetensors"
    tensors = load_file(path)
    last = {name: value for name, value in tensors.items() if name.startswith("model.layers.3.")}
    tensors |= {
        name.replace("model.layers.3.", "mtp.layers.0."): torch.rand_like(value) for name, value in last.items()
    }
    tensors |= {
        f"mtp.{name}.weight": torch.rand(32) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    tensors["mtp.fc.weight"] = torch.rand(32, 64)
    stored = _packed(tensors) if packed else tensors
    save_file(stored, path, metadata={"format": "pt"})
    job = to(root, tmp_path / "mcore", "megatron")
    assert any("its layer is called mtp_model_layer" in text for _, text in job.report.lines)
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(root).eval()(TOKENS, use_cache=False).logits
    assert (logits(kernels_pool, tmp_path / "mcore", 1) - expected).abs().max() < TOLERANCE
    save_file(tensors, path, metadata={"format": "pt"})
    assert_back(root, tmp_path)


def _packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as newer releases have them on disk, and transformers in memory."""
    found = {name: value for name, value in tensors.items() if ".mlp.experts." not in name}
    for layer in sorted({name.partition(".mlp.experts.")[0] for name in tensors if ".mlp.experts." in name}):
        experts = [
            [tensors[f"{layer}.mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")]
            for e in range(4)
        ]
        found[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in experts])
        found[f"{layer}.mlp.experts.down_proj"] = torch.stack([down for *_, down in experts])
    return found


def test_a_norm_that_was_not_shifted_is_noticed(kernels_pool: WorkerPool, folder: Saved, tmp_path: Path) -> None:
    """The comparison of logits can fail."""
    root, expected = folder
    to(root, tmp_path / "mcore", "megatron")
    (path,) = tmp_path.glob("mcore/*/mp_rank_00/model_optim_rng.pt")
    tree = torch.load(path, weights_only=False)
    tree["model"]["decoder.layers.1.self_attention.out_norm.weight"] += 1
    torch.save(tree, path)
    assert (logits(kernels_pool, tmp_path / "mcore", 1) - expected).abs().max() > 100 * TOLERANCE


def test_other_layers_than_transformer_engines_are_refused(folder: Saved, tmp_path: Path) -> None:
    with pytest.raises(
        Unsupported,
        match=r"--transformer-impl local: Megatron builds Qwen3NextForCausalLM with transformer_engine alone",
    ):
        to(folder[0], tmp_path / "mcore", "megatron", transformer_impl="local")

"""Megatron to real models of transformers in real DeepSpeed, and back: every state, the next losses, every bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.demo.versions import MEGATRON
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.conversions import GOLDENS, golden
from tests.helpers.independent_reader import Reading, read
from tests.reference import deepspeed_from_megatron, muon_jobs
from tests.reference.deepspeed_from_megatron import batches
from tests.reference.deepspeed_live import Live, Seen
from tests.reference.deepspeed_matrix import differences as matrix_differences
from tests.reference.deepspeed_matrix import same
from tests.reference.deepspeed_models import Batch, Tuning
from tests.reference.lab import Lab
from tests.reference.observing import LOOK, Session
from tests.unit.formats.test_crossing_values import split_by_hand

JOBS = "tests.reference.deepspeed_transformers"
TIMEOUT = 100.0
WORDS = 132
CONFIG: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
"""What the goldens and :class:`TinyGPT` are, in the words of transformers."""
STATES = ("fp32", "exp_avg", "exp_avg_sq")
TOLERANCE = 5e-6
"""Relative difference of fp32 losses between Megatron and transformers."""


@dataclass(frozen=True)
class Way:
    """From one of Megatron's checkpoints to an engine.

    Args:
        golden: A checkpoint that Megatron-LM wrote.
        stage, dp: Of the engine.
        universal: Whether the engine loads a universal checkpoint.
        back: The layout of the way back.
    """

    golden: str
    stage: int
    dp: int
    universal: bool
    back: dict[str, int]


WAYS = (
    Way("tp2pp2dp2_bf16_do", 2, 2, False, {"tp": 2, "pp": 2, "dp": 2}),
    Way("tp2pp2dp2_tied_bf16_do", 3, 2, True, {"tp": 1, "pp": 2, "dp": 2}),
    Way("tp2pp2dp2_fp32_do", 0, 1, False, {"tp": 4, "pp": 1}),
)


def converted(source: Path, target: Path, to: str, **write: Any) -> Path:
    convert(source, target, ConvertOptions(to=to, workers=1, fsync=False, write=WriteOptions(**write)))
    return target


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.golden)
def test_deepspeed_takes_up_a_run_of_megatrons(way: Way, deepspeed_pool: WorkerPool, tmp_path: Path) -> None:
    options = {} if way.universal else {"zero_stage": way.stage, "dp": way.dp}
    root = converted(GOLDENS / way.golden, tmp_path / "ds", "universal" if way.universal else "deepspeed", **options)
    tied, dtype = "tied" in way.golden, "fp32" if "fp32" in way.golden else "bf16"
    tuning = Tuning("llama", {**CONFIG, "tie_word_embeddings": tied}, dtype, way.stage, way.dp)
    data = batches(TinyGPT(), Training(), 2, 6)
    ranks = load(deepspeed_pool, tuning, root, data, universal=way.universal, save=str(tmp_path / "again"))
    for rank in ranks:
        assert unequal(rank.start, golden(way.golden), tied=tied, zero3=way.stage == 3) == []
        assert rank.start.steps == [2.0]
        assert [group["weight_decay"] for group in rank.start.settings] == [0.1, 0.0]
    assert all(4.5 < loss < 5.2 for loss in ranks[0].losses)  # of 132 words, at random: log(132) = 4.88
    assert ranks[0].losses == ranks[-1].losses
    back = converted(
        tmp_path / "again", tmp_path / "back", "megatron", reference_config=described(tmp_path, tuning),
        transformer_impl="local", **way.back,
    )  # fmt: skip
    assert differing(read(back), golden(way.golden)) == []


def described(folder: Path, tuning: Tuning) -> str:
    """A folder with the ``config.json`` that transformers writes."""
    from transformers import LlamaConfig, Qwen3Config

    kinds = {"llama": (LlamaConfig, "LlamaForCausalLM"), "qwen3": (Qwen3Config, "Qwen3ForCausalLM")}
    config, name = kinds[tuning.kind]
    config(**tuning.config, architectures=[name]).save_pretrained(folder / "hf")
    return str(folder / "hf")


def load(pool: WorkerPool, tuning: Tuning, root: Path, data: list[Batch], **options: Any) -> list[Seen]:
    """What each rank of DeepSpeed sees of a checkpoint that it loads."""
    return pool.run(f"{JOBS}:load_and_train", tuning, str(root), data, world_size=tuning.dp, timeout=TIMEOUT, **options)


def unequal(live: Live, origin: Reading, *, tied: bool, zero3: bool) -> list[str]:
    """Where the engine differs from Megatron's tensors, which were cut by hand, without the vocabulary's padding."""
    tensors = {key: value for key, value in origin.tensors.items() if not (tied and key[0] == "output_layer.weight")}
    by_hand = {
        (name, "fp32" if state == "master" else state): value for (name, state), value in split_by_hand(tensors).items()
    }
    params = {name: value for (name, state), value in by_hand.items() if state == "param"}
    masters = {key: value for key, value in by_hand.items() if key[1] in STATES}
    if not any(state == "fp32" for _, state in masters):  # Megatron keeps none beside fp32 parameters
        masters |= {(name, "fp32"): value for name, value in params.items()}
    found = [name for name in params.keys() ^ live.param.keys() if not (tied and name == "lm_head.weight")]
    found += [str(key) for key in masters.keys() ^ live.states.keys()]
    found += [name for name, value in params.items() if not same(live.param[name], value)]
    return found + [str(key) for key, value in masters.items() if not same(live.states[key], value)]


def differing(found: Reading, expected: Reading) -> list[str]:
    """Every tensor of every state, to the last bit, without the padding of the vocabulary."""

    def cut(name: str, value: torch.Tensor) -> torch.Tensor:
        return value[:WORDS] if name.endswith(("word_embeddings.weight", "output_layer.weight")) else value

    assert expected.tensors
    return [str(key) for key in found.tensors.keys() ^ expected.tensors.keys()] + [
        str(key)
        for key in found.tensors.keys() & expected.tensors.keys()
        if not same(cut(key[0], found.tensors[key]), cut(key[0], expected.tensors[key]))
    ]


FP32 = TinyGPT(dtype="fp32", dropout=0.0, vocab_size=160)
"""Its vocabulary has no padding rows, which take part in Megatron's softmax."""


@pytest.mark.parametrize(("stage", "dp"), [(2, 2), (3, 1)])
def test_llama_goes_on_as_megatron_does(
    stage: int, dp: int, deepspeed_pool: WorkerPool, lab: Lab, tmp_path: Path
) -> None:
    """The loss at the checkpoint says that the weights mean the same, the loss after one step that the moments do."""
    trained = lab.train(FP32, Parallel(tp=2, pp=2), Training())
    root = converted(trained.root, tmp_path / "ds", "deepspeed", zero_stage=stage, dp=dp)
    tuning, data = (
        Tuning("llama", {**CONFIG, "vocab_size": FP32.vocab_size}, "fp32", stage, dp),
        batches(FP32, Training(), 2, 4),
    )
    seen = load(deepspeed_pool, tuning, root, data)[0]
    assert seen.losses[0] == pytest.approx(trained.evaluation, rel=TOLERANCE)
    assert seen.losses == pytest.approx([trained.losses[3], trained.losses[4]], rel=TOLERANCE)
    assert [group["lr"] for group in seen.start.settings] == [Training().lr] * 2


def test_megatron_goes_on_as_qwen3_does(deepspeed_pool: WorkerPool, pool: WorkerPool, tmp_path: Path) -> None:
    """A run that was never Megatron's becomes one, and comes back."""
    model, training = replace(FP32, qk_layernorm=True), Training()
    tuning = Tuning("qwen3", {**CONFIG, "vocab_size": model.vocab_size}, "fp32", 1, 2, lr=training.lr)
    data = batches(model, training, 0, 4)
    ds = str(tmp_path / "ds")
    ranks: list[Seen] = deepspeed_pool.run(
        f"{JOBS}:train_and_save", tuning, ds, data[:2], data[2:], world_size=2, timeout=TIMEOUT
    )
    megatron = converted(
        Path(ds), tmp_path / "mcore", "megatron", tp=2, pp=2, padded_vocab_size=model.vocab_size,
        reference_config=described(tmp_path, tuning), transformer_impl="local", lr_limits=(training.lr, training.min_lr),
    )  # fmt: skip
    losses = pool.run(
        deepspeed_from_megatron.load_and_train, model, Parallel(tp=2, pp=2), training, str(megatron), 2, world_size=4,
        timeout=2 * TIMEOUT,
    )[0]  # fmt: skip
    assert losses == pytest.approx(ranks[0].losses, rel=TOLERANCE)
    back = converted(megatron, tmp_path / "back", "deepspeed", zero_stage=3, dp=1)
    seen = load(deepspeed_pool, replace(tuning, stage=3, dp=1), back, data[2:], scheduler=False)[
        0
    ]  # Megatron's has none
    before = ranks[0].start
    assert before.states.keys() == seen.start.states.keys()
    assert len(before.states) == 3 * (3 + 4 * 11)
    assert [key for key in before.states if not same(before.states[key], seen.start.states[key])] == []
    assert seen.losses == pytest.approx(ranks[0].losses, rel=TOLERANCE)


def test_megatron_goes_on_as_sgd_does(deepspeed_pool: WorkerPool, pool: WorkerPool, tmp_path: Path) -> None:
    """Its momenta are a plain optimizer's: no distributed one takes SGD."""
    model, training = FP32, Training(optimizer="plain", lr=1e-2)
    tuning = Tuning("llama", {**CONFIG, "vocab_size": model.vocab_size}, "fp32", 1, 2, lr=training.lr, momentum=0.9)
    data, ds = batches(model, training, 0, 4), str(tmp_path / "ds")
    ranks: list[Seen] = deepspeed_pool.run(
        f"{JOBS}:train_and_save", tuning, ds, data[:2], data[2:], world_size=2, timeout=TIMEOUT
    )
    megatron = converted(
        Path(ds), tmp_path / "mcore", "megatron", padded_vocab_size=model.vocab_size, transformer_impl="local",
        reference_config=described(tmp_path, tuning), lr_limits=(training.lr, training.min_lr),
    )  # fmt: skip
    seen = pool.run(
        muon_jobs.go_on_with_megatron, Session(model, Parallel(), training), str(megatron), "sgd", world_size=1, timeout=2 * TIMEOUT
    )[0]  # fmt: skip
    assert [seen.losses[3], seen.losses[4]] == pytest.approx(ranks[0].losses, rel=TOLERANCE)
    with pytest.raises(Unsupported, match="keeps moments of Adam"):
        converted(
            Path(ds), tmp_path / "other", "megatron", optimizer="distributed", padded_vocab_size=model.vocab_size,
            reference_config=described(tmp_path, tuning),
        )  # fmt: skip


LOWER = ("embed_tokens", "layers.0.", "layers.1.", "layers.2.")


@pytest.mark.parametrize(
    ("frozen", "stage", "way"), [(LOWER, 1, "megatron"), (("norm",), 3, "deepspeed")], ids=["lower", "norms"]
)
def test_a_run_that_trains_a_part_goes_on(
    frozen: tuple[str, ...], stage: int, way: str, deepspeed_pool: WorkerPool, tmp_path: Path
) -> None:
    """What Megatron meets first are norms where the lower layers are frozen; and where all norms are, stage 3 has an empty group."""
    tuning, ds = Tuning("llama", CONFIG, "bf16", stage, 2, frozen=frozen), tmp_path / "ds"
    data = batches(TinyGPT(), Training(), 0, 4)
    run: list[Seen] = deepspeed_pool.run(
        f"{JOBS}:train_and_save", tuning, str(ds), data[:2], data[2:], world_size=2, timeout=TIMEOUT
    )
    megatron = converted(
        ds, tmp_path / "mcore", "megatron", tp=1, pp=2, reference_config=described(tmp_path, tuning), transformer_impl="local",
        lr_limits=(1e-3, 1e-3),
    )  # fmt: skip
    verdict = verify(megatron, ReadOptions(), Depth.DEEP)
    assert verdict.intact, verdict.problems
    back = converted(megatron if way == "megatron" else ds, tmp_path / "back", "deepspeed", zero_stage=stage, dp=1)
    seen = load(deepspeed_pool, replace(tuning, dp=1), back, data[2:])[0]
    assert matrix_differences(run[0].start, seen.start) == []
    assert seen.losses == pytest.approx(run[0].losses, rel=2e-3)


@pytest.mark.slow
@pytest.mark.skipif(MEGATRON < (0, 18), reason="Muon of this kind came with 0.18")
def test_megatron_goes_on_as_deepspeeds_muon_does(deepspeed_pool: WorkerPool, pool: WorkerPool, tmp_path: Path) -> None:
    """Its momenta are Megatron's, put together; of them Megatron orthogonalizes gate and up as one, so that updates differ a little."""
    model, training = FP32, Training(optimizer="plain")
    config = {**CONFIG, "vocab_size": model.vocab_size}
    tuning = Tuning("llama", config, "fp32", 2, 2, lr=training.lr, muon=True)
    data, ds = batches(model, training, 0, 4), str(tmp_path / "ds")
    ranks: list[Seen] = deepspeed_pool.run(
        f"{JOBS}:train_and_save", tuning, ds, data[:2], data[2:], world_size=2, timeout=TIMEOUT
    )
    before = ranks[0].start.states
    assert len(before) == 2 * 7 * 4 + 3 * (2 + 1 + 2 * 4)
    megatron = converted(
        Path(ds), tmp_path / "mcore", "megatron", padded_vocab_size=model.vocab_size, transformer_impl="local",
        reference_config=described(tmp_path, tuning), lr_limits=(training.lr, training.min_lr),
    )  # fmt: skip
    seen = pool.run(
        muon_jobs.go_on_with_megatron, Session(model, Parallel(), training), str(megatron), muon_jobs.DEEPSPEEDS,
        world_size=1, timeout=2 * TIMEOUT,
    )[0]  # fmt: skip
    assert seen.losses[3] == pytest.approx(ranks[0].losses[0], rel=TOLERANCE)
    assert seen.losses[4] == pytest.approx(ranks[0].losses[1], rel=1e-4)
    held = seen.look.states[LOOK]
    first = {(name, "exp_avg"): one for (state, name), one in held.items() if state in ("exp_avg", "momentum_buffer")}
    for (name, state), one in split_by_hand(first).items():
        theirs = before[name, "momentum_buffer"] if (name, "momentum_buffer") in before else before[name, state]
        assert same(one, theirs[: len(one)]), name
    assert len(first) == 3 + 4 * 6
    back = converted(megatron, tmp_path / "back", "deepspeed", zero_stage=1, dp=1)
    again = load(deepspeed_pool, replace(tuning, stage=1, dp=1), back, data[2:], scheduler=False)[0]
    assert before.keys() == again.start.states.keys()
    assert [key for key in before if not same(before[key], again.start.states[key])] == []
    assert again.losses == pytest.approx(ranks[0].losses, rel=TOLERANCE)

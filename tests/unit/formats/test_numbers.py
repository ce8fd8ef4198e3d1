"""Numbers of a checkpoint that would become loops, lists and files: refused by name before anything is made of them."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Untrusted
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import parse_layout
from mcore_rlhf.models.hybrid import Pattern
from mcore_rlhf.models.meaning.bounds import MOST_LAYERS, MOST_RANKS, check_sizes
from tests.fuzz.child import Limits, command_line, run
from tests.helpers.conversions import GOLDENS
from tests.helpers.damage import copied, edit_args, edited
from tests.unit.formats.refusal import refused

HF = GOLDENS.parent / "huggingface" / "llama_tied_bf16_sharded"


@pytest.mark.parametrize(
    ("name", "arg"),
    [
        *(("tp1_bf16_do", arg) for arg in ("num_layers", "mtp_num_layers", "num_experts", "num_query_groups", "world_size")),
        *(("tp1_bf16_do", f"{axis}_parallel_size") for axis in ("data", "context", "tensor_model", "pipeline_model")),
        ("pp2_vpp2_bf16_do", "virtual_pipeline_model_parallel_size"),
        ("ep2dp2_moe_seq_bf16_do", "expert_model_parallel_size"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [10**9, 10**300, -(10**9)], ids=["large", "300 digits", "negative"])
def test_an_argument_that_no_run_has_is_named_with_its_file(tmp_path: Path, name: str, arg: str, value: int) -> None:
    source = copied(name, tmp_path)
    edit_args(source, **{arg: value})
    refused(source, LayoutMismatch, "model_optim_rng.pt", arg, "nothing has more than")


@pytest.mark.parametrize(
    ("arg", "value", "told"),
    [
        ("num_layers", True, "num_layers is True, where a number belongs"),
        ("rotary_base", float("nan"), "rotary_base is nan"),
        ("num_attention_heads", 0, "0 heads and"),
        ("num_attention_heads", 5, "5 heads and"),
        ("num_query_groups", 0, "0 query groups of"),
    ],
)
def test_an_argument_that_is_no_such_number_is_named(tmp_path: Path, arg: str, value: object, told: str) -> None:
    """They were taken for unsaid, and the checkpoint was intact."""
    source = copied("tp1_bf16_do", tmp_path)
    edit_args(source, **{arg: value})
    refused(source, LayoutMismatch, "model_optim_rng.pt", told)


def test_what_large_models_and_runs_have_is_believed() -> None:
    """The largest of today, several times over: Kimi-K2's experts, DeepNet's layers, runs of 100,000 GPUs."""
    check_sizes({"num_layers": 1000, "world_size": 100_000, "data_parallel_size": 100_000}, "args")
    check_sizes({"num_hidden_layers": 61, "n_routed_experts": 384, "num_attention_heads": 128}, "config.json")
    check_sizes({"num_hidden_layers": 256, "num_experts": 512, "num_layers": "many", "world_size": None}, "config.json")
    assert ParallelConfig(tp=8, pp=16, dp=768).world_size == 98_304
    assert ParallelConfig(dp=MOST_RANKS).world_size == MOST_RANKS


@pytest.mark.parametrize(
    "degrees", [{"tp": 1 << 10, "dp": 1 << 10}, {"pp": 100, "vpp": MOST_LAYERS}, {"dp": 10**5000}, {"vpp": 10**9}]
)
def test_degrees_are_bounded_together(degrees: dict[str, int]) -> None:
    with pytest.raises(LayoutMismatch, match="no run has more than"):
        ParallelConfig(**degrees)


def test_experts_of_all_layers_are_bounded_together() -> None:
    with pytest.raises(LayoutMismatch, match="4,000 layers of 4,000 experts"):
        check_sizes({"num_hidden_layers": 4000, "num_local_experts": 4000}, "config.json")


@pytest.mark.parametrize(
    "text",
    [
        "Et*1000000000|L", "E(t|)*100000L", "E((t*9999)*9999)*9999|L", f"Et*{'9' * 5000}L", f"Et*{'0' * 5000}9L",
        "E" + "t*9999" * 9999 + "L", "E" + "t" * 10**6 + "L",
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_layout_that_grows(text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_layout(text) and ParallelConfig(pipeline_layout=text)
    assert len(str(caught.value)) < 1000


def test_a_layout_as_long_as_the_deepest_model_is_read() -> None:
    assert [chunk.count("t") for chunk in parse_layout("Et*100|(t*100|)*38,t*100L")] == [100] * 40


@pytest.mark.parametrize("text", ["|" * 10**6, "x" * 10**6, "M" * 10**6])
def test_a_pattern_is_no_longer_than_a_model(text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Pattern.of(text)
    assert len(str(caught.value)) < 1000


def test_more_ranks_than_the_files_have_bytes_for(tmp_path: Path) -> None:
    """No number by itself is too large; a step with experts has random states of every rank, and a new one would be made for each."""
    source = copied("ep2dp2_moe_seq_bf16_do", tmp_path)
    edit_args(source, data_parallel_size=MOST_RANKS // 4)
    refused(source, LayoutMismatch, "32,768 ranks", "all its files together have", "MB")


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "num_local_experts", "num_attention_heads", "num_key_value_heads"]
)
def test_a_config_that_no_model_has(tmp_path: Path, field: str) -> None:
    source = config_of(tmp_path, **{field: 10**9})
    refused(source, LayoutMismatch, "config.json", field)


def config_of(folder: Path, **fields: object) -> Path:
    """Hugging Face's golden with other fields in its ``config.json``."""
    source = Path(shutil.copytree(HF, folder / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | fields))
    return source


@pytest.mark.parametrize(
    ("golden", "old", "new"),
    [
        ("verl/fsdp2_ws3", "_world_size_3_", "_world_size_1000000000_"),
        ("deepspeed/z1_fp32_tied_dp2", "zero_pp_rank_1_", "zero_pp_rank_1000000000_"),
        ("megatron/tp1_bf16_do", "mp_rank_00", "mp_rank_1000000000"),
        ("megatron/tp1_bf16_do", "iter_0000002", "iter_99999999999999999999"),
        ("huggingface/llama_tied_bf16_sharded", "-of-00002", "-of-1000000000"),
    ],
)
def test_names_of_files_that_count_to_a_billion(tmp_path: Path, golden: str, old: str, new: str) -> None:
    source = Path(shutil.copytree(GOLDENS.parent / golden, tmp_path / "source"))
    (source / "model.safetensors.index.json").unlink(missing_ok=True)
    found = [path for path in sorted(source.rglob("*"), reverse=True) if old in path.name]
    assert found
    for path in found:
        path.rename(path.with_name(path.name.replace(old, new)))
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / "target", ConvertOptions("hf", fsync=False))
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    "number",
    ["9" * 5000, "\u00b2", "999999999999999999"],
    ids=["5,000 digits", "a digit that is no number", "the largest"],
)
@pytest.mark.parametrize("golden", ["megatron/tp1_bf16_do", "deepspeed/z0_fp32_untied_dp1"])
def test_names_of_tensors_that_count(tmp_path: Path, golden: str, number: str) -> None:
    """Layers and experts of any number: the tensor is one that nobody knows, and nothing is counted up to it."""
    source = Path(shutil.copytree(GOLDENS.parent / golden, tmp_path / "source"))
    names = (
        "decoder.layers.{}.mlp.linear_fc1.weight",
        "model.layers.{}.mlp.experts.{}.up_proj.weight",
        "{}.weight",
        "a.weight{}",
    )
    for path in (*source.rglob("model_optim_rng.pt"), *source.rglob("mp_rank_00_model_states.pt")):
        with edited(path) as tree:
            for held in (tree.get("model"), tree.get("module")):
                if held is not None:
                    held.update({name.replace("{}", number): torch.ones(2) for name in names})
    for to in ("hf", "dcp", "universal"):
        with contextlib.suppress(CheckpointError):
            convert(source, tmp_path / to, ConvertOptions(to, write=WriteOptions(no_optimizer=True), fsync=False))


def test_half_a_character_in_a_tensors_name(tmp_path: Path) -> None:
    source = Path(shutil.copytree(GOLDENS.parent / "deepspeed" / "z0_fp32_untied_dp1", tmp_path / "source"))
    for path in source.rglob("mp_rank_00_model_states.pt"):
        with edited(path) as tree:
            tree["module"]["a\ud800b"] = torch.ones(2)
    refused(source, Untrusted, "half a character", "'a\\ud800b'")


ATTACKS = {
    "virtual stages": ("pp2_vpp2_bf16_do", {"virtual_pipeline_model_parallel_size": 10**9}),
    "next tokens": ("tp1_bf16_do", {"mtp_num_layers": 10**9}),
    "as many as are believed": ("tp1_bf16_do", {"mtp_num_layers": MOST_LAYERS, "num_experts": 32}),
    "ranks": ("ep2dp2_moe_seq_bf16_do", {"data_parallel_size": 10**9, "world_size": 2 * 10**9}),
    "groups": ("tp1_bf16_do", {"num_query_groups": 10**9, "num_attention_heads": 10**9}),
    "layout": ("pp2_vpp2_bf16_do", {"pipeline_model_parallel_layout": "E(t|)*999999999L"}),
    "pattern": ("tp1_bf16_do", {"hybrid_layer_pattern": "M|" * 10**6}),
}
COMMANDS = (
    "inspect source", "plan source --to hf", "verify source --deep", "diff source source", "report source -o page.html",
    "convert source out --to hf --no-fsync", "convert source out --to megatron --tp 1 --pp 1 --no-fsync",
    "convert source out --to megatron-dist --no-fsync",
)  # fmt: skip


_MOST_MORE = 400 << 20


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_command_ends_soon_and_in_little_memory(tmp_path: Path, attack: str) -> None:
    """Each in a child of this process, whose memory is measured from outside."""
    name, values = ATTACKS[attack]
    here = tmp_path / "here"
    here.mkdir()
    edit_args(copied(name, here), **values)
    limits = Limits(memory=1 << 50, cpu=20, wall=30)
    before = (
        int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    )  # which the child has from the start
    ended = run([attack], here, limits, main=lambda _: max(command_line(line.split()) for line in COMMANDS))
    assert not ended.hung
    assert ended.code in (0, 1, 2), ended.output
    assert "This is a bug" not in ended.output
    assert ended.peak - before < _MOST_MORE
    assert len(ended.output) < 100_000

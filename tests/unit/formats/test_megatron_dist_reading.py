"""Reading what real Megatron and megatron-core wrote as torch_dist: every element, against the legacy save of the same run."""

from __future__ import annotations

import pickle
import shutil
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.core.catalog import dtype_of
from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.errors import Corrupt
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.megatron_dist.folders import CONFIG_TEXT
from mcore_rlhf.formats.registry import detect, open_checkpoint
from mcore_rlhf.storage.dcp.writer import Distcp, Item, ObjectItem, TensorItem, dcp_metadata, records, saved
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.checkpoint import Depth, verify
from mcore_rlhf.verify.differ import Differ
from tests.helpers.catalog_values import tensor_of
from tests.helpers.conversions import GOLDENS
from tests.helpers.damage import edited
from tests.helpers.dist_reader import DistReading, read_whole
from tests.helpers.plain_load import plain_save

DIST = GOLDENS.parent / "megatron_dist"
FULLY, BUCKETS = DIST / "tp2pp2dp2_fully_reshardable", DIST / "tp2pp2dp2_dp_reshardable"
LEGACY = GOLDENS / "tp2pp2dp2_bf16_do"


def opened(path: Path, **options: Any) -> Source:
    return open_checkpoint(path, ReadOptions(**options))


def differences(a: Source, b: Source) -> list[Any]:
    with OpenFiles(a.root) as files_a, OpenFiles(b.root) as files_b:
        return Differ(a, b, files_a, files_b).compare().differences


@pytest.mark.parametrize("path", [FULLY, BUCKETS], ids=["fully", "buckets"])
def test_it_is_the_run_that_the_legacy_format_holds(path: Path) -> None:
    """Written by Megatron-LM at the same iteration of the same run, in three formats."""
    dist, legacy = opened(path), opened(LEGACY)
    assert differences(dist, legacy) == []
    for field in ("model", "parallel", "states", "optimizer"):
        assert getattr(dist, field) == getattr(legacy, field), field
    for field in ("iteration", "release", "groups", "scheduler", "grad_scaler", "other"):
        assert getattr(dist.state, field) == getattr(legacy.state, field), field
    assert dist.family.order == legacy.family.order  # type: ignore[attr-defined]
    same = {key: value for key, value in legacy.state.args.items() if "ckpt" not in key and key not in ("dump", "save")}
    assert {key: dist.state.args[key] for key in same} == same


def test_a_folder_of_megatron_core_0_15_says_what_it_has_by_a_class_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``MCoreMetadata`` is torch's ``Metadata`` with ``mcore_data`` more."""
    name = "megatron.core.dist_checkpointing.strategies.torch"
    module = ModuleType(name)
    derived = type("MCoreMetadata", (Metadata,), {"__module__": name})
    module.MCoreMetadata = derived  # type: ignore[attr-defined]
    for at in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:at])
        monkeypatch.setitem(sys.modules, part, module if part == name else ModuleType(part))
    root = Path(shutil.copytree(FULLY, tmp_path / "root"))
    (file,) = root.glob("iter_*/.metadata")
    with file.open("rb") as opened_file:
        stored = pickle.load(opened_file)
    made = derived.__new__(derived)
    vars(made).update(vars(stored), mcore_data={"model.weight": {"nd_reformulated_orig_global_shape": (4, 2)}})
    file.write_bytes(pickle.dumps(made))
    assert differences(opened(root), opened(FULLY)) == []
    assert verify(root, ReadOptions()).intact


def test_random_states_are_those_of_the_same_ranks() -> None:
    dist, legacy = opened(FULLY).family.shards, opened(LEGACY).family.shards  # type: ignore[attr-defined]
    assert [shard.at for shard in dist] == [shard.at for shard in legacy]
    for ours, theirs in zip(dist, legacy, strict=True):
        a, b = (torch_values(shard.materialize(shard.top["rng_state"]))[0] for shard in (ours, theirs))
        assert a["random_rng_state"] == b["random_rng_state"]
        assert torch.equal(a["torch_rng_state"], b["torch_rng_state"])
        assert {k: v.tolist() for k, v in a["rng_tracker_states"].items()} == {
            k: v.tolist() for k, v in b["rng_tracker_states"].items()
        }


@pytest.mark.parametrize("name", ["experts_ep2", "plain_tp2"])
def test_small_ones_of_other_kinds_are_whole(name: str) -> None:
    verdict = verify(DIST / name, ReadOptions(), Depth.DEEP)
    assert verdict.intact, verdict.problems.describe()
    assert verdict.source is not None
    assert verdict.source.states == ("master", "exp_avg", "exp_avg_sq")
    assert verdict.source.optimizer == ("plain" if name == "plain_tp2" else "distributed")


def test_a_plain_optimizer_against_torchs_own_reader() -> None:
    source, whole = opened(DIST / "plain_tp2"), read_whole(DIST / "plain_tp2")
    stored = whole.tensors["optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.weight"]
    for layer in range(2):
        name = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
        assert torch.equal(tensor_of(source, name, "master"), stored[layer])
        assert torch.equal(tensor_of(source, name, "param"), stored[layer].bfloat16())


def test_experts_in_flat_buckets_against_torchs_own_reader() -> None:
    """The masters of experts lie in buckets; rounded, they are the stacked weights that torch reads."""
    source, whole = opened(DIST / "experts_ep2"), read_whole(DIST / "experts_ep2")
    weights = whole.tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    for layer, expert in product(range(2), range(4)):
        name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"
        assert torch.equal(tensor_of(source, name, "master").bfloat16(), weights[layer, expert])
    assert [group.expert for group in source.state.groups] == [False, False, True]


def test_without_the_optimizer_only_weights_are_read() -> None:
    source = opened(BUCKETS, optimizer=False)
    assert (source.states, source.optimizer, source.state.groups) == ((), None, ())
    assert {name.state for name in source.catalog} == {"param"}


def test_a_known_fault_of_megatron_core_is_named_and_what_it_spoils_is_listed() -> None:
    """Real megatron-core 0.16.1 wrote it: three data-parallel ranks, overlapping reduction, several padded buckets."""
    verdict = verify(DIST / "corrupt_dp3", ReadOptions(), Depth.DEEP)
    first = verdict.problems.found[0]
    assert first.kind is Corrupt
    assert "master, exp_avg, exp_avg_sq" in first.message
    assert "decoder.layers.0.mlp.linear_fc1.weight" in first.message
    assert "output_layer.weight" not in first.message  # the first bucket is right
    for word in ("fully_reshardable", "overlap", "several padded buckets", "--no-optimizer"):
        assert word in first.advice
    assert {problem.advice for problem in verdict.problems.found} == {first.advice}
    assert verify(FULLY, ReadOptions(), Depth.DEEP).intact


def test_wrapped_models_are_read_as_well(tmp_path: Path) -> None:
    """NeMo saves the wrapper's names: ``module.decoder…`` and ``optimizer.state.exp_avg.module.decoder…``."""

    def wrapped(key: str) -> str:
        if key.startswith("optimizer.state."):
            head, state, rest = "optimizer.state", *key.removeprefix("optimizer.state.").split(".", 1)
            return f"{head}.{state}.module.{rest}"
        return key if key.startswith("rng_state") else f"module.{key}"

    root = by_hand(read_whole(FULLY), tmp_path, {}, wrapped)
    assert differences(opened(root), opened(FULLY)) == []


def test_a_fault_that_no_master_tells_is_said(tmp_path: Path) -> None:
    """Masters in fp16 are not their parameters rounded, and remainders fit to any."""
    source = tmp_path / "source"
    shutil.copytree(DIST / "corrupt_dp3", source)
    with edited(next(source.rglob("common.pt"))) as tree:
        vars(tree["args"]).update(use_precision_aware_optimizer=True, main_params_dtype=torch.float16)
    said = [
        text for _, text in open_checkpoint(source, ReadOptions()).notes.lines if "which no master tells here" in text
    ]
    assert len(said) == 1
    assert "Go back to a step that was saved as torch or dp_reshardable" in said[0]


def test_without_opaque_values_a_live_model_has_them_all_the_same(tmp_path: Path) -> None:
    """``--ckpt-drop-redundant-extra-state`` of Megatron-LM's main branch leaves them out; 0.16 to 0.19 end a load that misses one."""
    whole = read_whole(FULLY)
    names = {key for key in whole.objects if "_extra_state" in key}
    for key in names:
        del whole.objects[key]
    source = opened(by_hand(whole, tmp_path / "root", {}))
    assert names
    assert differences(source, opened(FULLY)) == []
    assert source.family.order == opened(FULLY).family.order  # type: ignore[attr-defined]
    convert(tmp_path / "root", tmp_path / "target", ConvertOptions("megatron-dist", fsync=False))
    assert names <= read_whole(tmp_path / "target").objects.keys()


def by_hand(whole: DistReading, root: Path, flat: dict[str, tuple[int, ...]], renamed: Any = str) -> Path:
    """A checkpoint in one file: of tensors in ``flat``, the last dimension is cut at an odd place, as ranks would."""
    folder = root / "iter_0000002"
    folder.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("2")
    (folder / "metadata.json").write_text(CONFIG_TEXT)
    plain_save(whole.common, folder / "common.pt")
    items: list[Item] = [ObjectItem(renamed(key), saved(value, renamed(key))) for key, value in whole.objects.items()]
    data: dict[str, torch.Tensor] = {}
    for key, tensor in whole.tensors.items():
        name, dtype = renamed(key), dtype_of(str(tensor.dtype))
        for offset, part in ranges(tensor) if key in flat else [((0,) * tensor.dim(), tensor)]:
            item = TensorItem(name, dtype, offset, tuple(part.shape))
            items.append(item)
            data[item.key] = part.contiguous()
    shapes = {renamed(key): tuple(tensor.shape) for key, tensor in whole.tensors.items()}
    write(folder, items, data)
    (folder / ".metadata").write_bytes(dcp_metadata(shapes, {"__0_0.distcp": items}))
    return root


def ranges(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Every cell in two ranges."""
    cut = tensor.shape[-1] // 3 + 1
    found = []
    for at in product(*map(range, tensor.shape[:-1])):
        for start, stop in ((0, cut), (cut, tensor.shape[-1])):
            found.append(((*at, start), tensor[at][start:stop].reshape([1] * len(at) + [stop - start])))
    return found


def write(folder: Path, items: list[Item], data: dict[str, torch.Tensor]) -> None:
    from mcore_rlhf.storage.checksum import crc32

    writer = Distcp(items).create(folder / "__0_0.distcp")
    crcs = {}
    for record in records("__0_0.distcp", items):
        raw = data[record.key].view(torch.uint8).numpy().tobytes()
        writer.write(record.key, 0, memoryview(raw))
        crcs[record.key] = crc32(raw)
    writer.finish(crcs)


def test_a_root_with_both_formats_goes_by_its_tracker(tmp_path: Path) -> None:
    for iteration, golden in ((1, LEGACY), (3, FULLY)):
        (tmp_path / f"iter_{iteration:07d}").symlink_to(golden / "iter_0000002")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert detect(tmp_path).name == "megatron-dist"
    for text, name in (("1", "megatron"), ("3", "megatron-dist")):
        tracker.write_text(text)
        assert detect(tmp_path).name == name


def test_a_model_without_arguments_is_read_by_its_keys(tmp_path: Path) -> None:
    """Transformer Engine's names are the keys' own, and the random states tell the degrees."""
    whole = read_whole(FULLY)
    whole.common.pop("args")
    source = opened(by_hand(whole, tmp_path / "root", {}))
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in {p.name for p in source.model.params}
    assert (source.parallel.tp, source.parallel.pp) == (2, 2)
    assert any("stores no args" in text for _, text in source.notes.lines)
    legacy = opened(LEGACY)
    assert source.model.num_layers == legacy.model.num_layers
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    assert torch.equal(tensor_of(source, name, "exp_avg"), tensor_of(legacy, name, "exp_avg"))
    assert replace(source.parallel, dp=2) == legacy.parallel

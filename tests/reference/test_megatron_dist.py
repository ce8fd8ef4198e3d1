"""Real megatron-core writes torch_dist, we read it; we write it, real megatron-core loads it on another layout and trains on."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.demo.versions import MEGATRON
from mcore_rlhf.demo.workers import WorkerError, WorkerPool
from mcore_rlhf.errors import CheckpointError, LayoutMismatch
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.will_resume import Forecast, forecast, loader_named
from mcore_rlhf.models.spec import ParamRule, Rules
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.trainers.resuming import Outcome, Thing
from mcore_rlhf.trainers.settings_file import read_settings
from mcore_rlhf.verify.checkpoint import Depth, verify
from mcore_rlhf.verify.differ import Differ
from tests.helpers.damage import flip_a_bit
from tests.reference import dist_jobs
from tests.reference.cases import (
    ADAM,
    CUBE,
    LATENT,
    LOSS_TOLERANCE,
    MOE,
    PLAIN,
    SAME_ROWS,
    SMALL_BUCKETS,
    THIN_EXPERTS,
    TIED,
    TP2_MOE,
    WIDE,
)  # fmt: skip
from tests.reference.dist_jobs import DP_RESHARDABLE, FULLY_RESHARDABLE, MODEL_SPACE, DistSession, observe_dist
from tests.reference.engine_jobs import load_and_train
from tests.reference.lab import TIMEOUT, Trained, layout_options, together
from tests.reference.merge import bits_equal, differences
from tests.reference.observing import END, LOOK, Session, observe


@dataclass(frozen=True)
class Case:
    """A run that saves both of Megatron's formats at one iteration, and layouts on which what we make of it is loaded.

    Args:
        name: Of the test.
        model, parallel, training: The run.
        sharding: How megatron-core stores the distributed optimizer.
        targets: Layouts to which we convert; only the first two in the quick tests.
        metadata: More of the content's metadata.
        slow: Whether it is left out of the quick tests.
        frozen: Parts of the names of parameters that are not trained.
    """

    name: str
    model: TinyGPT
    parallel: Parallel
    targets: tuple[Parallel, ...]
    training: Training = ADAM
    sharding: str = FULLY_RESHARDABLE
    metadata: tuple[tuple[str, Any], ...] = ()
    slow: bool = False
    frozen: tuple[str, ...] = ()


PACKED = replace(MOE, moe_grouped_gemm=True)
MIXED = replace(
    MOE, moe_shared_expert_intermediate_size=32, moe_router_enable_expert_bias=True, moe_layer_freq=(0, 1, 0, 1)
)
GPT2 = replace(
    SAME_ROWS, gated=False, normalization="LayerNorm", add_bias_linear=True, num_query_groups=None,
    position_embedding_type="learned_absolute",
)  # fmt: skip
EP2 = Parallel(ep=2, dp=2)
APART: tuple[tuple[str, Any], ...] = (("non_homogeneous_layers", True),)
SINGLY: tuple[tuple[str, Any], ...] = (("singleton_local_shards", True),)
LOWER = ("embedding", "layers.0.", "layers.1.")
CASES = [
    Case("cube", SAME_ROWS, CUBE, (CUBE, Parallel(tp=4), Parallel(), Parallel(tp=2), Parallel(pp=2))),
    Case("cube_buckets", SAME_ROWS, CUBE, (CUBE,), sharding=DP_RESHARDABLE),
    Case("several_buckets", SAME_ROWS, Parallel(dp=2), (Parallel(tp=2),), SMALL_BUCKETS, DP_RESHARDABLE),
    Case("virtual_stages", SAME_ROWS, Parallel(pp=2, vpp=2, dp=2), (Parallel(tp=2),), WIDE, sharding=DP_RESHARDABLE, slow=True),
    Case("tied", TIED, Parallel(tp=2, pp=2), (Parallel(pp=2),)),
    Case("plain", SAME_ROWS, Parallel(tp=2), (Parallel(pp=2),), PLAIN),
    Case("experts", MOE, EP2, (EP2, Parallel())),
    Case("experts_buckets", MOE, EP2, (EP2,), sharding=DP_RESHARDABLE, slow=True),
    Case("sinks", replace(MOE, gpt_oss=True, add_bias_linear=True), EP2, (Parallel(tp=2, ep=2, etp=1, sequence_parallel=True),),
         slow=True),
    Case("mixed_layers", MIXED, Parallel(pp=2, ep=2, dp=2), (EP2,), slow=True),
    Case("few_mixed_layers", replace(MOE, num_layers=2, moe_layer_freq=(0, 1)), EP2, (Parallel(),)),
    Case("packed", PACKED, EP2, (Parallel(ep=4, dp=4),), WIDE, slow=True),
    Case("packed_tp2", PACKED, TP2_MOE, (EP2,), slow=True),
    Case("thin_experts", MOE, THIN_EXPERTS, (TP2_MOE,), sharding=DP_RESHARDABLE, slow=True),
    Case("latent", LATENT, Parallel(tp=2, dp=2), (Parallel(pp=2),), slow=True),
    Case("next_tokens", replace(SAME_ROWS, mtp_num_layers=1), Parallel(pp=2), (Parallel(tp=2),), slow=True),
    Case("gpt2", GPT2, Parallel(tp=2), (Parallel(pp=2),), slow=True),
    Case("fp16", replace(SAME_ROWS, dtype="fp16"), Parallel(tp=2), (Parallel(pp=2),), slow=True),
    Case("fp32_plain", replace(SAME_ROWS, dtype="fp32"), Parallel(tp=2), (Parallel(pp=2),), PLAIN, slow=True),
    Case("experts_plain", MOE, EP2, (Parallel(),), PLAIN, slow=True),
    Case("singleton", SAME_ROWS, Parallel(tp=2), (Parallel(pp=2),), metadata=(("singleton_local_shards", True),), slow=True),
    Case("context", SAME_ROWS, Parallel(cp=2, tp=2), (Parallel(pp=2),), sharding=DP_RESHARDABLE, slow=True),
    Case("no_optimizer", SAME_ROWS, Parallel(tp=2), (Parallel(pp=2),), Training(optimizer="none"), slow=True),
    Case("frozen_layers", SAME_ROWS, Parallel(tp=2), (Parallel(tp=2), Parallel(pp=2)), metadata=APART, frozen=LOWER),
    Case("frozen_expert", MOE, EP2, (EP2, Parallel(pp=2)), metadata=SINGLY, frozen=("layers.0.", "local_experts.1.")),
    Case("frozen_buckets", SAME_ROWS, Parallel(pp=2, vpp=2), (Parallel(tp=2),), WIDE, sharding=DP_RESHARDABLE, frozen=LOWER),
    Case("frozen_expert_buckets", MOE, EP2, (EP2,), sharding=DP_RESHARDABLE, frozen=("local_experts.3.", "embedding")),
    Case("frozen_stage", SAME_ROWS, Parallel(pp=2), (Parallel(pp=2), Parallel(tp=2)), metadata=APART, frozen=LOWER),
    Case("frozen_next_tokens", replace(SAME_ROWS, mtp_num_layers=1), Parallel(pp=2), (Parallel(tp=2),), metadata=APART,
         frozen=("layers.0.self", "output"), slow=True),
    Case("frozen_space", SAME_ROWS, CUBE, (Parallel(tp=2),), sharding=MODEL_SPACE, metadata=APART, frozen=("layers.0.",)),
    Case("rows_space", SAME_ROWS, Parallel(tp=2, dp=2), (Parallel(tp=2, dp=2), Parallel()), sharding=MODEL_SPACE),
    Case("experts_space", MOE, EP2, (EP2, Parallel()), sharding=MODEL_SPACE),
    Case("stages_space", SAME_ROWS, CUBE, (CUBE, Parallel(pp=2)), sharding=MODEL_SPACE),
]  # fmt: skip


@dataclass
class DistLab:
    """Runs the cases, each once."""

    pool: WorkerPool
    folder: Path
    trained: dict[str, Trained]

    def train(self, case: Case) -> Trained:
        """Train from the start, and save both formats at iteration 2."""
        if case.name not in self.trained:
            root = self.folder / case.name
            wanted = dist_jobs.written(case.model, case.parallel, case.training, root, case.sharding)
            self.trained[case.name] = self._run(replace(wanted, metadata=case.metadata, frozen=case.frozen), root)
        return self.trained[case.name]

    def resume(self, root: Path, case: Case, parallel: Parallel, *, rng: bool = True) -> Trained:
        """Load a torch_dist checkpoint with megatron-core, and train on."""
        wanted = dist_jobs.resumed(Session(case.model, parallel, case.training), root)
        return self._run(replace(wanted, rng=rng, frozen=case.frozen), root)

    def converted(self, source: Path, name: str, to: str, **write: Any) -> tuple[Path, Job]:
        target = self.folder / name
        options = ConvertOptions(to=to, write=WriteOptions(**write), fsync=False)
        return target, convert(source, target, options)

    def _run(self, wanted: DistSession, root: Path) -> Trained:
        world = wanted.session.parallel.world_size
        return together(wanted.session, root, self.pool.run(observe_dist, wanted, world_size=world, timeout=TIMEOUT))


@pytest.fixture(scope="module")
def dist_lab(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> DistLab:
    return DistLab(pool, tmp_path_factory.mktemp("dist"), {})


def params(cases: list[Case]) -> list[Any]:
    return [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.slow else []) for c in cases]


def targets(cases: list[Case]) -> list[Any]:
    """Up to two of each; of a run without frozen parts not its own layout, where there is another: ``cube`` has that for all."""

    def is_slow(case: Case, number: int) -> bool:
        spared = (
            case.name != "cube" and not case.frozen and len(case.targets) > 1 and case.targets[number] == case.parallel
        )
        return case.slow or number > 1 or spared

    return [
        pytest.param(
            case, target, id=f"{case.name}-{number}", marks=[pytest.mark.slow] if is_slow(case, number) else []
        )
        for case in cases
        for number, target in enumerate(case.targets)
    ]


def opened(path: Path) -> Source:
    return open_checkpoint(path, ReadOptions())


def assert_equal(a: Source, b: Source) -> None:
    """The same tensors, bit for bit, the same model and the same training state."""
    with OpenFiles(a.root) as files_a, OpenFiles(b.root) as files_b:
        result = Differ(a, b, files_a, files_b).compare()
    assert result.equal, result.differences[:3]
    assert (a.model, a.parallel, a.states, a.optimizer) == (b.model, b.parallel, b.states, b.optimizer)
    assert a.state.groups == b.state.groups
    assert a.state.scheduler == b.state.scheduler
    assert a.state.grad_scaler == b.state.grad_scaler
    assert a.state.iteration == b.state.iteration == LOOK


@pytest.mark.parametrize("case", params(CASES))
def test_what_megatron_core_wrote_is_read_as_its_legacy_save(case: Case, dist_lab: DistLab) -> None:
    root = dist_lab.train(case).root
    dist, legacy = opened(root / "dist"), opened(root / "legacy")
    assert (dist.format, legacy.format) == ("megatron-dist", "megatron")
    assert_equal(dist, legacy)


@pytest.mark.parametrize(("case", "target"), targets(CASES))
def test_megatron_core_loads_ours_on_another_layout_and_trains_on(
    case: Case, target: Parallel, dist_lab: DistLab
) -> None:
    """From the legacy save, from megatron-core's own torch_dist, and back again: always the state that was saved."""
    source = dist_lab.train(case)
    name = f"{case.name}_{hash(target)}"
    kind = {"optimizer_sharding": case.sharding} if case.sharding == MODEL_SPACE else {}
    layout = {**layout_options(target, case.model.num_layers), **kind}
    root, job = dist_lab.converted(source.root / "legacy", f"{name}_a", "megatron-dist", **layout)
    assert job.lossless
    resumed = dist_lab.resume(root, case, target)
    assert differences(source.models[LOOK], resumed.models[LOOK]) == []
    assert resumed.groups == source.groups
    assert resumed.scheduler == source.scheduler
    assert resumed.scaler[:1] == source.scaler[:1]
    tolerance = LOSS_TOLERANCE[case.model.dtype]
    assert resumed.losses == pytest.approx({step: source.losses[step] for step in (3, 4)}, rel=tolerance)
    if target == case.parallel:
        assert resumed.losses == {step: source.losses[step] for step in (3, 4)}
        assert differences(source.models[END], resumed.models[END]) == []
    other, _ = dist_lab.converted(source.root / "dist", f"{name}_b", "megatron-dist", **layout)
    assert_equal(opened(root), opened(other))
    back, _ = dist_lab.converted(other, f"{name}_c", "megatron", **layout_options(case.parallel, case.model.num_layers))
    assert_equal(opened(back), opened(source.root / "legacy"))


BUCKETED = [case for case in CASES if case.sharding == DP_RESHARDABLE]
RESHAPED = {
    "cube_buckets": Parallel(tp=4, dp=2),
    "experts_buckets": Parallel(tp=2, ep=2, etp=1, sequence_parallel=True),
}


@pytest.mark.parametrize("case", params(BUCKETED))
def test_megatron_core_loads_our_flat_buckets_and_trains_on(case: Case, dist_lab: DistLab) -> None:
    """At the same layout they are what it writes itself, chunk by chunk; at another one it could not have made them."""
    source, kind = dist_lab.train(case), {"optimizer_sharding": DP_RESHARDABLE}
    root, job = dist_lab.converted(source.root / "legacy", f"{case.name}_flat", "megatron-dist", **kind)
    assert job.lossless
    assert chunks_of(root) == chunks_of(source.root / "dist")
    assert_equal(opened(root), opened(source.root / "dist"))
    resumed = dist_lab.resume(root, case, case.parallel)
    assert differences(source.models[LOOK], resumed.models[LOOK]) == []
    assert (resumed.groups, resumed.scheduler) == (source.groups, source.scheduler)
    assert resumed.losses == {step: source.losses[step] for step in (3, 4)}
    assert differences(source.models[END], resumed.models[END]) == []
    target = RESHAPED.get(case.name)
    if target is not None:
        layout = layout_options(target, case.model.num_layers)
        root, _ = dist_lab.converted(source.root / "dist", f"{case.name}_reshaped", "megatron-dist", **layout, **kind)
        resumed = dist_lab.resume(root, case, target)
        assert differences(source.models[LOOK], resumed.models[LOOK]) == []
        tolerance = LOSS_TOLERANCE[case.model.dtype]
        assert resumed.losses == pytest.approx({step: source.losses[step] for step in (3, 4)}, rel=tolerance)


def test_what_of_flat_buckets_was_frozen_is_asked_where_values_do_not_tell(dist_lab: DistLab) -> None:
    """Norms that training has not moved yet are all alike: one layer's may lie where another's would."""
    case = Case("alike", SAME_ROWS, Parallel(dp=2), (), sharding=DP_RESHARDABLE, frozen=("layers.0.",))
    root = dist_lab.train(case).root
    with pytest.raises(
        LayoutMismatch, match=r"decoder\.layers\.0\..*norm\.weight, decoder\.layers\.1\..*norm\.weight cannot be told"
    ):
        opened(root / "dist")
    told = open_checkpoint(root / "dist", ReadOptions(rules=Rules((ParamRule("decoder.layers.0.*", trainable=False),))))
    assert_equal(told, opened(root / "legacy"))


def test_a_stage_whose_buffers_are_gone_was_not_frozen(dist_lab: DistLab, tmp_path: Path) -> None:
    """Megatron itself counts the buffers of each group: a frozen stage has none."""
    source = dist_lab.train(next(case for case in CASES if case.name == "frozen_buckets")).root / "dist"
    root = Path(shutil.copytree(source, tmp_path / "less"))
    assert not opened(root).model.params[0].trainable
    file = next(root.glob("iter_*/.metadata"))
    metadata = pickle.loads(file.read_bytes())
    gone = [key for key in metadata.state_dict_metadata if "dp_group_idx_1.gbuf_idx" in key]
    for key in gone:
        del metadata.state_dict_metadata[key]
    metadata.storage_data = {at: place for at, place in metadata.storage_data.items() if at.fqn not in gone}
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="data-parallel group"):
        opened(root)


def forecast_of(root: Path, *options: str) -> Forecast:
    """What ``will-resume`` says of a run with such options."""
    file = root.parent / "arguments.txt"
    file.write_text(" ".join(("--use-mcore-models", *options)))
    return forecast(root, loader_named("megatron-lm")[0], read_settings(file))


def test_will_resume_says_that_adam_begins_anew_where_the_first_rank_trains_nothing(dist_lab: DistLab) -> None:
    case = next(case for case in CASES if case.name == "frozen_stage")
    source = dist_lab.train(case)
    resumed = dist_lab.resume(source.root / "dist", case, case.parallel)
    assert resumed.losses != {step: source.losses[step] for step in (3, 4)}
    said = [one.row for one in forecast_of(source.root / "dist").roles[""] if one.row.outcome.is_loss]
    assert [(row.outcome, "bias correction begins anew" in row.why) for row in said] == [(Outcome.ANEW, True)]
    ours, _ = dist_lab.converted(source.root / "dist", "frozen_stage_ours", "megatron-dist")
    assert forecast_of(ours).resumes


@pytest.mark.parametrize(
    ("training", "sharding"), [(ADAM, DP_RESHARDABLE), (ADAM, FULLY_RESHARDABLE), (PLAIN, FULLY_RESHARDABLE)]
)
@pytest.mark.parametrize(("was", "now"), [("bf16", "fp16"), ("fp32", "bf16")])
def test_will_resume_says_what_another_type_does(
    training: Training, sharding: str, was: str, now: str, dist_lab: DistLab
) -> None:
    case = Case(
        f"{training.optimizer}_{sharding}_{was}", replace(SAME_ROWS, dtype=was), Parallel(), (), training, sharding
    )
    root, other = dist_lab.train(case).root, replace(case, model=replace(case.model, dtype=now))
    loads = {
        "dist": lambda: dist_lab.resume(root / "dist", other, case.parallel, rng=False),
        "legacy": lambda: dist_lab.pool.run(
            observe,
            Session(other.model, case.parallel, training, load=str(root / "legacy")),
            world_size=1,
            timeout=TIMEOUT,
        ),
    }
    for kind, load in loads.items():
        found = forecast_of(root / kind, f"--{now}")
        assert Thing.DTYPE in {one.thing for one in found.roles[""]}
        if found.stops:
            with pytest.raises(WorkerError):
                load()
        else:
            load()


@pytest.mark.skipif(MEGATRON < (0, 17, 1), reason="integrity.json came with 0.17.1")
def test_megatron_core_verifies_our_sums(dist_lab: DistLab) -> None:
    """And finds a byte that was changed."""
    source = dist_lab.train(next(case for case in CASES if case.name == "cube_buckets"))
    root, _ = dist_lab.converted(source.root / "dist", "summed", "megatron-dist", integrity=True)
    folder = next(root.glob("iter_*"))
    assert dist_lab.pool.run(dist_jobs.found_by_integrity, folder, world_size=1, timeout=TIMEOUT) == [""]
    damaged = folder / "__1_0.distcp"
    flip_a_bit(damaged)
    (found,) = dist_lab.pool.run(dist_jobs.found_by_integrity, folder, world_size=1, timeout=TIMEOUT)
    assert "__1_0.distcp: hash mismatch" in found


def chunks_of(root: Path) -> dict[str, tuple[Any, Any, frozenset[Any]]]:
    """Shape, dtype and chunks of every tensor, as torch's own DCP reads them."""
    from torch.distributed.checkpoint import FileSystemReader

    found = FileSystemReader(next(root.glob("iter_*"))).read_metadata().state_dict_metadata
    return {
        fqn: (item.size, item.properties.dtype, frozenset((tuple(c.offsets), tuple(c.sizes)) for c in item.chunks))
        for fqn, item in found.items()
        if hasattr(item, "chunks")
    }


def test_megatron_core_spoils_the_optimizer_of_a_run_with_padded_buckets_and_we_say_so(dist_lab: DistLab) -> None:
    """Its own resume goes wrong without a word; the legacy save of the same step is right."""
    model = replace(SAME_ROWS, ffn_hidden_size=90, num_layers=3)
    case = Case("padded", model, Parallel(dp=3), (), replace(SMALL_BUCKETS, global_batch_size=12))
    source = dist_lab.train(case)
    resumed = dist_lab.resume(source.root / "dist", case, case.parallel)
    spoilt = {key for key in source.models[LOOK] if not bits_equal(source.models[LOOK][key], resumed.models[LOOK][key])}
    assert {state for state, _ in spoilt} == {"master", "exp_avg", "exp_avg_sq"}
    assert resumed.losses[4] != source.losses[4]
    verdict = verify(source.root / "dist", ReadOptions(), Depth.DEEP)
    first = verdict.problems.found[0]
    assert "fully_reshardable" in first.advice
    named = set(first.message.rpartition(": ")[2].split(", "))
    assert named == {name for state, name in spoilt if state == "master"}
    assert verify(source.root / "legacy", ReadOptions(), Depth.DEEP).intact
    with pytest.raises(CheckpointError, match="fully_reshardable"):
        dist_lab.converted(source.root / "dist", "padded_refused", "megatron")
    dist_lab.converted(source.root / "dist", "padded_weights", "megatron", no_optimizer=True)
    healthy, _ = dist_lab.converted(source.root / "legacy", "padded_ours", "megatron-dist")
    assert dist_lab.resume(healthy, case, case.parallel).losses == {step: source.losses[step] for step in (3, 4)}


@pytest.mark.parametrize("name", ["cube_buckets", "experts"])
def test_the_engine_loads_megatron_cores_own_straight_into_a_live_model(name: str, dist_lab: DistLab) -> None:
    """No conversion, no file: another layout, and flat buckets that Megatron itself refuses there."""
    case = next(case for case in CASES if case.name == name)
    source = dist_lab.train(case)
    target = Parallel(pp=2)
    session = Session(case.model, target, case.training, load=str(source.root / "dist"))
    loaded = dist_lab.pool.run(load_and_train, session, world_size=target.world_size, timeout=TIMEOUT)
    found = together(session, source.root, [rank.seen for rank in loaded])
    assert differences(source.models[LOOK], found.models[LOOK]) == []
    assert found.losses == pytest.approx({step: source.losses[step] for step in (3, 4)}, rel=LOSS_TOLERANCE["bf16"])


def test_megatron_core_loads_what_came_from_another_family(dist_lab: DistLab) -> None:
    """Through DeepSpeed's universal format, Hugging Face's names, and back: every key that Megatron-core asks for is there."""
    case = next(case for case in CASES if case.name == "cube")
    source = dist_lab.train(case)
    universal, _ = dist_lab.converted(source.root / "legacy", "family_universal", "universal")
    target = Parallel(tp=2, dp=2)
    layout = layout_options(target, case.model.num_layers)
    root, _ = dist_lab.converted(universal, "family_dist", "megatron-dist", transformer_impl="local", **layout)
    resumed = dist_lab.resume(root, case, target, rng=False)  # fresh ones are a GPU's
    words = case.model.vocab_size
    for (state, name), tensor in source.models[LOOK].items():
        found = resumed.models[LOOK][state, name]
        rows = slice(0, words) if name in ("embedding.word_embeddings.weight", "output_layer.weight") else slice(None)
        assert bits_equal(found[rows], tensor[rows]), (state, name)
    assert resumed.groups == source.groups
    assert resumed.losses == pytest.approx({step: source.losses[step] for step in (3, 4)}, rel=1e-3)

"""``--dtype``: the verdict, the account and the lines of the report say one thing, and it follows from whether the cast can be undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.core.catalog import MASTER, PARAM
from mcore_rlhf.core.facts import Fate, Item, Kind
from mcore_rlhf.errors import Lossy
from mcore_rlhf.families.options import WriteOptions

GOLDENS = Path(__file__).parents[2] / "goldens"
WEIGHTS = GOLDENS / "huggingface" / "llama_tied_bf16_sharded"
RUN, WIDE_RUN = (GOLDENS / "megatron" / name for name in ("tp2pp2dp2_tied_bf16_do", "tp2pp2dp2_fp32_do"))
ONLY_MASTERS = GOLDENS / "deepspeed" / "z3_bf16_frozen_dp2" / "step3"
ANY_DTYPE = ("hf", "megatron", "megatron-dist", "deepspeed", "dcp")


def converted(source: Path, target: Path, to: str, *, strict: bool = False, **write: object) -> Job:
    return convert(
        source, target, ConvertOptions(to=to, workers=1, fsync=False, strict=strict, write=WriteOptions(**write))
    )  # type: ignore[arg-type]


def fate(job: Job, state: str) -> Fate:
    return job.account.entries[Item(Kind.TENSOR, state)].fate


@pytest.mark.parametrize("to", ANY_DTYPE)
def test_weights_alone(to: str, tmp_path: Path) -> None:
    expected = {"fp32": Fate.CHANGED, "bf16": Fate.KEPT, "fp16": Fate.LOST}
    for dtype, wanted in expected.items():
        job = converted(WEIGHTS, tmp_path / dtype, to, dtype=dtype)
        spoken = [(said, text) for said, text in job.report.lines if "converted to" in text]
        assert fate(job, PARAM) is wanted
        assert job.lossless is (wanted is not Fate.LOST)
        assert [said for said, _ in spoken] == ([wanted] if wanted is not Fate.KEPT else [])
        assert job.account.lost == [text for said, text in spoken if said is Fate.LOST]
        assert job.account.as_json()[wanted.value] != 0
        if wanted is Fate.LOST:
            with pytest.raises(Lossy, match="converted to float16, and rounded"):
                converted(WEIGHTS, tmp_path / "strict", to, dtype=dtype, strict=True)
        else:
            assert converted(WEIGHTS, tmp_path / f"strict_{dtype}", to, dtype=dtype, strict=True).lossless


@pytest.mark.parametrize("source", [RUN, WIDE_RUN], ids=["bf16", "fp32"])
@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_masters_that_are_kept_make_any_type_lossless(source: Path, to: str, tmp_path: Path) -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        job = converted(source, tmp_path / dtype, to, dtype=dtype, strict=True)
        assert fate(job, MASTER) is Fate.KEPT
        assert fate(job, PARAM) in (Fate.KEPT, Fate.DERIVED)


@pytest.mark.parametrize("source", [RUN, WIDE_RUN], ids=["bf16", "fp32"])
@pytest.mark.parametrize("to", ANY_DTYPE)
def test_without_the_optimizer_weights_are_weights(source: Path, to: str, tmp_path: Path) -> None:
    own = "bf16" if source == RUN else "fp32"
    wider = {("bf16", "fp32")}
    for dtype in ("fp32", "bf16", "fp16"):
        job = converted(source, tmp_path / dtype, to, dtype=dtype, no_optimizer=True)
        wanted = Fate.KEPT if dtype == own else Fate.CHANGED if (own, dtype) in wider else Fate.LOST
        assert fate(job, PARAM) is wanted


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_masters_that_are_rounded_away_are_not_kept(dtype: str, tmp_path: Path) -> None:
    """A Hugging Face folder and FSDP have no place for masters beside parameters of another type."""
    for to in ("hf", "dcp"):
        for source in (WIDE_RUN, ONLY_MASTERS):
            job = converted(source, tmp_path / f"{to}_{source.name}_{dtype}", to, dtype=dtype)
            assert not job.lossless
            assert fate(job, MASTER) is Fate.LOST, (to, source)


def test_frozen_parameters_are_rounded_though_masters_are_kept(tmp_path: Path) -> None:
    assert converted(ONLY_MASTERS, tmp_path / "wide", "deepspeed", dtype="fp32", strict=True).lossless
    job = converted(ONLY_MASTERS, tmp_path / "half", "deepspeed", dtype="fp16")
    assert (fate(job, MASTER), fate(job, PARAM)) == (Fate.KEPT, Fate.LOST)
    assert not job.lossless

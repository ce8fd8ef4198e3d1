"""A part of a model: what ``--only`` and ``--exclude-frozen`` take, what they call it, and what everything else becomes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from mcore_rlhf.convert import convert, prepare
from mcore_rlhf.core.catalog import TensorName
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.selection import Selection, with_role
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.conversions import GOLDENS as MEGATRON
from tests.helpers.conversions import options
from tests.helpers.damage import flip_a_bit
from tests.helpers.plain_load import plain_load
from tests.helpers.universal_by_hand import adam, write

DEEPSPEED = Path(__file__).parents[2] / "goldens" / "deepspeed"
BOTH = DEEPSPEED / "z2_bf16_ac_dp2" / "step3"
FROZEN = DEEPSPEED / "z2_fp32_frozen_dp4" / "step3"


@cache
def opened(path: Path, only: str | None = None, exclude_frozen: bool = False) -> Source:
    return open_checkpoint(path, ReadOptions(only=only, exclude_frozen=exclude_frozen))


def names(source: Source) -> set[str]:
    return {spec.name for spec in source.model.params}


def test_an_attribute_is_taken_without_its_name() -> None:
    whole, part = opened(BOTH), opened(BOTH, "actor")
    below = {name.removeprefix("actor.") for name in names(whole) if name.startswith("actor.")}
    assert names(part) == below
    assert {name.param for name in part.catalog} == below
    for name in part.catalog:
        entry, origin = part.catalog.get(name), whole.catalog.get(name._replace(param=f"actor.{name.param}"))
        assert entry is not None
        assert origin is not None
        assert (entry.name, entry.chunks, entry.dtype) == (name, origin.chunks, origin.dtype)
    trained = {spec.name for spec in part.model.params if spec.trainable}
    assert {name for group in part.state.groups for name in group.params} == trained
    assert isinstance(part.family, ModuleState)
    assert set(part.family.buffers) == below - trained


def test_a_tied_tensor_keeps_its_owner_under_the_new_name() -> None:
    part = opened(BOTH, "actor")
    assert isinstance(part.family, ModuleState)
    assert part.family.shared == {"lm_head.weight": "model.embed_tokens.weight"}
    assert part.model.tied


def test_a_tied_tensor_whose_owner_is_left_out_becomes_the_owner() -> None:
    part = opened(BOTH, "actor.lm_head.weight,actor.model.norm.*")
    assert isinstance(part.family, ModuleState)
    assert part.family.shared == {}
    assert "actor.lm_head.weight" in names(part)
    name = TensorName("actor", "actor.lm_head.weight", "exp_avg")
    owner = opened(BOTH).catalog.get(name._replace(param="actor.model.embed_tokens.weight"))
    entry = part.catalog.get(name)
    assert entry is not None
    assert owner is not None
    assert entry.chunks == owner.chunks
    assert "actor.lm_head.weight" in [param for group in part.state.groups for param in group.params]


@pytest.mark.parametrize(
    ("only", "kept"),
    [
        ("*.bias", lambda name: name.endswith(".bias")),
        ("critic.*", lambda name: name.startswith("critic.")),
        ("!critic", lambda name: not name.startswith("critic.")),
        ("actor.model.layers.0, critic", lambda name: name.startswith(("actor.model.layers.0.", "critic."))),
        ("*norm*,!*.bias", lambda name: "norm" in name and not name.endswith(".bias")),
    ],
)
def test_patterns_keep_names(only: str, kept: object) -> None:
    assert names(opened(BOTH, only)) == {name for name in names(opened(BOTH)) if kept(name)}  # type: ignore[operator]


def test_the_role_may_stand_in_front() -> None:
    assert names(opened(BOTH, "actor.critic")) == names(opened(BOTH, "critic"))
    critic = open_checkpoint(BOTH, ReadOptions(role="critic", only="critic.critic"))
    assert names(critic) == names(opened(BOTH, "critic"))


def test_one_tensor_by_its_name() -> None:
    some = sorted(names(opened(BOTH)))[0]
    assert names(opened(BOTH, some)) == {some}


@pytest.mark.parametrize("only", ["policy", "nothing.*", "!*", "actor.model.layer"])
def test_what_fits_nothing_is_refused_with_what_there_is(only: str) -> None:
    with pytest.raises(UsageError, match=r"actor \(34\), critic \(21\)"):
        opened(BOTH, only)


@pytest.mark.parametrize("only", ["", "a,,b", "!", " "])
def test_an_empty_term_is_refused(only: str) -> None:
    with pytest.raises(UsageError, match="--only"):
        Selection.parse(only)


def test_a_role_of_a_step_is_picked() -> None:
    given = ReadOptions(only="critic.value_head")
    assert with_role(given, ["actor", "critic"]) == replace(given, role="critic", only="value_head")
    assert with_role(given, ["actor"]) == given
    assert with_role(ReadOptions(only="critic"), ["critic"]) == ReadOptions(role="critic")
    assert with_role(ReadOptions(only="critic.*"), ["critic"]) == ReadOptions(only="critic.*")


def test_a_step_with_several_roles(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        (tmp_path / role).mkdir()
        write(tmp_path / role, {f"{role}_net.weight": adam(2, 3), "head.weight": adam(1, 3, seed=5)})
    assert names(opened(tmp_path, "critic.critic_net")) == {"weight"}
    assert opened(tmp_path, "critic").role == "critic"
    with pytest.raises(UsageError, match="several checkpoints: actor, critic"):
        opened(tmp_path, "head")


def test_nobody_reads_what_is_left_out(tmp_path: Path) -> None:
    """A flipped byte of another part is no matter; one of the part itself is found as ever."""
    source = tmp_path / "run"
    source.mkdir()
    write(source, {"policy.weight": adam(64, 64), "value.weight": adam(64, 64, seed=1)})
    damaged = source / "global_step7_uni" / "zero" / "value.weight" / "fp32.pt"
    flip_a_bit(damaged)
    wanted = replace(options(), to="universal")
    convert(source, tmp_path / "policy", replace(wanted, read=ReadOptions(only="policy")))
    with pytest.raises(Exception, match=r"value\.weight"):
        convert(source, tmp_path / "value", replace(wanted, read=ReadOptions(only="value")))
    stored = torch.load(tmp_path / "policy" / "global_step7_uni" / "zero" / "weight" / "fp32.pt")["param"]
    assert torch.equal(stored, adam(64, 64)["fp32"])


def test_frozen_parameters_are_left_out_and_said() -> None:
    whole, part = opened(FROZEN), opened(FROZEN, exclude_frozen=True)
    frozen = {spec.name for spec in whole.model.params if not spec.trainable}
    assert isinstance(whole.family, ModuleState)
    assert frozen - set(whole.family.buffers)
    assert names(part) == names(whole) - (frozen - set(whole.family.buffers))
    assert any(fate is Fate.LOST and "frozen" in text for fate, text in part.notes.lines)
    assert not any("frozen" in text for _, text in whole.notes.lines)


def test_an_optimizer_of_which_nothing_is_left_is_gone() -> None:
    whole = opened(FROZEN)
    frozen = next(spec.name for spec in whole.model.params if not spec.trainable)
    part = opened(FROZEN, frozen)
    assert (part.optimizer, part.states, part.state.groups) == (None, (), ())
    assert whole.optimizer is not None


def test_megatrons_names_are_kept_by_patterns_only() -> None:
    path = MEGATRON / "tp2pp2dp2_bf16_do"
    part = opened(path, "!output_layer")
    assert names(part) == names(opened(path)) - {"output_layer.weight"}
    with pytest.raises(Unsupported, match="whole names"):
        opened(path, "decoder")
    with pytest.raises(Unsupported, match="exclude-frozen"):
        opened(path, exclude_frozen=True)


def test_a_part_of_megatrons_is_written_under_other_names(tmp_path: Path) -> None:
    """The base of a language model: everything but its head, by way of the relation of names."""
    path, wanted = MEGATRON / "tp2pp2dp2_bf16_do", replace(options(), to="universal")
    job = prepare(path, replace(wanted, read=ReadOptions(only="!output_layer")))
    assert job.seen is not None
    assert "lm_head.weight" not in names(job.seen)
    assert "model.norm.weight" in names(job.seen)


def test_without_frozen_parameters_as_deepspeed_itself_writes_it(tmp_path: Path) -> None:
    """The same names as under ``exclude_frozen_parameters=True``, in the same order: ``load_module_strict=False`` takes both."""
    wanted = replace(options(), to="deepspeed", read=ReadOptions(exclude_frozen=True))
    convert(FROZEN, tmp_path / "out", wanted)
    own = DEEPSPEED / "z2_bf16_frozen_excluded_dp2"
    ours, theirs = (plain_load(root / "step3" / "mp_rank_00_model_states.pt") for root in (tmp_path / "out", own))
    assert list(ours["module"]) == list(theirs["module"])
    for key in ("frozen_param_shapes", "frozen_param_fragments"):  # an empty dictionary makes DeepSpeed look into it
        assert (ours[key], theirs[key]) == (None, None)

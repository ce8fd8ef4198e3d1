"""``will-resume --trainer megatron-lm`` says what Megatron-LM's own ``pretrain`` does with folders from which one thing was taken.

Where it goes on is seen by its own log: the first iteration, whose loss is of the weights, and the one after, whose loss is of the
optimizer, the rates and the data as well.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.trainers.settings_file import read_settings
from tests.helpers.damage import gone, zeroed
from tests.reference.test_pretrain import PRETRAIN, Scripts, Seen, scripts, whole

__all__ = ["scripts", "whole"]  # fixtures of the module that pretrains
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FROM = 4
Change = Callable[[Path], object]


CASES: dict[str, tuple[Change, list[str]]] = {
    "whole": (lambda root: None, []),
    "no tracker": (gone("latest_checkpointed_iteration.txt"), []),
    "no distributed optimizer": (gone("iter_*/*/distrib_optim.pt"), []),
    "distributed optimizer of zeros": (zeroed("iter_*/*/distrib_optim.pt"), []),
    "model of zeros": (zeroed("iter_*/*/model_optim_rng.pt"), []),
    "no model": (gone("iter_*/*/model_optim_rng.pt"), []),
    "no_load_optim": (lambda root: None, ["--no-load-optim"]),
    "finetune": (lambda root: None, ["--finetune"]),
}


@pytest.mark.parametrize("name", CASES)
def test_megatron(scripts: Scripts, whole: Seen, name: str, tmp_path: Path) -> None:
    change, flags = CASES[name]
    root, file = tmp_path / "theirs", tmp_path / "arguments.txt"
    shutil.copytree(scripts.folder / "theirs", root)
    (root / "latest_checkpointed_iteration.txt").write_text(str(FROM))
    change(root)
    given = [*PRETRAIN, *flags]
    file.write_text(" ".join(given))
    found = forecast(root, loader_named("megatron-lm")[0], read_settings(file))
    try:
        seen = scripts.run("pretrain_gpt.py", [*given, "--load", str(root)])[0]
    except (AssertionError, FileNotFoundError):  # it failed, or it exited with 0 and has trained nothing
        assert found.stops, name
        return
    assert not found.stops
    told = {one.thing: one.row.outcome for one in found.roles.get("", [])}
    expected, first = whole[0], min(map(int, seen))
    goes_on = first == FROM + 1
    assert (told.get(Thing.COUNTERS) is Outcome.RESTORED) == goes_on
    loss_of_weights = seen[str(first)][0] == expected[str(FROM + 1)][0]
    if goes_on:
        assert (told[Thing.WEIGHTS] is Outcome.RESTORED) == loss_of_weights
        same = seen[str(FROM + 2)] == expected[str(FROM + 2)]
        assert (told[Thing.OPTIMIZER] is Outcome.RESTORED) == same
        assert found.resumes == same
    else:
        assert not found.resumes
        assert (found.taken.folder is None) == (
            seen["1"] == expected["1"]
        )  # random weights of the same seed, or those of the file


_DISTRIBUTED, _TORCH_DIST = "--use-distributed-optimizer", ("--ckpt-format", "torch_dist")
KINDS = {
    "distributed": ([_DISTRIBUTED], 80),
    "plain": ([], 140),
    "torch_dist": ([_DISTRIBUTED, *_TORCH_DIST], 80),
    "torch_dist, fully reshardable": ([_DISTRIBUTED, *_TORCH_DIST, "--dist-ckpt-optim-fully-reshardable"], 80),
    "torch_dist, plain": ([*_TORCH_DIST], 80),
}
"""Options, and at least how many things there are to take."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_key_of_each_file_taken(scripts: Scripts, kind: str, tmp_path: Path) -> None:
    """Files of one rank, with Megatron's own ``load_checkpoint``; a first step that fails is not run here, and counts as said."""
    given = [*PRETRAIN, "--save-interval", "2"]
    given[given.index("--tensor-model-parallel-size") + 1], given[given.index("--train-iters") + 1] = "1", "2"
    given.remove(_DISTRIBUTED)
    options, fewest = KINDS[kind]
    given += options
    scripts.run("pretrain_gpt.py", [*given, "--save", str(tmp_path / "whole")], world=1)
    (rows,) = scripts.run("pretrain_loads.py", given, world=1, environment={"LOADS_FROM": str(tmp_path / "whole")})
    wrong, taken = [], cast(list[dict[str, Any]], rows)
    for row in taken:
        real, told = row["real"], row["told"]
        lost = {thing for thing, restored in real.items() if not restored} if isinstance(real, dict) else set()
        later = any("first step" in why or "by position" in why for restored, why in told.values() if not restored)
        same = row["stops"] == isinstance(real, str) or (later and "optimizer" in lost)
        same = same and all(told[thing][0] == (thing not in lost) for thing in real if not isinstance(real, str))
        if not same and not row["doubtful"]:
            wrong.append(row)
    assert not wrong
    assert len(taken) > fewest


@pytest.mark.usefixtures("whole")
def test_what_comes_from_elsewhere_goes_on_by_the_arguments_own_rates(scripts: Scripts, tmp_path: Path) -> None:
    """A run that DeepSpeed could have saved, as nothing of Megatron's waits in it, has a scheduler that Megatron-LM asks for."""
    root = tmp_path / "theirs"
    shutil.copytree(scripts.folder / "theirs", root)
    (root / "latest_checkpointed_iteration.txt").write_text(str(FROM))
    convert(
        root, tmp_path / "zero", ConvertOptions(to="deepspeed", fsync=False, write=WriteOptions(zero_stage=1, dp=1))
    )
    convert(root, tmp_path / "hf", ConvertOptions(to="hf", fsync=False))
    wanted = WriteOptions(tp=2, transformer_impl="local", reference_config=str(tmp_path / "hf"))
    convert(tmp_path / "zero", tmp_path / "own", ConvertOptions(to="megatron", fsync=False, write=wanted))
    for file in [*(tmp_path / "zero").rglob("state.json"), tmp_path / "zero" / "mcore_rlhf.json"]:
        file.unlink()
    convert(tmp_path / "zero", tmp_path / "made", ConvertOptions(to="megatron", fsync=False, write=wanted))
    found = forecast(
        tmp_path / "made", loader_named("megatron-lm")[0], Settings({"override_opt_param_scheduler": True})
    )
    assert not found.stops
    flags = [*PRETRAIN, "--override-opt-param-scheduler", "--no-load-rng"]  # fresh states of a GPU are none of a CPU's
    seen = [scripts.run("pretrain_gpt.py", [*flags, "--load", str(tmp_path / name)])[0] for name in ("made", "own")]
    assert seen[0] == seen[1]
    assert min(map(int, seen[0])) == FROM + 1


@pytest.mark.parametrize("option", ["--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"])
def test_a_schedule_that_verl_counted_in_steps_goes_on_at_the_same_rates(
    scripts: Scripts, whole: Seen, option: str, tmp_path: Path
) -> None:
    """With the first option the file decides the place in the schedule alone, with the other all of it."""
    root = tmp_path / "theirs"
    shutil.copytree(scripts.folder / "theirs", root)
    (root / "latest_checkpointed_iteration.txt").write_text(str(FROM))
    verl = ConvertOptions(to="verl", fsync=False, write=WriteOptions(tp=2, padded_vocab_size=256))
    convert_step(find(root, ReadOptions()), tmp_path / "verl", verl)
    back = ConvertOptions(to="megatron", fsync=False, write=WriteOptions(padded_vocab_size=256))
    convert(tmp_path / "verl" / f"global_step_{FROM}" / "actor", tmp_path / "back", back)
    (seen, *_) = scripts.run("pretrain_gpt.py", [*PRETRAIN, option, "--load", str(tmp_path / "back")])
    assert seen == {step: whole[0][step] for step in map(str, range(FROM + 1, FROM + 3))}

"""A step of ROLL's as it is written: each rank's own weights, the optimizer in a folder of its own, and the schedule, every rank's random
states and the model's configuration in files beside them.

Source: ROLL 8eb27cc2, ``roll/distributed/strategy/megatron_strategy.py`` (``load_checkpoint``),
``mcore_adapter/src/mcore_adapter/checkpointing.py`` (``_load_base_checkpoint``: ``torch.load`` of weights alone, so that nothing but
tensors may lie beside them).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from mcore_rlhf.core.facts import Fate, Item, Kind, Reason, Rule, Values
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED
from mcore_rlhf.families.megatron.folders import TRACKER
from mcore_rlhf.families.megatron.new_run import NewRun
from mcore_rlhf.families.megatron.run_config import adapted_config, read_back
from mcore_rlhf.families.megatron.state import SAMPLES, saved_rng
from mcore_rlhf.families.options import RunOf
from mcore_rlhf.families.run_folders import ADAPTED, ADAPTED_ITERATION, COUNTED, RANDOM, SCHEDULE
from mcore_rlhf.formats.base import FileLayout, Format, Target, TargetFile
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import Pt
from mcore_rlhf.storage.urls import checkpoint_path

from .bridged import bridged_target, with_bridged
from .common import Tree
from .objects import file_rank

_MODEL, WRAPPED = "model", "module."
"""Its optimizer's keys are those of the model in its wrapper. Source: the same (``models_wrapped``), run."""


def optimizer_alone(tree: Tree) -> Tree:
    """What lies beside the optimizer's tensors: it is saved by itself, and not as a part.

    Args:
        tree: What all ranks share.
    """
    found = tree["optimizer"]
    assert isinstance(found, dict)
    return found


def weights_beside(run: NewRun, weights: Format, ranks: Format) -> Target | None:
    """The weights of a checkpoint that is to be written, where its trainer has others than Megatron's; None where it has not.

    Args:
        run: The checkpoint.
        weights: The format of those of a bridge.
        ranks: Of those that each rank has.

    Raises:
        CheckpointError: They cannot be written so.
    """
    parts = run.options.run_of.parts
    if parts is None or parts.model or parts.is_one:
        return None
    return ranks_target(run, ranks) if parts.adapted else bridged_target(run, weights)


def with_beside(target: Target, weights: Target, run: NewRun) -> Target:
    """A described checkpoint with such weights.

    Args:
        target: All but the weights.
        weights: See :func:`weights_beside`.
        run: The checkpoint.
    """
    return (with_ranks if run.options.run_of.adapted else with_bridged)(target, weights, run)


def ranks_target(run: NewRun, ranks: Format) -> Target:
    """The weights of a checkpoint that is to be written, as each rank has them.

    Args:
        run: The checkpoint.
        ranks: The format of such weights.

    Raises:
        UsageError: Its optimizer is none that is distributed.
        CheckpointError: That format cannot hold the layout.
    """
    if run.choices.optimizer not in (None, DISTRIBUTED):
        raise UsageError(
            f"the optimizer is {run.choices.optimizer}, and ROLL's runs are written with use_distributed_optimizer: true\n"
            "Give --optimizer distributed, or leave the optimizer out with --no-optimizer."
        )
    source = replace(run.source, state=replace(run.source.state, iteration=ADAPTED_ITERATION, release=False))
    parallel = run.choices.parallel
    wanted = replace(
        run.options, tp=parallel.tp, pp=parallel.pp, dp=parallel.dp, padded_vocab_size=run.choices.padded_vocab_size,
        no_optimizer=True, optimizer=None, rng=None, like=None, run_of=RunOf(), integrity=False,
    )  # fmt: skip
    return ranks.target(source, wanted)


def with_ranks(target: Target, weights: Target, run: NewRun) -> Target:
    """A described checkpoint with its weights as each rank has them, and what lies beside them.

    Args:
        target: All but the weights.
        weights: See :func:`ranks_target`.
        run: The checkpoint.
    """
    config = adapted_config(run.arguments(None), _shown(run))
    said = read_back(config)
    ours = {item: value for item, value in target.holds.items() if item.kind is not Kind.ARGUMENT or item.name in said}
    files = (
        *(replace(file, layout=partial(_weights_alone, file)) for file in weights.files),
        *target.files,
        *_beside(run),
    )
    args = run.source.state.args
    elsewhere = [
        Item(Kind.ARGUMENT, name)
        for name, value in args.items()
        if name not in said and not (name in SAMPLES and value)
    ]
    target.report.through((*_RULES, Rule(Reason.OF_ENGINE, when=lambda _: {"of": elsewhere})), run)
    return replace(
        target,
        files=files,
        texts={**target.texts, **weights.texts, TRACKER: str(ADAPTED_ITERATION), ADAPTED: json.dumps(config, indent=2, sort_keys=True)},
        holds=ours,
    )  # fmt: skip


def _in_steps(run: NewRun) -> Values | None:
    """The samples of a run whose steps had as many each: ROLL goes forward in its data by the steps."""
    samples, steps = run.source.state.args.get(SAMPLES[0]), run.source.state.iteration
    return {"samples": samples, "steps": steps} if isinstance(samples, int) and steps and samples % steps == 0 else None


def _uncounted(run: NewRun) -> list[Values]:
    counted = {name: number for name in SAMPLES if (number := run.source.state.args.get(name))}
    if _in_steps(run):
        counted.pop(SAMPLES[0], None)
    return [{"name": name, "number": number, "of": [Item(Kind.ARGUMENT, name)]} for name, number in counted.items()]


def _shown(run: NewRun) -> ReadablePath:
    """The model of a run of ROLL's that shows its configuration, or the source's own folder, which may be one."""
    return run.source.root if run.options.like is None else checkpoint_path(run.options.like)


def _weights_alone(file: TargetFile) -> FileLayout:
    made = file.layout()
    pt = made.container
    assert isinstance(pt, Pt)
    return replace(made, container=Pt(lambda: {key: one for key, one in pt.make().items() if key.startswith(_MODEL)}))


def _beside(run: NewRun) -> Iterator[TargetFile]:
    """The schedule and every rank's random states; a run that trains nothing further has neither."""
    if run.choices.optimizer is None:
        return
    if run.source.state.scheduler is not None:
        yield TargetFile(SCHEDULE, partial(FileLayout.of_tree, run.source.state.scheduler))
    for rank, _ in run.choices.parallel.ranks():
        yield TargetFile(RANDOM[0].format(rank=rank), partial(_random, run, rank))


def _random(run: NewRun, rank: int) -> FileLayout:
    """Those of a rank: its own, or those that all ranks with the same part of the model share, or made."""
    parallel: ParallelConfig = run.choices.parallel
    at, here = file_rank(parallel, rank), parallel.coordinates(rank)
    number = here.dp_rank * parallel.cp + here.cp_rank
    kept = saved_rng(run.shard_of(at)) if run.choices.rng == "keep" else []
    if len(kept) == 1 and not run.family.args.flag("data_parallel_random_init"):
        return FileLayout.of_tree(kept[0])
    make = run.rng.fresh if run.choices.rng == "drop" else run.rng.derived
    return FileLayout.of_tree(kept[number] if number < len(kept) else make(at, number))


_RULES: tuple[Rule[NewRun], ...] = (
    Rule(Fate.NOTE, "weights: each rank's own, from which ROLL loads"),
    Rule(
        Fate.DERIVED,
        f"{SAMPLES[0]}: {{samples}}, as the {{steps}} steps by which ROLL goes forward",
        _in_steps,
        [Item(Kind.ARGUMENT, SAMPLES[0])],
    ),
    Rule(Fate.LOST, "{name}: {number}, and ROLL counts steps alone", _uncounted),
    Rule(
        Fate.KEPT,
        "beside the model",
        lambda run: run.source.format == "megatron-dist",
        [Item(Kind.FILE, COUNTED)],
        told=False,
    ),
)
"""What becomes of what a run of ROLL's says elsewhere."""

"""What all ranks of a new ``torch_dist`` checkpoint share, as ``common.pt`` has it, and what becomes of how an optimizer is stored.

``common.pt`` has arguments, param groups, scheduler, iteration.

Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``generate_state_dict``,
``_build_sharded_state_dict_metadata``); megatron-core 0.16.1, ``optimizer/optimizer.py``, ``optimizer/distrib_optimizer.py``
(``sharded_state_dict``), of which what is not sharded is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_rlhf.core.catalog import FLOAT32
from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.dist_parts import DistParts
from mcore_rlhf.families.megatron.arguments import BY_LAYOUT, DISTRIBUTED, LAYER_WISE, PLAIN, Arguments
from mcore_rlhf.families.megatron.folders import FileRank
from mcore_rlhf.families.megatron.groups import by_adam, groups_by_member, members
from mcore_rlhf.families.megatron.modelopt import KEY
from mcore_rlhf.families.megatron.new_run import NewRun
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.models.megatron import is_buffer
from mcore_rlhf.storage.stored import Namespace

from .folders import INTEGRITY
from .names import KeySpelling
from .objects import DistState, rng_ranks
from .optimizer import CONTENT, CONTENT_SHARDING, DP_RESHARDABLE, FULLY_RESHARDABLE, MODEL_SPACE, SHARDING


def sharding_of(run: NewRun) -> str:
    """How a distributed optimizer's states are to be stored.

    Raises:
        UsageError: In flat buckets, or as old releases have a distributed optimizer's, of one that is none.
    """
    wanted, kind = run.sharding, run.choices.optimizer
    if wanted in (DP_RESHARDABLE, MODEL_SPACE) and kind != DISTRIBUTED:
        raise UsageError(
            f"--optimizer-sharding {wanted}: it is for a distributed optimizer's flat buffers, and the target's optimizer is {kind}\n"
            "Leave it out: such states are stored parameter by parameter, and load on any layout."
        )
    return wanted


Tree = dict[object, object]


_OPTIMIZER, _SCHEDULER = "optimizer", "opt_param_scheduler"


def of_optimizer(tree: Tree, scheduler: str, *, alone: bool) -> Tree:
    """What of it lies beside an optimizer that has a folder of its own.

    Args:
        tree: All of it.
        scheduler: What the scheduler's state is called there.
        alone: Whether no other folder has what belongs to the model, either.
    """
    named = {_OPTIMIZER: _OPTIMIZER, _SCHEDULER: scheduler, CONTENT: CONTENT}
    more = of_model(tree) if alone else {}
    return {**more, **{new: tree[old] for old, new in named.items() if old in tree}}


def of_model(tree: Tree) -> Tree:
    """What lies beside weights that have a folder of their own."""
    return {key: value for key, value in tree.items() if key not in (_OPTIMIZER, _SCHEDULER)}


_RANDOM = {"cpu": "torch_rng_state", "numpy": "np_rng_state", "random": "random_rng_state", "cuda": "cuda_rng_state"}
"""What SkyRL calls the random states of rank 0, which all ranks get, and what Megatron does.

Source: SkyRL 0.3.0, ``skyrl/backends/skyrl_train/distributed/strategy.py`` (``get_rng_state``, ``load_rng_state``)."""


def of_run(run: NewRun, parts: DistParts, tree: Tree) -> Tree:
    """All of it, as a trainer has it that calls the scheduler otherwise, and keeps random states there.

    Args:
        run: The checkpoint that is to be written.
        parts: What it calls them.
        tree: As Megatron-LM has it.
    """
    named = {parts.scheduler if key == _SCHEDULER else key: value for key, value in tree.items()}
    if not parts.extra or parts.extra in named:
        return named
    _, first = next(rng_ranks(run.choices.parallel))
    states = run.rng_states(first) or ()
    return {**named, parts.extra: {own: states[0][name] for own, name in _RANDOM.items()}} if states else named


def common_tree(run: NewRun, first: FileRank, spelling: KeySpelling) -> Tree:
    """The content of ``common.pt``.

    Args:
        run: The checkpoint that is to be written.
        first: The rank that writes the file.
        spelling: Which keys its parameters have.
    """
    state, tree = run.source.state, Tree()
    args = run.arguments(first)
    if args:
        tree["args"] = Namespace(args)
    tree["checkpoint_version"] = state.other.get("checkpoint_version", 3.0)
    tree["iteration"] = run.iteration or 0
    if run.choices.optimizer is not None:
        tree[_OPTIMIZER] = _optimizer(run)
    if state.scheduler is not None:
        tree[_SCHEDULER] = state.scheduler
    tree.update((key, value) for key, value in state.other.items() if key not in (*tree, KEY))
    tree[CONTENT] = _content(run, spelling)
    return tree


def _content(run: NewRun, spelling: KeySpelling) -> dict[str, object]:
    """By which Megatron builds its state dictionary when it loads.

    Source: megatron-core 0.13.1 and 0.19.2, ``transformer/transformer_block.py`` (``sharded_state_dict``): layers have keys of their own
    where the metadata, or the model, says so.
    """
    sharding: dict[str, object] = {}
    if run.choices.optimizer in (DISTRIBUTED, LAYER_WISE):
        sharding = {CONTENT_SHARDING: sharding_of(run)}
    if sharding.get(CONTENT_SHARDING) == FULLY_RESHARDABLE:
        sharding["distrib_optim_fully_reshardable_mem_efficient"] = False
    apart = {} if spelling.stacked else {"non_homogeneous_layers": True}
    return {
        **sharding,
        **apart,
        "singleton_local_shards": spelling.singleton,
        "chained_optim_avoid_prefix": not prefixed(run),
    }


def prefixed(run: NewRun) -> bool:
    """Whether each of several chained optimizers has a number before its keys, as all have it to megatron-core before 0.14.

    Source: megatron-core 0.13.1 and 0.15.3, ``optimizer/optimizer.py`` (``ChainedOptimizer.sharded_state_dict``).
    """
    return run.choices.optimizer == DISTRIBUTED and sharding_of(run) == MODEL_SPACE


def _optimizer(run: NewRun) -> Tree:
    """One dictionary, or one by number for every chained optimizer; beside flat buckets lies what else it has."""
    if sharding_of(run) == DP_RESHARDABLE:
        built: list[Tree] = [{SHARDING: DP_RESHARDABLE} for _ in optimizers(run)]
    else:
        built = [
            {**tree, SHARDING: sharding_of(run)} if is_distributed(run, matrices=matrices) else tree
            for matrices, tree in optimizers(run)
        ]
    return dict(enumerate(built)) if len(built) > 1 else built[0]


def optimizers(run: NewRun) -> list[tuple[bool, Tree]]:
    """What each chained optimizer has besides tensors, and whether it is for matrices."""
    parallel, model = run.choices.parallel, run.source.model
    args = Arguments(run.arguments(None))
    chained, apart = members(args, parallel, model.params), args.experts_apart(parallel)
    groups = groups_by_member(chained, run.source.state.groups, apart, model.params, run.membership)
    kinds = [bool(member.matrices) for member in chained]
    return [
        (matrices, _member(run, own, distributed=is_distributed(run, matrices=matrices)))
        for matrices, own in zip(kinds, groups, strict=True)
    ]


def is_distributed(run: NewRun, *, matrices: bool) -> bool:
    """Whether parameters are trained by a distributed optimizer, whose masters are called otherwise.

    Beside Muon that is so where the layer-wise optimizer deals parameters by a layout. Source: megatron-core 0.19.2,
    ``optimizer/__init__.py`` (``_get_megatron_emerging_optimizer``).

    Args:
        run: The checkpoint that is to be written.
        matrices: Whether they are those that Muon or its kind trains, where there is one.
    """
    if run.choices.optimizer != LAYER_WISE:
        return run.choices.optimizer == DISTRIBUTED
    return Arguments(run.arguments(None)).flag(BY_LAYOUT) and not matrices


def _member(run: NewRun, groups: Sequence[ParamGroup], *, distributed: bool) -> Tree:
    inner: Tree = {"param_groups": [dict(group.fields) for group in groups]}
    if not distributed and run.family.scalars.get("step") is not None:
        inner["state"] = {"common_step": run.family.scalars["step"]}
    if not distributed and not _mixed_precision(run):
        return inner
    tree: Tree = {"optimizer": inner}
    if run.source.state.grad_scaler is not None:
        tree["grad_scaler"] = run.source.state.grad_scaler
    return tree


def _mixed_precision(run: NewRun) -> bool:
    """Whether the run keeps fp32 copies of its parameters."""
    if run.choices.dtype is not None:
        return run.choices.dtype != FLOAT32
    return any(spec.dtype != FLOAT32 for spec in run.source.model.params if spec.trainable)


def _old_sharding(run: NewRun) -> str | None:
    """How the source's distributed optimizer is stored."""
    family = DistState.of(run.source)
    return family.sharding if family else None


def _unsaid_frozen(run: NewRun) -> str:
    """Parameters that flat buffers leave out."""
    params = run.source.model.params if sharding_of(run) == DP_RESHARDABLE else ()
    frozen = [spec.name for spec in params if not (spec.trainable or is_buffer(spec.name))]
    return ", ".join(frozen[:3]) + (f", … ({len(frozen)})" if len(frozen) > 3 else "")


def _unloadable(run: NewRun) -> str:
    """What Megatron finds no way to load of a plain optimizer.

    Source: megatron-core 0.19.2, ``optimizer/optimizer.py`` (``Float16OptimizerWithFloat16Params.sharded_state_dict``), run.
    """
    trained = [spec for spec in run.source.model.params if spec.trainable]
    if run.choices.optimizer != PLAIN or not by_adam(run.family.args.values):
        return ""
    if not run.moments:
        return "that has not stepped yet"
    return "of fp32 and half parameters" if len({spec.dtype == FLOAT32 for spec in trained}) > 1 else ""


_BUCKETS = f"{DP_RESHARDABLE}, which Megatron loads at {{0.choices.parallel}} and with other data-parallel ranks alone"
RULES: tuple[Rule[NewRun], ...] = (
    Rule(Fate.NOTE, "a plain optimizer {found}: megatron-core (0.19.2) loads none from torch_dist, not even its own; from megatron "
         "(--ckpt-format torch) it does", _unloadable),
    Rule(Fate.NOTE, f"optimizer states: {_BUCKETS}",
         lambda r: sharding_of(r) == DP_RESHARDABLE and _old_sharding(r) in (None, DP_RESHARDABLE)),
    Rule(Fate.CHANGED, f"optimizer states: {{found}} → {_BUCKETS}",
         lambda r: sharding_of(r) == DP_RESHARDABLE and _old_sharding(r) != DP_RESHARDABLE and _old_sharding(r)),
    Rule(Fate.NOTE, "flat buffers do not say which parameters they leave out: who reads this folder finds them by their values, or says "
         "with --rules (trainable: false) that they are {found}", _unsaid_frozen),
    Rule(Fate.CHANGED, f"optimizer states: {{found}} → {FULLY_RESHARDABLE}, which loads on any layout",
         lambda r: sharding_of(r) == FULLY_RESHARDABLE and r.choices.optimizer in (DISTRIBUTED, LAYER_WISE)
         and _old_sharding(r) != FULLY_RESHARDABLE and _old_sharding(r)),
    Rule(Fate.NOTE, f"{FULLY_RESHARDABLE} came with megatron-core 0.15; an older one takes --optimizer-sharding {MODEL_SPACE}",
         lambda r: sharding_of(r) == FULLY_RESHARDABLE and _old_sharding(r) == MODEL_SPACE),
    Rule(Fate.CHANGED, f"optimizer states: {{found}} → {MODEL_SPACE}, which megatron-core before 0.16 loads on any layout",
         lambda r: sharding_of(r) == MODEL_SPACE and _old_sharding(r) != MODEL_SPACE and _old_sharding(r)),
    Rule(Fate.DERIVED, f"{INTEGRITY}: made anew, of the new files", lambda r: r.options.integrity and r.source.digests),
    Rule(Fate.DERIVED, f"{INTEGRITY}: of the new files", lambda r: r.options.integrity and not r.source.digests),
    Rule(Fate.NOTE, f"{INTEGRITY}: left out, it is of the source's files; --integrity writes one, which --verify-integrity wants",
         lambda r: not r.options.integrity and r.source.digests),
)  # fmt: skip
"""What optimizer states become where the source had them otherwise, or where they load on one layout alone; and its sums."""

"""``common.pt``: what all ranks share, built as Megatron-LM builds it.

Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``generate_state_dict``,
``_build_sharded_state_dict_metadata``); megatron-core 0.16.1, ``optimizer/optimizer.py``, ``optimizer/distrib_optimizer.py``
(``sharded_state_dict``), of which what is not sharded is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_rlhf.core.dtype import FLOAT32
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, Arguments
from mcore_rlhf.families.megatron.folders import FileRank
from mcore_rlhf.families.megatron.groups import groups_for
from mcore_rlhf.families.megatron.layout import members
from mcore_rlhf.families.megatron.new_run import NewRun
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.storage.stubs import Namespace

from .optimizer import CONTENT, CONTENT_SHARDING, FULLY_RESHARDABLE, SHARDING

Tree = dict[object, object]


def common_tree(run: NewRun, first: FileRank) -> Tree:
    """The content of ``common.pt``.

    Args:
        run: The checkpoint that is to be written.
        first: The rank that writes the file.
    """
    state, tree = run.source.state, Tree()
    args = run.arguments(first)
    if args:
        tree["args"] = Namespace(args)
    tree["checkpoint_version"] = state.other.get("checkpoint_version", 3.0)
    tree["iteration"] = state.iteration
    if run.choices.optimizer is not None:
        tree["optimizer"] = _optimizer(run, Arguments(args))
    if state.scheduler is not None:
        tree["opt_param_scheduler"] = state.scheduler
    tree.update((key, value) for key, value in state.other.items() if key not in tree)
    tree[CONTENT] = _content(run)
    return tree


def _content(run: NewRun) -> dict[str, object]:
    """By which Megatron builds its state dictionary when it loads."""
    sharding: dict[str, object] = {}
    if run.choices.optimizer == DISTRIBUTED:
        sharding = {CONTENT_SHARDING: FULLY_RESHARDABLE, "distrib_optim_fully_reshardable_mem_efficient": False}
    return {**sharding, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def _optimizer(run: NewRun, args: Arguments) -> Tree:
    """One dictionary, or one by number for every chained optimizer."""
    parallel, model = run.choices.parallel, run.source.model
    dense, expert = groups_for(run.source.state.groups, parallel.ep, model.params, run.membership)
    built = [_member(run, expert if member.expert else dense) for member in members(args, parallel)]
    return dict(enumerate(built)) if len(built) > 1 else built[0]


def _member(run: NewRun, groups: Sequence[ParamGroup]) -> Tree:
    inner: Tree = {"param_groups": [dict(group.fields) for group in groups]}
    distributed = run.choices.optimizer == DISTRIBUTED
    if not distributed and run.family.scalars.get("step") is not None:
        inner["state"] = {"common_step": run.family.scalars["step"]}
    if not distributed and not _mixed_precision(run):
        return inner
    tree: Tree = {"optimizer": inner}
    if run.source.state.grad_scaler is not None:
        tree["grad_scaler"] = run.source.state.grad_scaler
    if distributed:
        tree[SHARDING] = FULLY_RESHARDABLE
    return tree


def _mixed_precision(run: NewRun) -> bool:
    """Whether the run keeps fp32 copies of its parameters."""
    if run.choices.dtype is not None:
        return run.choices.dtype != FLOAT32
    return any(spec.dtype != FLOAT32 for spec in run.source.model.params if spec.trainable)

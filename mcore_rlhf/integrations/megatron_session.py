"""Saving and loading for a script of Megatron-LM, with the arguments and return values of Megatron-LM's own functions.

Source: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``save_checkpoint``, ``load_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.families.megatron.state import COUNTER, SAMPLES
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run.manager import CheckpointManager, Resumed
from mcore_rlhf.manager.run.options import ManagerOptions
from mcore_rlhf.manager.run.retention import KeepEvery, KeepLast, Retention
from mcore_rlhf.manager.run.rng import captured, put_back
from mcore_rlhf.manager.run.snapshot import Data

from .megatron_arguments import LoadSource, ScriptObjects, comparable, refuse_modelopt, refuse_unsupported

if TYPE_CHECKING:
    from .megatron_engine import ScriptEngine


Call = Mapping[str, Any]
"""The arguments of a call by name, defaults filled in."""


@dataclass(frozen=True, slots=True)
class SessionChoices:
    """What the script chose when it installed the drop-in; see :func:`.megatron_lm.install`."""

    asynchronous: bool = False
    data: Data | None = None
    state: RlhfState | None = None
    options: ManagerOptions = field(default_factory=ManagerOptions)
    role: str = "actor"


class Session:
    """One script's managers: one that saves, kept open, and one for every load.

    Args:
        training: Megatron-LM's module ``megatron.training.checkpointing``.
        choices: What the script chose.
    """

    def __init__(self, training: Any, choices: SessionChoices) -> None:
        self.training, self.choices = training, choices
        self._manager: CheckpointManager | None = None
        self._trained: ScriptObjects | None = None
        self._further: dict[str, object] = {}
        self._uncompacted: int | None = None

    def open(self, trained: ScriptObjects) -> CheckpointManager:
        """The manager of ``--save``, opened for these live objects. Collective where it is not open yet.

        Raises:
            CheckpointError: The arguments ask for what cannot be done, or the folder cannot be used.
        """
        from .megatron_engine import ScriptEngine

        args = self.training.get_args()
        refuse_unsupported(args)
        manager = self._manager
        if manager is not None and self._trained is not None:
            if manager.root == Path(args.save).absolute() and self._trained.is_same(trained):
                return manager
            self.close()
        engine = ScriptEngine(trained, self.training.get_args, lambda: self._further)
        self._trained = trained
        choices, options = self.choices, self._options(args)
        self._manager = CheckpointManager(
            args.save, {choices.role: engine}, data=choices.data, state=choices.state, options=options
        )
        return self._manager

    def wait(self) -> None:
        """Wait until the last save is committed."""
        if self._manager is not None:
            self._compacting(self._manager.wait)

    def close(self) -> None:
        """Finish the last save, and let the folder go; the next save opens it again."""
        manager, self._manager, self._trained = self._manager, None, None
        if manager is not None:
            self._compacting(manager.close)

    def save(self, trained: ScriptObjects, call: Call) -> None:
        """``save_checkpoint``.

        Raises:
            CheckpointError: See :meth:`~mcore_rlhf.manager.run.manager.CheckpointManager.save`.
        """
        training, args, iteration = self.training, self.training.get_args(), int(call["iteration"])
        refuse_modelopt(training, trained.chunks)
        manager = self.open(trained)
        training.ft_integration.on_checkpointing_start()
        iterator = call.get("train_data_iterator")
        training.maybe_save_dataloader_state(iterator, iteration, getattr(args, "dataloader_save", None))
        self._further = self._counters(call, args)
        self._compacting(partial(manager.save, iteration))  # which waits for the one before
        self._uncompacted = iteration
        if not manager.options.asynchronous:
            self._compacting(lambda: None)
        done = "is being saved" if manager.options.asynchronous else "is saved"
        training.print_rank_0(f"  iteration {iteration:7d} {done} in {manager.root}/global_step_{iteration}")
        training.ft_integration.on_checkpointing_end(is_async_finalization=False)

    def _compacting(self, finish: Callable[[], object]) -> None:
        """Let ``train_rl.py``'s bank of rollouts forget what the last step was trained with, once that is committed.

        Args:
            finish: Waits for the commit; if it raises, the bank keeps everything.

        Source: Megatron-LM main at 2a30ffb, ``megatron/training/checkpointing.py`` (``save_checkpoint``, last lines).
        """
        iteration, self._uncompacted = self._uncompacted, None
        finish()
        if iteration is not None and getattr(self.training.get_args(), "rl_durable_rollout_bank", False):
            import_module("megatron.rl.rl_utils").maybe_compact_rollout_bank(iteration)

    def _counters(self, call: Call, args: Any) -> dict[str, object]:
        """Further top-level values. In the ``torch`` format Megatron's rerun state machine has nothing to save (None)."""
        machine, iterator = self.training.get_rerun_state_machine(), call.get("train_data_iterator")
        rerun = machine.state_dict(data_iterator=iterator, ckpt_format=args.ckpt_format)
        counters = {COUNTER: call[COUNTER]}
        return counters if not rerun else {"rerun_state_machine": rerun, **counters}

    def _options(self, args: Any) -> ManagerOptions:
        """Megatron decides when to save and catches the signals; ``--save-retain-interval`` is a rule of retention."""
        keep, every = self.choices.options.keep, getattr(args, "save_retain_interval", None)
        if keep is None and every is not None:
            keep = Retention((KeepLast(1), KeepEvery(every)))
        asynchronous = self.choices.asynchronous or bool(getattr(args, "async_save", False))
        return replace(self.choices.options, asynchronous=asynchronous, keep=keep, catch_signals=False)

    def load(self, trained: ScriptObjects, source: LoadSource) -> tuple[int, float]:
        """``load_checkpoint``, of what :func:`~.megatron_arguments.agreed_source` found.

        Returns:
            The iteration, and the floating-point operations done so far.

        Raises:
            CheckpointError: See :meth:`~mcore_rlhf.manager.run.manager.CheckpointManager.load`.
        """
        from .megatron_engine import ScriptEngine

        self.wait()
        training, args = self.training, self.training.get_args()
        engine = ScriptEngine(trained, training.get_args)
        goes_on = not (args.finetune or source.release)
        before = captured(engine)
        resumed = self._loaded(engine, trained, source, goes_on)
        lines = [f"{fate.value}: {text}" for fate, text in resumed.report.lines]
        if not goes_on or args.no_load_rng or engine.loaded_args.get("no_save_rng"):
            put_back(before, engine)
            lines = [*_without_rng(lines), "random states: those of this run"]
        training.set_checkpoint_version(engine.further("checkpoint_version", 3.0))
        iteration = engine.loaded_iteration if goes_on else 0
        self._take_counters(engine, iteration)
        training.print_rank_0("\n    ".join([f"  loaded {resumed.path} at iteration {iteration}", *lines]))
        return iteration, engine.further(COUNTER, 0)

    def _loaded(self, engine: ScriptEngine, trained: ScriptObjects, source: LoadSource, goes_on: bool) -> Resumed:
        args, choices = self.training.get_args(), self.choices
        # a script that hands over neither optimizer nor scheduler wants weights, not its run back
        whole = goes_on and (trained.optimizer is not None or trained.scheduler is not None)
        data, state = (choices.data, choices.state) if whole else (None, None)
        options = replace(choices.options, read_only=True, catch_signals=False, exports=(), tensorboard=None)
        with CheckpointManager(source.root, {choices.role: engine}, data=data, state=state, options=options) as manager:
            resumed = manager.load(source.which, must_exist=True, optimizer=goes_on and not args.no_load_optim)
        assert resumed is not None
        return resumed

    def _take_counters(self, engine: ScriptEngine, iteration: int) -> None:
        """What Megatron-LM's function sets besides what it returns."""
        training, args, stored = self.training, self.training.get_args(), engine.loaded_args
        if stored and not args.finetune:
            training.check_checkpoint_args(comparable(stored, args))
            for name in SAMPLES:
                setattr(args, name, stored.get(name, 0))
            training.update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=True)
        if hasattr(training, "set_loaded_iteration"):
            training.set_loaded_iteration(engine.loaded_iteration)
        if iteration > 0:
            training.ft_integration.on_checkpoint_loaded(is_local_chkpt=False)


def _without_rng(lines: list[str]) -> list[str]:
    return [line for line in lines if "random states" not in line]

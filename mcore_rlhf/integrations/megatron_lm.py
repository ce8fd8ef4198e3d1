"""Megatron-LM's own training scripts (``pretrain_gpt.py``, ``train_rl.py``) with the checkpoint manager, in two lines.

::

    from mcore_rlhf.integrations import megatron_lm
    megatron_lm.install()                       # before pretrain(...)

Megatron-LM's functions for checkpoints are replaced wherever they have been imported. ``--save`` becomes the root of a run
(``<save>/global_step_N/actor/iter_…``, one commit for everything); ``--load`` takes such a root, one step, or a model in any
format that is read. Importing this module does not import Megatron; :func:`install` does.

What is handed on to Megatron-LM's own functions: releases (``release=True``), saves that name the ranks of a model
(conversion tools), ``--ckpt-convert-format``, and loading ``torch_dist`` and ``torch_dcp``. What is refused: saving in another
``--ckpt-format``, non-persistent checkpoints, ModelOpt's state.

Source: Megatron-LM core_v0.16.1 and megatron-core 0.19.2, ``megatron/training/checkpointing.py``, ``training.py``, ``initialize.py``,
``async_utils.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run.options import ManagerOptions
from mcore_rlhf.manager.run.snapshot import Data

from .megatron_arguments import ScriptObjects, agreed_source, find, has_steps, refuse_unsupported
from .megatron_session import Session, SessionChoices
from .seam import temporarily

_MODULES = ("checkpointing", "async_utils", "training")
_EXPLICIT = ("pipeline_rank", "expert_rank", "tensor_rank", "pipeline_parallel", "expert_parallel")


def install(
    *,
    asynchronous: bool = False,
    data: Data | None = None,
    state: RlhfState | None = None,
    options: ManagerOptions | None = None,
    role: str = "actor",
) -> None:
    """Let the script that runs here save and load through the manager. Call it on every rank, before ``pretrain``.

    Args:
        asynchronous: Whether saves go on behind training; ``--async-save`` does the same.
        data: The prompt sampler, or any loader with ``state_dict``; saved and restored with the model.
        state: The RLHF state; saved and restored with the model.
        options: The manager's. When to save stays Megatron's decision (``--save-interval``), and so do signals
            (``--exit-signal-handler``); ``keep`` goes before ``--save-retain-interval``.
        role: The name of the model.

    Raises:
        UsageError: It is installed already.
        Unsupported: Megatron-LM cannot be imported.
    """
    if _installed:
        raise UsageError("the drop-in for Megatron-LM is installed already; uninstall() it first")
    modules = {name: _imported(name) for name in _MODULES}
    session = Session(
        modules["checkpointing"], SessionChoices(asynchronous, data, state, options or ManagerOptions(), role)
    )
    _installed.append(DropIn(session, modules).put_in_place())


def uninstall() -> None:
    """Finish the last save, close the manager and put Megatron-LM's own functions back; collective.

    Raises:
        CheckpointError: The last save failed.
    """
    while _installed:
        drop_in = _installed.pop()
        drop_in.replacements.undo()
        drop_in.session.close()


def _imported(name: str) -> ModuleType:
    try:
        return import_module(f"megatron.training.{name}")
    except ImportError as error:
        raise Unsupported(
            f"Megatron-LM's megatron.training.{name} cannot be imported: {error}\n"
            "Run inside Megatron-LM's checkout, or put it on PYTHONPATH; the package megatron-core alone has no megatron.training."
        ) from error


@dataclass(slots=True)
class Replacements:
    """Functions of other modules that stand aside for a while."""

    _undo: list[tuple[ModuleType, str, Function]] = field(default_factory=list)

    def replace(self, module: ModuleType, name: str, new: Function) -> None:
        """Replace a function in its own module, and in every module that has imported it under its name.

        ``from a import f`` copies the reference, so replacing ``a.f`` alone would miss it. Modules that are imported later
        find the new one.

        Args:
            module: Where it is defined.
            name: Its name.
            new: What stands in its place.
        """
        old: Function = getattr(module, name)
        others: list[object] = list(sys.modules.values())
        for one in others:
            # vars, not getattr: a lazy module must not be made to import something
            if isinstance(one, ModuleType) and vars(one).get(name) is old:
                self._undo.append((one, name, old))
                setattr(one, name, new)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            module, name, old = self._undo.pop()
            setattr(module, name, old)


@dataclass(slots=True)
class DropIn:
    """The functions that stand in for Megatron-LM's.

    Args:
        session: Does the work.
        modules: Megatron-LM's modules by their short names.
    """

    session: Session
    modules: dict[str, ModuleType]
    replacements: Replacements = field(default_factory=Replacements)

    def put_in_place(self) -> DropIn:
        """Replace everything, wherever it has been imported."""
        for module, name, make in (
            ("checkpointing", "save_checkpoint", self._saving),
            ("checkpointing", "load_checkpoint", self._loading),
            ("checkpointing", "checkpoint_exists", self._existing),
            ("checkpointing", "load_args_from_checkpoint", self._loading_args),
            ("async_utils", "maybe_finalize_async_save", self._finalizing),
            ("training", "setup_model_and_optimizer", self._setting_up),
        ):
            original = getattr(self.modules[module], name)
            self.replacements.replace(self.modules[module], name, wraps(original)(make(original)))
        return self

    def _saving(self, original: Function) -> Function:
        def save_checkpoint(*args: Any, **named: Any) -> Any:
            call = _bound(original, args, named)
            explicit = any(call.get(name) is not None for name in _EXPLICIT)
            if explicit or call.get("release") or self._converts():
                return original(*args, **named)
            if call.get("non_persistent_ckpt"):
                raise Unsupported(
                    "a non-persistent checkpoint is not done by the manager: leave out the options for it"
                )
            return self.session.save(_trained(call["model"], call), call)

        return save_checkpoint

    def _loading(self, original: Function) -> Function:
        def load_checkpoint(*args: Any, **named: Any) -> Any:
            call, script = _bound(original, args, named), self.session.training.get_args()
            source = agreed_source(script, call.get("load_arg", "load"))
            if source.kind == "megatron":  # it describes the live model by the format that it is told
                with temporarily(script, {"ckpt_format": source.format, "use_dist_ckpt": True}):
                    return original(*args, **named)
            if call.get("skip_load_to_model_and_opt"):
                return original(*args, **named)
            if source.kind == "nothing":
                self.session.training.print_rank_0(
                    f"WARNING: no checkpoint in {source.path}; training starts from random"
                )
                return 0, 0
            return self.session.load(_trained(call["ddp_model"], call), source)

        return load_checkpoint

    def _existing(self, original: Function) -> Function:
        def checkpoint_exists(checkpoints_path: str | None) -> bool:
            return bool(original(checkpoints_path)) or has_steps(checkpoints_path)

        return checkpoint_exists

    def _loading_args(self, original: Function) -> Function:
        def load_args_from_checkpoint(args: Any, load_arg: str = "load", *rest: Any, **named: Any) -> Any:
            source = find(getattr(args, load_arg), getattr(args, "ckpt_step", None))
            if source.kind not in ("root", "step"):
                return original(args, load_arg, *rest, **named)
            folder = str(source.model_folder(self.session.choices.role))
            with temporarily(args, {load_arg: folder, "ckpt_step": None}):
                return original(args, load_arg, *rest, **named)

        return load_args_from_checkpoint

    def _finalizing(self, original: Function) -> Function:
        def maybe_finalize_async_save(*args: Any, **named: Any) -> Any:
            call = _bound(original, args, named)
            result = original(*args, **named)
            if call.get("terminate"):
                self.session.close()
            elif call.get("blocking"):
                self.session.wait()
            return result

        return maybe_finalize_async_save

    def _setting_up(self, original: Function) -> Function:
        """What cannot work is found before the model is built, or before it is trained, not at the first save."""

        def setup_model_and_optimizer(*args: Any, **named: Any) -> Any:
            script = self.session.training.get_args()
            saves = bool(script.save) and not self._converts()
            if saves:
                refuse_unsupported(script)
            model, optimizer, scheduler = result = original(*args, **named)
            if saves and not getattr(script, "skip_train", False):
                self.session.open(_trained(model, {"optimizer": optimizer, "opt_param_scheduler": scheduler}))
            return result

        return setup_model_and_optimizer

    def _converts(self) -> bool:
        return getattr(self.session.training.get_args(), "ckpt_convert_format", None) is not None


_installed: list[DropIn] = []


def _trained(model: Any, call: dict[str, Any]) -> ScriptObjects:
    return ScriptObjects(model, call["optimizer"], call["opt_param_scheduler"])


def _bound(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, whatever this version of Megatron-LM calls them and in whatever order."""
    bound = signature(function).bind(*args, **named)
    bound.apply_defaults()
    return dict(bound.arguments)


__all__ = ["install", "uninstall"]


Function = Callable[..., Any]

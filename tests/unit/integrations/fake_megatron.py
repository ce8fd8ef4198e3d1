"""Megatron-LM's ``megatron.training``, as far as the drop-in touches it: signatures are the real ones, deeds are noted.

Source: Megatron-LM core_v0.16.1, ``megatron/training/{checkpointing,async_utils,training,initialize}.py``.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
MODEL = ("num_layers", "hidden_size", "num_attention_heads")


def script_args(**given: Any) -> Namespace:
    """What the drop-in looks at; everything else is the model's."""
    defaults = dict(
        save=None, load=None, pretrained_checkpoint=None, ckpt_step=None, ckpt_format="torch", use_dist_ckpt=False, async_save=False,
        finetune=False, no_load_optim=False, no_load_rng=False, no_save_optim=False, no_save_rng=False,
        exit_on_missing_checkpoint=False, save_retain_interval=None, non_persistent_ckpt_type=None,
        non_persistent_save_interval=None, ckpt_convert_format=None, optimizer="adam", load_main_params_from_ckpt=False,
        skip_train=False, consumed_train_samples=0, skipped_train_samples=0, consumed_valid_samples=0,
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, num_layers=2, hidden_size=8, num_attention_heads=2,
    )  # fmt: skip
    return Namespace(**{**defaults, **given})


@dataclass
class FakeMegatron:
    """The modules, the script's arguments, and what was done."""

    args: Namespace = field(default_factory=script_args)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    version: float | None = None
    samples: list[int] = field(default_factory=list)
    modules: dict[str, ModuleType] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("checkpointing", "async_utils", "training", "initialize"):
            self.modules[f"megatron.training.{name}"] = ModuleType(f"megatron.training.{name}")
        self._fill_checkpointing(self.checkpointing)
        self.module("async_utils").maybe_finalize_async_save = self._finalizing()  # type: ignore[attr-defined]
        training, initialize = self.module("training"), self.module("initialize")
        for name in ("save_checkpoint", "load_checkpoint", "checkpoint_exists"):  # from … import …
            setattr(training, name, getattr(self.checkpointing, name))
        training.maybe_finalize_async_save = self.module("async_utils").maybe_finalize_async_save  # type: ignore[attr-defined]
        training.setup_model_and_optimizer = self._setting_up()  # type: ignore[attr-defined]
        initialize.load_args_from_checkpoint = self.checkpointing.load_args_from_checkpoint  # type: ignore[attr-defined]

    def module(self, name: str) -> Any:
        return self.modules[f"megatron.training.{name}"]

    @property
    def checkpointing(self) -> Any:
        return self.module("checkpointing")

    def _fill_checkpointing(self, module: Any) -> None:
        module.get_args = lambda: self.args
        module.print_rank_0 = lambda text: self.calls.append(("print", text))
        module.unwrap_model = list
        module.has_nvidia_modelopt = False
        module.set_checkpoint_version = self._set_version
        module.set_loaded_iteration = lambda iteration: self.calls.append(("loaded_iteration", iteration))
        module.update_num_microbatches = lambda consumed_samples, verbose=False: self.samples.append(consumed_samples)
        module.check_checkpoint_args = self._check
        module.maybe_save_dataloader_state = lambda *given: self.calls.append(("dataloader", *given))
        module.get_rerun_state_machine = lambda: SimpleNamespace(state_dict=lambda data_iterator, ckpt_format: None)
        module.ft_integration = SimpleNamespace(
            on_checkpointing_start=lambda: self.calls.append(("start",)),
            on_checkpointing_end=lambda is_async_finalization: self.calls.append(("end", is_async_finalization)),
            on_checkpoint_loaded=lambda is_local_chkpt: self.calls.append(("loaded", is_local_chkpt)),
        )
        self._fill_replaced(module)

    def _set_version(self, value: float) -> None:
        assert self.version in (None, value), "checkpoint versions do not match"
        self.version = value

    def _check(self, stored: Namespace) -> None:
        for name in (*MODEL, *(LAYOUT if self.version and self.version >= 3.0 else ())):
            assert getattr(stored, name) == getattr(self.args, name), f"{name} value from checkpoint is not equal"

    def _fill_replaced(self, module: Any) -> None:
        def save_checkpoint(
            iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far,
            checkpointing_context=None, pipeline_rank=None, expert_rank=None, tensor_rank=None, pipeline_parallel=None,
            expert_parallel=None, non_persistent_ckpt=False, train_data_iterator=None,
            preprocess_common_state_dict_fn=None, release=False, tp_group=None, pp_group=None, dp_cp_group=None,
        ):  # type: ignore[no-untyped-def]  # fmt: skip
            self.calls.append(("megatron saves", iteration, release))

        def load_checkpoint(
            ddp_model, optimizer, opt_param_scheduler, load_arg="load", strict=True, checkpointing_context=None,
            skip_load_to_model_and_opt=False, tp_group=None, pp_group=None, dp_cp_group=None,
        ):  # type: ignore[no-untyped-def]  # fmt: skip
            self.calls.append(
                ("megatron loads", getattr(self.args, load_arg), self.args.ckpt_format, self.args.use_dist_ckpt)
            )
            return 77, 7.0

        def checkpoint_exists(checkpoints_path):  # type: ignore[no-untyped-def]
            return (
                checkpoints_path is not None
                and (Path(checkpoints_path) / "latest_checkpointed_iteration.txt").is_file()
            )

        def load_args_from_checkpoint(args, load_arg="load", checkpointing_context=None):  # type: ignore[no-untyped-def]
            self.calls.append(("megatron reads args", getattr(args, load_arg), args.ckpt_step))
            return args, None

        for function in (save_checkpoint, load_checkpoint, checkpoint_exists, load_args_from_checkpoint):
            setattr(module, function.__name__, function)

    def _finalizing(self) -> Any:
        def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
            self.calls.append(("megatron finalizes", blocking, terminate))

        return maybe_finalize_async_save

    def _setting_up(self) -> Any:
        def setup_model_and_optimizer(model_provider_func, model_type, checkpointing_context=None):  # type: ignore[no-untyped-def]
            self.calls.append(("megatron sets up",))
            return model_provider_func()

        return setup_model_and_optimizer

"""What a run's configuration means: the options of the manager, the sampler and the KL controller that it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.options import WriteOptions, given
from mcore_rlhf.formats.registry import format_named

from ..rlhf.controls import AdaptiveKL, FixedKL, KLController
from ..rlhf.data_state import Indexable
from ..rlhf.sampler import PromptSampler
from ..run.options import Export, ManagerOptions, Mirror
from ..run.policies import AnyOf, AtEnd, BeforeDeadline, Deadline, EveryMinutes, EverySteps, OnSignal, SavePolicy
from ..run.retention import KeepBest, KeepEvery, KeepLast, KeepRule, Retention, SizeCap
from .run import RunConfig, config_hash
from .sections import ExportSection, KeepSection, MirrorSection


def manager_options(config: RunConfig, **more: Any) -> ManagerOptions:
    """The options of a :class:`~.manager.CheckpointManager`.

    The time limit counts from this call, so make them when the job starts.

    Args:
        config: The run's.
        more: Further fields of :class:`~.options.ManagerOptions`, such as ``on_event``; they win.

    Raises:
        UsageError: An export's format is not known.
        Unsupported: An export asks for something that cannot be made.
    """
    section = config.checkpoint
    limit = section.save.time_limit
    options: dict[str, Any] = {
        "save": AnyOf(tuple(_save_policies(config))),
        "keep": _retention(section.keep),
        "asynchronous": section.asynchronous,
        "on_busy": section.on_busy,
        "on_error": section.on_error,
        "save_retries": section.save_retries,
        "save_timeout": section.save_timeout,
        "lazy_snapshot": section.lazy_snapshot,
        "max_host_memory": section.max_host_memory,
        "link_unchanged": section.link_unchanged,
        "on_existing": section.on_existing,
        "fsync": section.fsync,
        "rng": section.rng,
        "check": section.check,
        "follow_links": section.follow_links,
        "timeout": section.timeout,
        "catch_signals": section.save.on_signal,
        "deadline": Deadline.after(limit) if limit is not None else Deadline.of_job(),
        "mirror": None if section.mirror is None else _mirror(section.mirror),
        "exports": () if section.export is None else (_export(section.export),),
        "provenance": {"config_hash": config_hash(config)},
        "tensorboard": None if section.tensorboard is None else Path(section.tensorboard),
    }
    return ManagerOptions(**{**options, **more})


def prompt_sampler(config: RunConfig, dataset: Indexable) -> PromptSampler:
    """The sampler of the run's prompts, with the dataset's fingerprint.

    Raises:
        CheckpointError: See :class:`~.sampler.PromptSampler` and :func:`~.data_state.fingerprint`.
    """
    data = config.data
    return PromptSampler.for_dataset(
        dataset,
        seed=data.seed,
        group_size=config.algorithm.group_size,
        shuffle=data.shuffle,
        epochs=config.runner.max_epochs,
        batch_size=data.rollout_batch_size,
        last_batch=data.last_batch,
        on_dataset_change=data.on_dataset_change,
    )


def kl_controller(config: RunConfig) -> KLController:
    """The controller of the KL coefficient, at its beginning."""
    kl = config.algorithm.kl
    if kl.target is None or kl.horizon is None:
        return FixedKL(kl.coefficient)
    return AdaptiveKL(kl.coefficient, kl.target, kl.horizon)


def _save_policies(config: RunConfig) -> Iterator[SavePolicy]:
    save = config.checkpoint.save
    if config.save_every is not None:
        yield EverySteps(config.save_every)
    if save.every_minutes is not None:
        yield EveryMinutes(save.every_minutes)
    if save.before_deadline:
        yield BeforeDeadline(seconds=save.margin)
    if save.on_signal:
        yield OnSignal()
    if save.at_end:
        yield AtEnd()


def _retention(keep: KeepSection) -> Retention:
    rules: list[KeepRule] = []
    if keep.last is not None:
        rules.append(KeepLast(keep.last))
    if keep.best is not None:
        rules.append(KeepBest(keep.best.metric, keep.best.mode, keep.best.k))
    if keep.every is not None:
        rules.append(KeepEvery(keep.every))
    return Retention(tuple(rules), None if keep.max_size is None else SizeCap(keep.max_size))


def _mirror(section: MirrorSection) -> Mirror:
    more = section.model_dump(include={"url", "most_waiting", "on_error", "connections", "memory", "store"})
    return Mirror(**more, keep=_retention(section.keep))


def _export(section: ExportSection) -> Export:
    write = WriteOptions(
        no_optimizer=True,
        dtype=section.dtype,
        reference_config=section.reference_config,
        tokenizer=section.tokenizer,
        generation_config=section.generation_config,
    )
    beside = [row.name for row, _ in given(write=write) if not row.is_for(format_named(section.format).takes)]
    if beside:
        raise Unsupported(
            f"checkpoint.export: {' and '.join(beside)}: means nothing for format: {section.format}\n"
            "Leave it out, or export with format: hf."
        )
    return Export(section.format, section.every, section.role, write)

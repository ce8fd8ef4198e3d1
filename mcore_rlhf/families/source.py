"""What every reader gives and is asked for, and what every writer is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mcore_rlhf.core.account import Item, Report
from mcore_rlhf.core.catalog import Catalog
from mcore_rlhf.core.computed import Computation
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.rules import Rules
from mcore_rlhf.models.spec import ModelSpec
from mcore_rlhf.storage.leftovers import Carried
from mcore_rlhf.storage.paths import local_path


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One group of an optimizer: its own learning rate, weight decay, betas, step.

    Args:
        fields: Everything the format stores of it, except which parameters belong to it.
        expert: Whether it holds routed experts that expert parallelism deals out.
        params: Names of the parameters in it, in the optimizer's own order; empty where the format does not store them.
        scalars: Which of the fields the optimizer keeps once per parameter and not per group, such as ``step``.
    """

    fields: Mapping[str, object]
    expert: bool = False
    params: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()


@dataclass(slots=True)
class TrainingState:
    """What a checkpoint holds besides tensors.

    Args:
        iteration: The training iteration; 0 for a release.
        release: Whether the checkpoint is a release: weights only, no iteration of its own.
        args: The run's arguments by name; empty where the format stores none.
        groups: The optimizer's param groups.
        scheduler: The learning-rate scheduler's state, or None.
        grad_scaler: The loss scaler's state, or None.
        other: Further values, each under the format's own key, that are equal on all ranks.
    """

    iteration: int
    release: bool = False
    args: dict[str, object] = field(default_factory=dict)
    groups: tuple[ParamGroup, ...] = ()
    scheduler: dict[str, object] | None = None
    grad_scaler: object | None = None
    other: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a source, with the checksums that it carries itself.

    Args:
        path: Relative to the source's root.
        nbytes: Its length.
        records: ``(key, byte offset, bytes, crc32)`` of every part that has a checksum. Some formats read them only when asked,
            and raise CheckpointError then where the file is damaged.
        whole: CRC-32 of all its bytes, where a manifest lists one besides those of the records.
    """

    path: str
    nbytes: int
    records: Sequence[tuple[str, int, int, int]]
    whole: int | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """Tensors that are made of stored ones: sums with an adapter, weights times their scales.

    Args:
        root: Folder to which the files of the catalogue are relative; that of several checkpoints, as a rule.
        computations: What is computed, by the name of its record's file.
    """

    root: Path
    computations: Mapping[str, Computation]


@dataclass(slots=True)
class Source:
    """An opened checkpoint: nothing of its tensors has been read yet.

    Args:
        format: Name of the format.
        root: Folder to which all paths are relative.
        role: Whose model it is.
        model: What the model is.
        parallel: How it is cut.
        catalog: Where every logical tensor lies.
        state: What is not a tensor.
        files: All files, for checksums.
        states: Names of the optimizer's tensor states, without the parameter itself: ``master``, ``exp_avg``, …
        optimizer: What kind of optimizer wrote it: ``distributed``, ``plain``, ``zero1`` to ``zero3``, …, or None.
        notes: What a reader should know.
        native: The format's own view, for a target of the same format.
        computed: What of it is stored nowhere, but computed from files; None for an ordinary checkpoint.
        moved: Items of the source that this one was made of, and what they are a part of here; see :mod:`.crossing`.
        distrust: Why parameters and their masters may disagree though no byte is damaged: a fault of the framework that wrote
            them; empty where nothing of the kind is known.
        unread: Why the optimizer was not read though it is there; empty where it was, or was not to be.
        carried: Files that belong to the model and are none of its tensors: its config, tokenizer, code; None where there are none.
        unplaced: Values in its files of which the reader does not know what they are; see :mod:`.unplaced`.
    """

    format: str
    root: Path
    role: str
    model: ModelSpec
    parallel: ParallelConfig
    catalog: Catalog
    state: TrainingState
    files: tuple[StoredFile, ...]
    states: tuple[str, ...]
    optimizer: str | None
    notes: Report
    native: object = None
    computed: Computed | None = None
    distrust: str = ""
    unread: str = ""
    carried: Carried | None = None
    moved: Mapping[Item, Item] = field(default_factory=dict)
    unplaced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a source is to be read.

    Args:
        role: Whose model to read, where a folder holds several.
        step: Which iteration, where a root holds several and its tracker does not decide.
        rules: The user's own rules for parameters.
        stubs: Further pickled classes that may become inert stubs.
        vocab_size: True size of the vocabulary, where the files do not say.
        optimizer: Whether the optimizer is read at all; without it, its files may be missing or damaged.
        only: Which part of the model is read: a prefix of names such as ``policy``, or a pattern with ``*``.
        exclude_frozen: Leave out parameters that are not trained.
    """

    role: str | None = None
    step: int | None = None
    rules: Rules = field(default_factory=Rules)
    stubs: tuple[str, ...] = ()
    vocab_size: int | None = None
    optimizer: bool = True
    only: str | None = None
    exclude_frozen: bool = False


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a target is to be; None keeps what the source has.

    Args:
        tp, pp, vpp, ep, etp, dp: Degrees of parallelism.
        pipeline_layout: Layers per chunk (``3,5,4``) or Megatron's layout string.
        dtype: Element type of the parameters.
        optimizer: ``distributed`` or ``plain``.
        no_optimizer: Leave the optimizer out.
        rng: ``keep``, ``derive`` or ``drop``; None keeps for an unchanged layout and derives otherwise.
        vocab_size: True size of the vocabulary.
        padded_vocab_size: Rows of the written embedding.
        rules: The user's own rules for parameters.
        zero_stage: DeepSpeed's ZeRO stage, 0 to 3.
        reference_config: Folder with the model's Hugging Face ``config.json``, for a conversion between families of formats.
        transformer_impl: ``local`` or ``transformer_engine``: whose names a Megatron checkpoint has that is made of another
            family's.
        unused_patterns: Whether patterns of ``universal_checkpoint_info`` may match no parameter.
        max_shard_size: Bytes of tensors that one file of a Hugging Face folder holds at most.
        tokenizer: Folder whose tokenizer files and ``generation_config.json`` go into a Hugging Face folder.
        generation_config: A ``generation_config.json``, or a folder with one.
        eos_token_ids: Ids of the tokens that end a text, for ``generation_config.json`` and ``config.json``.
        masters: Take the parameters from their fp32 masters.
        with_optimizer: Keep the optimizer beside a format that has no place for it.
        merge_adapter: Add the adapter to the base weights.
        base_model: Folder of the model that an adapter belongs to.
        ignore_fields: Arguments, or fields of ``config.json``, that a conversion between families passes over although the
            target computes something else without them.
        dequantize: Make plain weights of fp8 elements and their scales.

    Raises:
        UsageError: A folder is a URL.
    """

    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    etp: int | None = None
    dp: int | None = None
    pipeline_layout: str | None = None
    dtype: str | None = None
    optimizer: str | None = None
    no_optimizer: bool = False
    rng: str | None = None
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    rules: Rules = field(default_factory=Rules)
    zero_stage: int | None = None
    reference_config: str | None = None
    transformer_impl: str | None = None
    unused_patterns: bool = False
    max_shard_size: int | None = None
    tokenizer: str | None = None
    generation_config: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    masters: bool = False
    with_optimizer: bool = False
    merge_adapter: bool = False
    base_model: str | None = None
    ignore_fields: tuple[str, ...] = ()
    dequantize: bool = False

    def __post_init__(self) -> None:
        for given in (self.reference_config, self.tokenizer, self.generation_config, self.base_model):
            if given is not None:
                local_path(given)  # refuses URLs


class Names(Protocol):
    """Under whose names a format has its tensors."""

    @property
    def name(self) -> str:
        """What the command line calls the format."""
        ...

    @property
    def family(self) -> str:
        """``megatron``, or ``module`` for a torch module's own names, which are Hugging Face's."""
        ...

"""A role of verl's whose weights are Hugging Face's files, as a bridge writes them, with Megatron's optimizer beside: its default.

The files are another format's, which :mod:`..registry` gives. Seen under Megatron's names, they say which keys and shapes Megatron would
have given the weights; with those, the rest of the folder is read as if they lay in it.

Source: verl 0.9.1, ``verl/utils/checkpoint/megatron_checkpoint_manager.py`` (``save_checkpoint``, ``_save_model_as_hf_via_bridge``);
mbridge 0.15.1, ``mbridge/core/bridge.py`` (``save_weights``; a vocabulary is padded in memory alone, where anybody asks for it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mcore_rlhf.core.catalog import PARAM
from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.errors import Incomplete, Unportable
from mcore_rlhf.families.crossing.description import LM_HEAD, VALUE_HEAD
from mcore_rlhf.families.crossing.quantized import refuse_quantized
from mcore_rlhf.families.crossing.to_huggingface import to_huggingface
from mcore_rlhf.families.crossing.to_megatron import to_megatron
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.folders import FoundIteration
from mcore_rlhf.families.megatron.new_run import NewRun
from mcore_rlhf.families.megatron.state import NO_PARAMETERS, opaque_item
from mcore_rlhf.families.module import CONFIG, ModuleState
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.run_folders import (
    OF_ADAPTERS,
    OF_ROLLS_LORA,
    PEFT_CONFIG,
    adapted_step,
    named_step,
    role_of,
    weights_of,
)
from mcore_rlhf.families.selection import renamed
from mcore_rlhf.families.sidecar import plain
from mcore_rlhf.families.source import ITERATION, Source, below
from mcore_rlhf.formats.base import Format, Target, TargetFile
from mcore_rlhf.models.huggingface.config import method_of
from mcore_rlhf.models.huggingface.table import GROUPED, LOCAL, SEQUENTIAL, TRANSFORMER_ENGINE
from mcore_rlhf.storage.dcp.folder import DcpTensor
from mcore_rlhf.storage.dcp.metadata import TensorMeta
from mcore_rlhf.storage.paths import ReadablePath

from .folders import DistFolder
from .names import as_keys_are, spelling_of_names, stacked

_DIVISOR = "make_vocab_size_divisible_by"
_OF_A_RUN = ("iteration", "consumed_train_samples", "seed")
"""Arguments that a new run's description makes up."""


@dataclass(frozen=True, slots=True)
class BridgedWeights:
    """Weights beside a folder that has none.

    Args:
        files: As they lie, under Hugging Face's names.
        role: The role's folder.
        of_ranks: Whether they are Megatron's own, as each rank has them, as in a step of ROLL's.
    """

    files: Source
    role: ReadablePath
    of_ranks: bool = False

    @property
    def place(self) -> str:
        """Where they lie, and as what."""
        if self.of_ranks:
            return f"{self.files.root.name}, each rank's own"
        return f"{weights_of(self.role).relative_to(self.role).as_posix()}, under Hugging Face's names"

    @classmethod
    def of(cls, folder: DistFolder, weights: Format, ranks: Format, options: ReadOptions) -> BridgedWeights:
        """Those of a role.

        Args:
            folder: Its optimizer.
            weights: The format of such weights.
            ranks: That of weights as each rank has them.
            options: How it is read.

        Raises:
            Incomplete: There are none.
            Unportable: The adapters of ranks lie there, and no base.
            CheckpointError: They are damaged.
        """
        if any(folder.located.folder.glob(OF_ADAPTERS)):
            raise Unportable(
                f"{folder.located.folder}: a LoRA of SkyRL's on Megatron: adapters in {OF_ADAPTERS}, an optimizer of these alone, no base\n"
                "SkyRL itself goes on from it. What it exports (trainer.hf_save_interval) is a model to convert."
            )
        step = adapted_step(folder.located.folder)
        if step is not None and ranks.detect(folder.located.folder.parent):
            return cls(ranks.read(folder.located.folder.parent, replace(options, optimizer=False)), step, of_ranks=True)
        if step is not None and any(step.glob(f"*/{PEFT_CONFIG}")):
            raise Unportable(f"{step}: {OF_ROLLS_LORA}")
        role = role_of(folder.located.folder)
        if role is None or not weights.detect(weights_of(role)):
            raise Incomplete(f"{folder.located.folder}: holds no tensor of a model")
        found = weights.read(weights_of(role), replace(options, optimizer=False))
        return cls(found, role)

    def alone(self, located: FoundIteration) -> Source:
        """What it is to somebody who wants no optimizer: the files as they lie, of the step that the folders above are called.

        Args:
            located: The optimizer.
        """
        step = named_step(located.folder)
        if step is None or self.of_ranks:
            return self.files
        how = "from the name of the step's folder, since the weights say none"
        self.files.notes.through([ITERATION], {"at": step, "how": how})
        return replace(self.files, state=replace(self.files.state, iteration=step, release=False))

    def in_megatron(self, args: Arguments, options: ReadOptions) -> Source:
        """Under Megatron's names, by path from the role's folder.

        Args:
            args: What the run left of its arguments.
            options: How it is read.

        Raises:
            CheckpointError: Megatron has no names for such a model, or it is quantized.
        """
        files = below(self.files, self.role)
        if self.of_ranks:
            return files
        method = method_of(files.family.config)
        if files.model.quantized or method:
            refuse_quantized(files, method)
        engine = TRANSFORMER_ENGINE if args.transformer_engine else LOCAL
        grouped = engine != LOCAL and args.flag("moe_grouped_gemm", default=True)
        # nobody pads a vocabulary unless the run says so
        multiple = args.optional("padded_vocab_size") or args.integer(_DIVISOR, 1) * args.parallel().tp
        former = {
            "args": {**plain(args.values), _DIVISOR: multiple},
            "spelling": engine,
            "experts": GROUPED if grouped else SEQUENTIAL,
        }
        return to_megatron(replace(files, origin={**files.origin, **former}), WriteOptions(rules=options.rules))


def with_weights(folder: DistFolder, seen: Source, args: Arguments) -> DistFolder:
    """The folder with the keys and whole shapes that Megatron would have given the weights; nothing of them lies in it.

    Args:
        folder: It.
        seen: The weights under Megatron's names.
        args: The run's arguments.
    """
    model = seen.model
    spelling = spelling_of_names([spec.name for spec in model.params], args)
    if states := {key for keys in folder.tensors.values() for key in keys}:
        spelling = as_keys_are(spelling, states)
    homes = (
        (spec, place) for spec in model.params for place in stacked(spec, spelling, model.num_layers, model.num_experts)
    )
    keys = {
        home.key: DcpTensor(home.key, TensorMeta(spec.dtype, shape, ()), folder.dcp) for spec, (home, shape) in homes
    }
    return replace(folder, tensors={**folder.tensors, PARAM: keys})


def described(args: Arguments, seen: Mapping[str, object]) -> Arguments:
    """The run's arguments, and what the weights' own description says besides.

    Args:
        args: What the run left of them.
        seen: Those that a run of such a model would have.
    """
    made = {name: value for name, value in seen.items() if name not in _OF_A_RUN}
    return replace(args, values={**made, _DIVISOR: 1, **args.values})


def bridged_target(run: NewRun, weights: Format) -> Target:
    """The weights of a checkpoint that is to be written, as a bridge writes and reads them: a tied output layer as well.

    Source: mbridge 0.15.1, ``mbridge/models/llama.py``: a last stage asks for ``lm_head.weight``, tied or not, and a critic's head.

    Args:
        run: The checkpoint.
        weights: Their format.

    Raises:
        CheckpointError: The model has no names in Hugging Face's family.
    """
    options, rows = run.options, run.choices.padded_vocab_size
    wanted = WriteOptions(
        dtype=options.dtype, reference_config=options.reference_config, vocab_size=rows, rules=options.rules, no_optimizer=True,
        ignore_fields=options.ignore_fields,
    )  # fmt: skip
    seen = to_huggingface(run.source, wanted)
    critic = seen.model.get(VALUE_HEAD) is not None
    named = renamed(seen, lambda name: LM_HEAD if name == VALUE_HEAD else name) if critic else seen
    undescribed = replace(named, family=replace(ModuleState.needed(named), config={}))
    target = weights.target(undescribed, replace(wanted, reference_config=None))
    return replace(target, texts={**target.texts, CONFIG: json.dumps(seen.family.config, indent=2) + "\n"})


def with_bridged(target: Target, weights: Target, run: NewRun) -> Target:
    """A described checkpoint with its weights as a bridge writes them.

    Args:
        target: All but the weights.
        weights: See :func:`bridged_target`.
        run: The checkpoint.
    """
    folder = f"{target.described}/"
    carried = () if run.source.carried is None else run.source.carried.files
    texts = {folder + name: text for name, text in weights.texts.items() if name not in carried}
    files = (TargetFile(folder + file.path, file.layout) for file in weights.files)
    target.report.through(_RULES, run)
    held = {item: value for item, value in target.holds.items() if item not in map(opaque_item, run.family.opaque())}
    return replace(
        target, source=target.source.joined(weights.source), files=(*files, *target.files), texts={**texts, **target.texts}, holds=held,
    )  # fmt: skip


_RULES: tuple[Rule[NewRun], ...] = (
    Rule(Fate.NOTE, "weights: Hugging Face's files, as --like has them, from which verl's bridge loads"),
    NO_PARAMETERS.of_part(lambda run: run.family),
)
"""What becomes of what lies beside the weights elsewhere."""

"""What trainers write instead of arguments. Megatron-Bridge has ``run_config.yaml`` beside ``.metadata``; the model's fields in it are
Megatron's own. And instead of counters among them ``train_state.pt``, which its loader counts on from. verl has
``transformer_config.json`` in the role's folder: the fields of a ``TransformerConfig``, without functions; ROLL those of its own, which
is one, as ``mca_config.json`` beside its iteration.

Sources: NVIDIA-NeMo/Megatron-Bridge 067f987, ``src/megatron/bridge/training/checkpointing.py`` (``save_checkpoint``: ``run_config.yaml``),
``training/config.py`` (``ConfigContainer``), ``models/gpt_provider.py`` (``GPTModelProvider``, a ``TransformerConfig``); megatron_bridge
0.3.1, ``training/state.py`` (``TrainState.state_dict``: a tensor without dimensions for each field, by ``torch.save``). verl 0.9.1,
``verl/utils/checkpoint/megatron_checkpoint_manager.py`` (``_save_transformer_config``, ``_build_checkpoint_manifest``: ``world_size``);
0.7.0, the same (``save_checkpoint``). ROLL 8eb27cc2, ``mcore_adapter/src/mcore_adapter/models/model_config.py`` (``McaModelConfig``,
``PretrainedConfig.to_json_string``), ``training_args.py`` (``MegatronArguments``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from mcore_rlhf.errors import Corrupt
from mcore_rlhf.families.run_folders import (
    ADAPTED,
    ADAPTED_OPTIMIZER,
    CONTENTS,
    RUN_CONFIG,
    TRAIN_STATE,
    TRANSFORMER,
    adapted_step,
    random_files,
    role_of,
    weights_of,
)
from mcore_rlhf.models.meaning.arguments import modern
from mcore_rlhf.models.meaning.declared import arguments, transformer_fields, version
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.manifest import STEP_MANIFEST
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.torch_values import SmallTensor
from mcore_rlhf.storage.torchzip import Directory

from .state import SAMPLES

_STEP, _FLOPS = "step", "floating_point_operations_so_far"
"""What Megatron-LM has as arguments of the same names."""
_DOES = ("do_train", "do_valid", "do_test")
"""What the run that goes on says itself."""
_MAX, _MOST = 16 << 20, float(1 << 100)
_SAVED = ("save_optim", "save_rng")
"""Of its ``CheckpointConfig``; Megatron-LM's arguments say the opposite, with ``no_`` before it."""
_SECTIONS = ("model", "ddp", "optimizer", "train")
_NAMES = {
    "num_moe_experts": "num_experts", "bucket_size": "ddp_bucket_size",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}  # fmt: skip
"""What arguments of Megatron's are called there."""
_PADS = "should_pad_vocab"
"""Whether a provider of Megatron-Bridge's, which is a ``TransformerConfig``, pads the vocabulary. Source: as ``GPTModelProvider``."""
UNTIED = "untie_embeddings_and_output_weights"
_TIED, _GATED, _ACTIVATION = "share_embeddings_and_output_weights", "gated_linear_unit", "activation_func"
_GROUPS, _HEADS = "num_query_groups", "num_attention_heads"
_OF_ROLL = {
    "rotary_scaling": "use_rope_scaling", "rotary_scaling_factor": "rope_scaling_factor", "max_sequence_length": "max_position_embeddings",
    "moe_use_shared_expert_gate": "moe_shared_expert_gate",
}  # fmt: skip
_ROLL_ALONE = (
    "position_embedding_type",
    "padded_vocab_size",
    "squared_relu",
    "swiglu",
    "rotary_base",
    "rotary_percent",
    "transformer_impl",
)
_ROLL_TIED = "tie_embeddings_and_output_weights"
"""What ROLL calls otherwise, or has besides the fields of a ``TransformerConfig``."""
_OF_A_RANK = re.compile(r"__(\d{1,7})_\d+\.distcp")
_OF_A_CLASS = re.compile(r"[A-Z]\w*\.\w+")
"""A member of an enumeration, as text."""
_ACTIVATIONS = {"silu": "torch.nn.functional.silu", "gelu": "torch.nn.functional.gelu"}
"""What Hugging Face's ``hidden_act`` is called there."""


@dataclass(frozen=True, slots=True)
class TrainState:
    """How far a run of Bridge's has come.

    Args:
        step: The iteration; its root's tracker says the same.
        counters: Samples, under the names of Megatron's arguments.
        operations: Floating-point operations so far, or None.
        directory: The file.
        rest: What it says that nobody knows.
    """

    step: int
    counters: Mapping[str, int]
    operations: int | None
    directory: Directory
    rest: Mapping[str, object]


def train_state_beside(folder: ReadablePath, stubs: tuple[str, ...]) -> TrainState | None:
    """The counters of an iteration; None where there are none.

    Args:
        folder: An iteration's.
        stubs: Names of classes that may become inert stubs.

    Raises:
        CheckpointError: The file is damaged, or is something else.
    """
    if not (folder / TRAIN_STATE).is_file():
        return None
    opened = read_pt(folder, TRAIN_STATE, stubs=stubs)
    tree = opened.materialize(opened.tree)
    if not isinstance(tree, Mapping):
        raise Corrupt(f"{folder / TRAIN_STATE}: expected a run's counters, found a {type(tree).__name__}")
    step = _counter(folder, tree, _STEP)
    counters = {name: _counter(folder, tree, name) for name in SAMPLES if name in tree}
    operations = _counter(folder, tree, _FLOPS) if _FLOPS in tree else None
    rest = {str(key): value for key, value in tree.items() if key not in (_STEP, *SAMPLES, _FLOPS, *_DOES)}
    return TrainState(step, counters, operations, opened.directory, rest)


def _counter(folder: ReadablePath, tree: Mapping[str, object], name: str) -> int:
    value = tree.get(name)
    number = float(value) if isinstance(value, SmallTensor) and value.numel() == 1 else -1.0
    if not 0 <= number < _MOST:
        raise Corrupt(
            f"{folder / TRAIN_STATE}: {name} should be a number of no dimensions, not negative, and is {value!r:.80}\n"
            "Copy the file again from where it was written."
        )
    return int(cast(SmallTensor, value)) if name != _FLOPS else int(number)


def arguments_beside(folder: ReadablePath) -> tuple[str, dict[str, object]]:
    """In which file a run's configuration is, and the arguments that it amounts to; empty where there is none.

    Args:
        folder: An iteration's, or a part of a role's of verl.

    Raises:
        Corrupt: It cannot be read.
    """
    if (folder / RUN_CONFIG).is_file():
        return RUN_CONFIG, _of_bridge(folder)
    if (step := adapted_step(folder)) is not None:
        return ADAPTED, _of_roll(step)
    role = role_of(folder)
    return ("", {}) if role is None or not (role / TRANSFORMER).is_file() else (TRANSFORMER, _of_verl(role))


def _of_bridge(folder: ReadablePath) -> dict[str, object]:
    import yaml  # who reads no such folder needs none of it

    try:
        found = yaml.safe_load(reading.read_bytes(folder / RUN_CONFIG, _MAX))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _unreadable(folder / RUN_CONFIG, error) from None
    if not isinstance(found, Mapping):
        raise Corrupt(f"{folder / RUN_CONFIG}: expected a run's configuration, found a {type(found).__name__}")
    sections = {name: part for name in _SECTIONS if isinstance(part := found.get(name), Mapping)}
    plain = {name: value for part in sections.values() for name, value in _plain(part)}
    saving = found.get("checkpoint")
    unsaved = {f"no_{name}": True for name in _SAVED if isinstance(saving, Mapping) and saving.get(name) is False}
    return {**plain, **_of_model(sections.get("model", {})), **unsaved}


def _of_verl(role: ReadablePath) -> dict[str, object]:
    """The model's fields. The activation, which is a function, is that of the ``config.json`` of a role that has one; how many ranks
    there were stands in the list of contents.
    """
    fields = _json(role / TRANSFORMER)
    plain: dict[str, object] = {"add_position_embedding": True}  # as a GPTModel is made
    plain |= {name: value for name, value in _plain(fields) if not _OF_A_CLASS.fullmatch(str(value))}
    if fields.get(_PADS) is False:
        plain["make_vocab_size_divisible_by"] = 1
    if (world := _json(role / CONTENTS).get("world_size")) and isinstance(world, int):
        plain["world_size"] = world
    activation = _ACTIVATIONS.get(str(_json(weights_of(role) / "config.json").get("hidden_act")))
    said: dict[object, object] = {name: fields[name] for name in (_GROUPS, _HEADS) if name in fields}
    if activation is not None:
        said |= {_GATED: fields.get(_GATED), _ACTIVATION: activation}
    return {**plain, **_of_model(said)}


def _of_roll(step: ReadablePath) -> dict[str, object]:
    """The model's fields, which have what Megatron's arguments have, and how many ranks left random states there.

    Its own runs pad no vocabulary, and overlap no gradients unless they are told to, which is stored nowhere.
    """
    apart = any(step.glob("iter_*/mp_rank_*/optimizer.pt"))
    plain: dict[str, object] = {
        "make_vocab_size_divisible_by": 1, "use_distributed_optimizer": not apart, "overlap_grad_reduce": False,
    }  # fmt: skip
    ours = (step / STEP_MANIFEST).is_file()  # whose files are numbered otherwise
    named = (
        () if ours else (_OF_A_RANK.fullmatch(one.name) for one in step.glob(f"iter_*/{ADAPTED_OPTIMIZER}/*.distcp"))
    )
    if ranks := {*random_files(step), *(int(found[1]) for found in named if found)}:
        plain["world_size"] = max(ranks) + 1
    return {**read_back(_json(step / ADAPTED)), **plain}


def read_back(fields: Mapping[object, object]) -> dict[str, object]:
    """The arguments that the fields of ROLL's configuration amount to.

    Args:
        fields: The content of ``mca_config.json``.
    """
    named = {_OF_ROLL.get(str(name), name): value for name, value in fields.items()}
    plain = {name: value for name, value in _plain(named) if not _OF_A_CLASS.fullmatch(str(value))}
    if isinstance(tied := fields.get(_ROLL_TIED), bool):
        plain[UNTIED] = not tied
    return {**plain, **_of_model({name: fields[name] for name in (_GROUPS, _HEADS) if name in fields})}


def adapted_config(args: Mapping[str, object], shown: ReadablePath) -> dict[object, object]:
    """The fields of ROLL's configuration that say what arguments say; whatever else a model of ROLL's has is as it is there.

    Args:
        args: Of the run.
        shown: The model's folder, or any.
    """
    back = {argument: name for name, argument in {**_OF_ROLL, **_NAMES}.items()}
    fields = transformer_fields()[max(transformer_fields(), key=version)].keys() | {*_OF_ROLL, *_ROLL_ALONE}
    said = {back.get(name, name): value for name, value in modern(args).items()}
    plain = (bool, int, float, str, type(None))
    found: dict[object, object] = {
        name: value for name, value in said.items() if name in fields and isinstance(value, plain)
    }
    found["gated_linear_unit"] = bool(args.get("swiglu") or args.get("geglu") or args.get("quick_geglu"))
    found[_ROLL_TIED] = not args.get(UNTIED, True)
    return {**_json(shown / ADAPTED), **found}


def _json(file: ReadablePath) -> Mapping[object, object]:
    """A file's object; empty where there is no file.

    Raises:
        Corrupt: It cannot be read.
    """
    try:
        found = reading.read_json(file) if file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, error, _WITHOUT) from None
    if not isinstance(found, Mapping):
        raise _unreadable(file, f"expected an object, found a {type(found).__name__}", _WITHOUT)
    return found


_WITHOUT = " If that run died as it wrote it, move it away: what the tensors' own names say is enough for the weights."


def _unreadable(file: ReadablePath, why: object, more: str = "") -> Corrupt:
    return Corrupt(f"{file}: cannot be read: {why}\nCopy the file again from where it was written.{more}")


def _plain(section: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    """Numbers, texts and truths under names that Megatron has arguments of."""
    known = arguments()
    for name, value in section.items():
        argument = _NAMES.get(str(name), str(name))
        if argument in known and (value is None or isinstance(value, bool | int | float | str)):
            yield argument, value


def _of_model(model: Mapping[object, object]) -> dict[str, object]:
    """What Megatron's arguments say in other words than its configuration does."""
    made: dict[str, object] = {}
    if isinstance(tied := model.get(_TIED), bool):
        made[UNTIED] = not tied
    if isinstance(groups := model.get(_GROUPS), int):
        made["group_query_attention"] = groups != model.get(_HEADS)
    if isinstance(gated := model.get(_GATED), bool):
        activation = model.get(_ACTIVATION)
        target = str(activation.get("_target_")) if isinstance(activation, Mapping) else str(activation)
        made |= {"swiglu": gated and target.endswith(".silu"), "squared_relu": target.endswith(".squared_relu")}
        made["quick_geglu"] = gated and target.endswith(".quick_gelu")
        made["geglu"] = gated and not made["swiglu"] and not made["quick_geglu"]
    return made

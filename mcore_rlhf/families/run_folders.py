"""What trainers call the folders of a run, as far as that says where a model is, and of which step.

Sources, at the versions that ran: verl b178a3c ``trainer/ppo/ray_trainer.py`` (``global_step_N/actor``), RLinf a3816b5
``runners/reasoning_runner.py`` (the same), NeMo-RL 7ea279a ``nemo_rl/utils/checkpoint.py`` (``step_N/policy/weights``), torchtitan 0.2.2
``components/checkpoint.py`` (``step-N``), Megatron (``iter_N``), transformers 5.23.0 ``trainer_utils.py`` (``checkpoint-N``), AReaL 1.0.4
``areal/utils/{saver,recover}.py`` (``recover_checkpoint``, beside ``recover_info``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mcore_rlhf.errors import Corrupt, Incomplete
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath, absolute, lies_in

_STEP = re.compile(r"(?:global_step_|step-|step_|iter_|checkpoint-)0*(\d{1,18})")
_LEVELS = 4
"""A model lies at most so deep in its step: ``step_3/policy/weights/model``, ``global_step_3/actor/model/dist_ckpt``."""
_UNCOUNTED = "training_info.json"
"""Stands in the step of a trainer whose Megatron worker counts no iterations, so that its folder is ``iter_0000000`` at every step.

Source: NeMo-RL 7ea279a, ``nemo_rl/utils/checkpoint.py`` (``init_tmp_checkpoint``), ``models/policy/workers/megatron_policy_worker.py``.
"""
_IN_ROOT = ("rollout/global_dataset_state_dict_{iteration}.pt",)
"""Where the data source of a run says how far it is, beside ``iter_…``; without the file it begins anew, with a line in the log.

Source: slime 624b824, ``slime/rollout/data_source.py`` (``RolloutDataSource.save``); miles has it from there.
"""

SWIFT = "args.json"
"""Beside the only iteration of a step of ms-swift's. Source: ms-swift 4.6.0, ``swift/megatron/trainers/base.py`` (``save_checkpoint``).
"""
OF_ADAPTERS = "adapter_tp*_pp*_cp*_dp*_ep*_etp*.pt"
"""The adapters of each rank, beside an optimizer that trains these alone; the base lies nowhere.

Source: SkyRL 0.3.0, ``skyrl/backends/skyrl_train/distributed/megatron/megatron_strategy.py`` (``_get_rank_path``, ``_save_lora_adapters``).
"""


ADAPTED, SCHEDULE, RANDOM = (
    "mca_config.json",
    "scheduler.pt",
    ("rng_state/rng_state_{rank}.pth", "rng_state_{rank}.pth", "rng_state.pth"),
)
"""What a step of ROLL's has beside its only iteration, which is 1 at every step: the fields of the model's configuration, and what else
goes on; random states lie at the second place in a step of mcore_adapter's own ``McaTrainer``, which LLaMA-Factory runs, and at the third
where that is one process. The iteration has the weights as each rank has them, or in the first folder, and in the second a distributed
optimizer; a plain one lies beside each rank's weights.

Source: ROLL 8eb27cc2, ``mcore_adapter/src/mcore_adapter/checkpointing.py`` (``save_config_and_state_dict``),
``trainer/trainer.py`` (``McaTrainer``), ``roll/distributed/strategy/megatron_strategy.py`` (``MegatronTrainStrategy.save_checkpoint``).
"""
ADAPTED_MODEL, ADAPTED_OPTIMIZER = "dist_model", "dist_optimizer"
ROLLS_DCP = "dcp"
"""What it has a step's DCP folder called, on FSDP2. Source: the same, ``roll/distributed/strategy/fsdp2_strategy.py``."""
ADAPTED_ITERATION, COUNTED = 1, "pipeline/worker_state_pipeline.json"
_OF_MCA = ("trainer_state.json", "training_args.bin")
"""What ``McaTrainer`` leaves in its steps, and ROLL does not, which counts its own from 0."""
PEFT_CONFIG = "adapter_config.json"
OF_ROLLS_LORA = (
    f"a LoRA of ROLL's: each rank's adapters in a folder with {PEFT_CONFIG}, the optimizer of these alone in the step, no base: not read\n"
    "ROLL itself goes on from it on the same ranks. With save_hf_model: true it saves a model to convert."
)
"""What a step is whose adapters alone are trained. Source: the same (``save_checkpoint``: ``peft_config.save_pretrained``)."""


def adapted_step(folder: ReadablePath) -> ReadablePath | None:
    """The step of ROLL's of whose iteration a folder is, or is a part; None where it is of none.

    Args:
        folder: One with Megatron's files.
    """
    named = (above for here in (folder, absolute(folder)) for above in [*here.parents][:2])
    return next((above for above in named if (above / ADAPTED).is_file()), None)


RUN_CONFIG, TRAIN_STATE = "run_config.yaml", "train_state.pt"
"""What Megatron-Bridge leaves in each iteration. Source: Megatron-Bridge 067f987, ``training/checkpointing.py`` (``save_checkpoint``)."""
_IN_ITERATION = (
    (RUN_CONFIG, (TRAIN_STATE,), "Megatron-Bridge's configuration of the run, without which it loads nothing"),
    (TRAIN_STATE, (RUN_CONFIG,), "Megatron-Bridge's counters, without which it begins the samples at 0"),
)
_PLAIN = "iter_*/mp_rank_*/optimizer.pt"
_IN_STEP = (
    (
        f"iter_*/{ADAPTED_OPTIMIZER}|{_PLAIN}",
        (f"{ADAPTED}&{SCHEDULE}",),
        "the optimizer, which ROLL saves with the schedule",
    ),
    (
        SCHEDULE,
        (f"{ADAPTED}&iter_*/{ADAPTED_OPTIMIZER}", f"{ADAPTED}&{_PLAIN}"),
        "the schedule, without which ROLL stops",
    ),
    (
        "latest_checkpointed_iteration.txt",
        (f"{ADAPTED}&iter_*/mp_rank_*",),
        "the tracker, without which ROLL finds no weights",
    ),
)
"""Files that a trainer always writes, each one or, with ``|`` between them, one of several; what lies there where it has written them,
patterns with ``&`` between those that do together; and what they are to it.

Sources: the same (``_load_checkpoint_from_path``, ``_get_train_state_from_state_dict``); ROLL as above (``load_checkpoint``;
``mcore_adapter/src/mcore_adapter/checkpointing.py``, ``_load_base_checkpoint``).
"""


def gone_beside(root: ReadablePath, iteration: ReadablePath) -> list[str]:
    """What is not there of that which a trainer writes together with files that are, a sentence each.

    Args:
        root: A checkpoint's root, which is a step of ROLL's.
        iteration: The iteration's folder in it.
    """
    return [
        f"{place / names.partition('|')[0]}: missing, {what}"
        for place, rows in ((iteration, _IN_ITERATION), (root, _IN_STEP))
        for names, marks, what in rows
        if not any(lies_in(place, name) for name in names.split("|"))
        and any(all(lies_in(place, one) for one in mark.split("&")) for mark in marks)
    ]


def refuse_unadapted(iteration: ReadablePath) -> None:
    """See that a step of ROLL's has its configuration: nothing else tells that the optimizer lies beside the ranks, nor which step it is.

    Args:
        iteration: The folder of any iteration.

    Raises:
        Incomplete: It has none.
    """
    part = next((one for one in (ADAPTED_OPTIMIZER, ADAPTED_MODEL) if (iteration / one).is_dir()), None)
    if part is not None and adapted_step(iteration) is None:
        raise Incomplete(
            f"{absolute(iteration).parent / ADAPTED}: missing, and {iteration / part} is part of a step of ROLL's\n"
            "Copy it again from where it was written, or use an older step."
        )


def random_files(step: ReadablePath) -> dict[int, str]:
    """The files with random states, relative to a step, by rank.

    Args:
        step: Its folder.
    """
    for pattern in RANDOM:
        named = re.compile(re.escape(pattern).replace(re.escape("{rank}"), r"(\d{1,7})"))
        there = (one.relative_to(step).as_posix() for one in step.glob(pattern.format(rank="*")))
        found = {int((match.groups() or (0,))[0]): match[0] for name in there if (match := named.fullmatch(name))}
        if found:
            return dict(sorted(found.items()))
    return {}


def adapted_number(step: ReadablePath) -> int | None:
    """How many steps are done after one of ROLL's, or of ``McaTrainer``'s, by its counters, or its name; None where neither says.

    Args:
        step: Its folder, or one in it.

    Raises:
        Corrupt: The counters cannot be read, or do not say.
    """
    for folder in (step, absolute(step).parent):
        if (folder / COUNTED).is_file():
            return _said_in(folder / COUNTED, "step", _NO_COUNT) + 1
        if (folder / _OF_MCA[0]).is_file():
            return _said_in(folder / _OF_MCA[0], _GLOBAL_STEP, _NO_COUNT)
    named = next((number for _, number in _steps_at(step)), None)
    return named if named is None or any((step / name).is_file() for name in _OF_MCA) else named + 1


_NO_COUNT = "ROLL itself does not go on from it. Copy the file again from where it was written."
RECOVERED, RECOVER_INFO, RECOVER_STEP = "recover_checkpoint", "recover_info", "step_info.json"
"""What AReaL calls a role's folder, the one beside the roles that says how far the run is, and the file in that with the step."""
_GLOBAL_STEP, _MOST_STEPS = "global_step", 10**15


def recovered_step(info: ReadablePath) -> int | None:
    """How many steps a run of AReaL has done, which counts them from 0; None where the file is not there.

    Args:
        info: The folder with the file.

    Raises:
        Corrupt: It cannot be read, or does not say.
    """
    path = info / RECOVER_STEP
    return _said_in(path, _GLOBAL_STEP, _NO_STEP) + 1 if path.is_file() else None


def _said_in(path: ReadablePath, key: str, advice: str) -> int:
    """A number of a step in a file of JSON.

    Raises:
        Corrupt: It cannot be read, or does not say.
    """
    try:
        said = reading.read_json(path)[key]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Corrupt(f"{path}: expected JSON with {key}: {type(error).__name__}: {error}\n{advice}") from error
    if type(said) is not int or not -1 <= said < _MOST_STEPS:
        raise Corrupt(f"{path}: {key} should be a whole number from -1 on, and is {said!r:.80}\n{advice}")
    return said


_NO_STEP = "AReaL itself begins such a run anew; a model of it is read as it is where its folder lies elsewhere."


def named_step(path: ReadablePath) -> int | None:
    """The step in the name of a folder, or of one above it, or in AReaL's or ROLL's file beside it; None where none says one.

    Args:
        path: A checkpoint's folder.

    Raises:
        Corrupt: See :func:`recovered_step` and :func:`adapted_number`.
    """
    if (step := adapted_step(path)) is not None:
        return adapted_number(step)
    here = absolute(path)
    if here.name == ROLLS_DCP and _STEP.fullmatch(here.parent.name):
        return adapted_number(here.parent)
    if here.name == RECOVERED and (found := recovered_step(here.parent.parent / RECOVER_INFO)) is not None:
        return found
    return next((step for _, step in _steps_at(path)), None)


def counted_above(path: ReadablePath) -> int | None:
    """The step of a checkpoint that calls itself iteration 0 whatever its step is; None where it is not known to be of those.

    Args:
        path: The checkpoint's folder.
    """
    return next((step for folder, step in _steps_at(path) if (folder / _UNCOUNTED).is_file()), None)


def files_of_step(root: ReadablePath, iteration: int) -> tuple[str, ...]:
    """The files in the root of Megatron's iterations that belong to one of them, relative to the root.

    Args:
        root: Where the iterations' folders are.
        iteration: Which is meant.
    """
    names = (pattern.format(iteration=iteration) for pattern in _IN_ROOT)
    return tuple(name for name in names if (root / name).is_file())


def _steps_at(path: ReadablePath) -> Iterator[tuple[ReadablePath, int]]:
    here = absolute(path)
    for folder in (here, *list(here.parents)[: _LEVELS - 1]):
        match = _STEP.fullmatch(folder.name)
        if match and not (folder.parent / ADAPTED).is_file():
            yield folder, int(match[1])


INNER = "dist_ckpt"
"""Where verl has Megatron's files in a role's folder, beside ``huggingface/``.

Source: verl ``verl/utils/checkpoint/megatron_checkpoint_manager.py`` and ``verl/utils/megatron_utils.py``
(``get_dist_checkpoint_path``) at b178a3c.
"""
RLINF_FOLDER = "dcp_checkpoint"
"""Where RLinf has DCP's files in a role's folder, beside its plain weights.

Source: RLinf, ``rlinf/hybrid_engines/fsdp/strategy/checkpoint.py``.
"""
CONTENTS, TRANSFORMER = "ckpt_contents.json", "transformer_config.json"
"""Beside both: what is saved where, in layout v2, and the fields of the model's ``TransformerConfig``."""
_MODEL = "model"
SPLIT_MODEL, SPLIT_WEIGHTS = f"{_MODEL}/{INNER}", f"{_MODEL}/huggingface"
SPLIT_BESIDE = (f"optimizer/{INNER}", f"extra/{INNER}")
SPLIT = (SPLIT_MODEL, *SPLIT_BESIDE)
"""Its layout v2: model, optimizer and random states in folders of their own; the model as Megatron's, or as Hugging Face's alone.

Source: the same at 1dda039 (``MANIFEST_SCHEMA_VERSION`` 2; ``ckpt_contents.json`` is written last, and not by the script that brings
older folders into this layout, where each part has all files).
"""


def is_split(role: ReadablePath) -> bool:
    """Whether a role's folder has model, optimizer and random states in folders of their own."""
    if (role / CONTENTS).is_file():
        return (role / _MODEL).is_dir()
    return (role / _MODEL).is_dir() and any((role / part).is_dir() for part in SPLIT_BESIDE)


def split_parts(role: ReadablePath) -> tuple[str, ...]:
    """The folders with parts of a role's checkpoint that have something in them, or that it says to have, relative to its own.

    verl makes the folders of all parts, also of those that it does not save.

    Args:
        role: A role's folder that :func:`is_split`.
    """
    try:
        said = reading.read_json(role / CONTENTS)["contents"].values()
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        said = ()
    listed = [entry.get("path") for entry in said if isinstance(entry, dict)]
    there = (part for part in SPLIT if (role / part).is_dir() and any((role / part).iterdir()))
    return tuple(dict.fromkeys([*(part for part in SPLIT if part in listed), *there]))


def split_beside(role: ReadablePath) -> tuple[str, ...]:
    """Those of them beside the model."""
    return tuple(part for part in split_parts(role) if part in SPLIT_BESIDE)


def is_bridged(role: ReadablePath) -> bool:
    """Whether a role's folder of verl's has its weights as a bridge writes them, as Hugging Face's files, and none of Megatron's.

    That is verl's default: without ``use_dist_checkpointing`` its optimizer alone, and random states, are Megatron's.

    Args:
        role: A role's folder that :func:`is_split`.
    """
    return SPLIT_MODEL not in split_parts(role) and any((role / SPLIT_WEIGHTS).glob("*.safetensors"))


def split_role(part: ReadablePath) -> ReadablePath | None:
    """The role's folder of which a folder is a part; None where it is a part of none.

    Args:
        part: A folder of Megatron's or Hugging Face's files.
    """
    here = absolute(part)
    role = here.parent.parent
    known = (SPLIT_MODEL, SPLIT_WEIGHTS, *SPLIT_BESIDE)
    return role if here.relative_to(role).as_posix() in known and is_split(role) else None


def role_of(part: ReadablePath) -> ReadablePath | None:
    """The role's folder of verl's in which Megatron's files lie, in either layout; None where they lie elsewhere.

    Args:
        part: A folder of Megatron's files.
    """
    here = absolute(part)
    return split_role(here) or (here.parent if here.name == INNER else None)


def weights_of(role: ReadablePath) -> ReadablePath:
    """Where a role's folder of verl's has what Hugging Face's libraries read, in the layout that it is in."""
    return role / SPLIT_WEIGHTS if is_split(role) else role / "huggingface"

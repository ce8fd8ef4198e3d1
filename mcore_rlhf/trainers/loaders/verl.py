"""What verl restores with ``resume_mode=auto`` or ``resume_path``: rank files of FSDP, or Megatron's parts (:mod:`.verl_megatron`).

Source: verl 0.9.1, ``verl/trainer/ppo/ray_trainer.py`` (``_load_checkpoint``), ``verl/utils/checkpoint/fsdp_checkpoint_manager.py``
(``load_checkpoint``), ``checkpoint_manager.py`` (``find_latest_ckpt_path``: no tracker is training from scratch).
"""

from __future__ import annotations

from collections.abc import Callable

from mcore_rlhf.trainers.conditions import (
    OTHER_BACKEND,
    OTHER_CLASS,
    UNRATED,
    both,
    broken,
    has,
    other_backend,
    other_dtype,
    other_optimizer,
    ranks_lack,
    ranks_of,
    stateless,
    uneven,
    ungrouped,
    unrated,
    without,
)
from mcore_rlhf.trainers.resuming import (
    EVERYTHING,
    MOST_RANKS,
    OF_OPTIMIZER,
    Habit,
    Loader,
    Outcome,
    Seen,
    Thing,
    rows_of,
)
from mcore_rlhf.trainers.torchdata import STOPS, stops_at
from mcore_rlhf.trainers.verl import TRAINER, TUNING

from . import verl_megatron

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_EXTRA = (Thing.SCHEDULER, Thing.RNG)
_RANKED = ("model_world_size_*", "optim_world_size_*", "extra_state_world_size_*")


def _world(seen: Seen) -> int | None:
    """Ranks that are to load, as said or configured; None for as many as saved."""
    gpus, nodes = seen.settings.number("trainer.n_gpus_per_node"), seen.settings.number("trainer.nnodes")
    return seen.world or (gpus * nodes if gpus and nodes else None)


_FSDP = has(*_RANKED, "fsdp_config.json")


def _by_name(seen: Seen) -> bool:
    """Whether the optimizer's states go by names in one level. Source: veomni 0.1.12, ``optim/optimizer.py`` (``MultiOptimizer``)."""
    return any(key.startswith("state.") for name in seen.places(_OPTIM_FILE) for key in seen.keys(name))


def _told(seen: Seen) -> object:
    """The configuration has an engine of torch's: ``{now}`` and ``{file}``."""
    now = seen.settings.get(f"{seen.role or 'actor'}.strategy", "engine.strategy")
    return now in ("fsdp", "fsdp2") and {"now": now, "file": next(iter(seen.places(_OPTIM_FILE)), "")}


_IN_FSDP = "utils/checkpoint/fsdp_checkpoint_manager.py (load_checkpoint)"
_IN_DRIVER = "trainer/ppo/ray_trainer.py (_load_checkpoint)"
_GONE = "{file} is not there ({ranks} ranks): its rank fails; as many ranks must load as saved"


def _of_file(things: tuple[Thing, ...], what: str, content: str, line: str) -> tuple[Habit, ...]:
    """The rows of one of the three files that each rank has."""
    where = f"utils/checkpoint/fsdp_checkpoint_manager.py:{line} (load_checkpoint)"
    return (
        Habit(
            things,
            _ANEW,
            f"checkpoint.load_contents has no {content}",
            where,
            both(_FSDP, verl_megatron.left_out(content)),
            True,
        ),
        Habit(things, _REFUSED, "{file} {wrong}: loading it fails", where, broken(f"{what}_world_size_*"), True),
        Habit(things, _REFUSED, _GONE, where, both(_FSDP, ranks_lack(what, _world)), True),
    )


_EXTRA_FILE, _OPTIM_FILE = "extra_state_world_size_*", "optim_world_size_*"
_IN_FILES = "utils/checkpoint/fsdp_checkpoint_manager.py:{} (load_checkpoint)"


def _inside(things: tuple[Thing, ...], outcome: Outcome, why: str, line: str, when: Callable[[Seen], object]) -> Habit:
    """What is asked of what a rank's file holds."""
    return Habit(things, outcome, why, _IN_FILES.format(line), when, True)


_KEYS = (
    _inside(OF_OPTIMIZER, _REFUSED, "{file} goes by names, as the engine veomni has it with several optimizers; {now} looks for numbers: a "
        "KeyError", "233", lambda seen: _by_name(seen) and _told(seen)),
    _inside(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: a KeyError", "233",
        lambda seen: not _by_name(seen) and without(_OPTIM_FILE, "state", "param_groups")(seen)),
    _inside(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: loading it, or the first step, fails", "233", ungrouped(_OPTIM_FILE)),
    _inside(OF_OPTIMIZER, _REFUSED, "{file} has no {key} for {count} parameters: loading it, or the first step, fails", "233",
        uneven(_OPTIM_FILE)),
    _inside((Thing.OPTIMIZER,), _ANEW, "{file} has no state for {count} parameters: frozen, or begun at zero; nothing is said",
        "233", stateless(_OPTIM_FILE, of_ranks=True)),
    _inside((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: a KeyError", "250", without(_EXTRA_FILE, "lr_scheduler")),
    _inside((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: a KeyError", "252",
        without(_EXTRA_FILE, "lr_lambdas", inside="lr_scheduler/")),
    _inside((Thing.SCHEDULER,), _ANEW, "{file} has no {key}: the schedule keeps its own; nothing is said", "252",
        without(_EXTRA_FILE, "last_epoch", inside="lr_scheduler/")),
    _inside((Thing.SCHEDULER,), _REFUSED, UNRATED,
        "252", unrated(_EXTRA_FILE, _OPTIM_FILE, "lr_scheduler/")),
    _inside((Thing.RNG,), _ANEW, "{file} has no {key}: the seed's own states; nothing is said", "245", without(_EXTRA_FILE, "rng")),
    _inside((Thing.RNG,), _REFUSED, "{file} has no {key}: a KeyError", "247",
        without(_EXTRA_FILE, "cpu", "numpy", "random", inside="rng/")),
)  # fmt: skip


_MODEL_DTYPE = {"critic": ("critic.fsdp.model_dtype", "critic.model.fsdp_config.model_dtype")}
"""Where the configuration has a role's, in 0.9.1 and in 0.7; any other role's is the actor's."""


def _other_dtype(seen: Seen) -> object:
    return _FSDP(seen) and other_dtype(*_MODEL_DTYPE.get(seen.role, ("actor.fsdp_config.model_dtype",)))(seen)


_AUTOMODEL = both(has("model/*"), has("optim/.metadata"))
_TITAN = has("step-*/.metadata")
_ENGINES = (
    Habit((Thing.WEIGHTS, *OF_OPTIMIZER, Thing.SCHEDULER), _REFUSED, "{file} {wrong}: loading it fails",
        "workers/engine/{automodel,torchtitan}/transformer_impl.py (load_checkpoint)",
        lambda seen: (_AUTOMODEL(seen) or _TITAN(seen)) and broken("model/*", "optim/*", "step-*/*")(seen)),
    Habit((Thing.WEIGHTS, *OF_OPTIMIZER), _RESTORED, "model/ and optim/, where the engine is automodel",
        "workers/engine/automodel/transformer_impl.py (load_checkpoint)", _AUTOMODEL),
    Habit((Thing.SCHEDULER,), _RESTORED, "with the optimizer, where the engine is automodel",
        "workers/engine/automodel/transformer_impl.py (load_checkpoint)", lambda seen: _AUTOMODEL(seen) and seen.held.scheduler),
    Habit((Thing.SCHEDULER,), _ANEW, "optim/ has none", "workers/engine/automodel/transformer_impl.py (load_checkpoint)", _AUTOMODEL),
    Habit((Thing.WEIGHTS, *OF_OPTIMIZER, Thing.SCHEDULER), _RESTORED, "step-N/ in the step's own folder, where the engine is torchtitan",
        "workers/engine/torchtitan/transformer_impl.py (load_checkpoint)", _TITAN),
    Habit((Thing.RNG,), _ANEW, "this engine saves no random states",
        "workers/engine/{automodel,torchtitan}/transformer_impl.py (save_checkpoint)",
        lambda seen: _AUTOMODEL(seen) or _TITAN(seen)),
)  # fmt: skip
"""Engines that have checkpoints of their own; veomni's are rank files as FSDP's are."""


_BACKENDS = {
    **dict.fromkeys(("fsdp", "fsdp2", "veomni", "dp"), (*_RANKED, "fsdp_config.json")),
    "megatron": verl_megatron.FILES, "torchtitan": ("step-*/.metadata",),
}  # fmt: skip
"""Source: verl 0.9.1, ``verl/workers/config/{actor,critic,engine}.py`` (``strategy``), ``verl/trainer/config/model_engine``."""


def _other_fsdp(seen: Seen) -> object:
    """The configuration wraps the model with the other FSDP: ``{now}`` and ``{was}``."""
    now, was = seen.settings.get(f"{seen.role or 'actor'}.strategy", "engine.strategy"), seen.held.fsdp
    return (
        _FSDP(seen) and was and now in ("fsdp", "fsdp2") and (now == "fsdp2") != (was == 2) and {"now": now, "was": was}
    )


_MODEL = (
    Habit((Thing.WEIGHTS, *OF_OPTIMIZER, *_EXTRA), _REFUSED, OTHER_BACKEND,
        "utils/checkpoint/{fsdp,megatron}_checkpoint_manager.py (load_checkpoint)",
        other_backend(_BACKENDS, "{role}.strategy", "engine.strategy", "model_engine")),
    Habit(OF_OPTIMIZER, _REFUSED, "strategy is {now}, and FSDP{was} wrote these: loading them, or the first step, fails", _IN_FSDP,
        _other_fsdp, True),
    *_of_file((Thing.WEIGHTS,), "model", "model", "213"),
    *_of_file(OF_OPTIMIZER, "optim", "optimizer", "233"),
    *_of_file(_EXTRA, "extra_state", "extra", "241"),
    *_KEYS,
    *_ENGINES,
    Habit((Thing.WEIGHTS, *OF_OPTIMIZER, *_EXTRA), _REFUSED, "neither files of ranks nor dist_ckpt are there",
        _IN_FSDP, lambda seen: not _FSDP(seen) and not verl_megatron.ON_MEGATRON(seen)),
    *verl_megatron.ROWS,
    Habit((Thing.WEIGHTS,), _RESTORED, "model_world_size_….pt of each rank", _IN_FSDP,
        ran=True),
    Habit(OF_OPTIMIZER, _REFUSED, OTHER_CLASS, _IN_FSDP, other_optimizer("{role}.optim.optimizer", "optim_world_size_*")),
    Habit(OF_OPTIMIZER, _RESTORED, "optim_world_size_….pt of each rank", _IN_FSDP, ran=True),
    Habit(_EXTRA, _RESTORED, "extra_state_world_size_….pt of each rank", _IN_FSDP, ran=True),
    Habit((Thing.DTYPE,), _IGNORED, "stored as {was}, cast to the {now} of model_dtype, moments too; nothing is said", _IN_FSDP,
        _other_dtype, True),
    Habit((Thing.LORA,), _IGNORED, "lora_adapter/ is for serving; the adapter goes on from model_world_size_….pt",
        _IN_FSDP,
        lambda seen: seen.has("lora_adapter/*") and not seen.has("model_world_size_*")),
    Habit((Thing.LORA,), _RESTORED, "with the weights; lora_adapter/ is for serving", _IN_FSDP,
        has("lora_adapter/*")),
)  # fmt: skip
"""What becomes of a model and its optimizer, whichever trainer of verl's loads them."""


def _anew(where: str) -> Habit:
    return Habit(EVERYTHING, _ANEW, "resume_mode is disable: nothing is loaded", where,
        lambda seen: seen.settings.get("trainer.resume_mode") == "disable")  # fmt: skip


ROWS = rows_of(
    "verl 0.9.1, verl/",
    _anew(_IN_DRIVER),
    *_MODEL,
    Habit((Thing.COUNTERS,), _RESTORED, "the step, out of the folder's name; an adaptive KL coefficient is not stored",
        _IN_DRIVER),
    Habit((Thing.DATA,), _ANEW, "data.pt is not there: a printed warning, and the data from the start", _IN_DRIVER,
        lambda seen: "data.pt" not in seen.above),
    Habit((Thing.DATA,), _REFUSED, "data.pt {wrong}: loading it fails", _IN_DRIVER,
        lambda seen: "data.pt" in seen.broken and {"wrong": seen.broken["data.pt"]}),
    Habit((Thing.DATA,), _REFUSED, STOPS, _IN_DRIVER, stops_at("data.pt"), True),
    Habit((Thing.DATA,), _RESTORED, "data.pt; at the end of an epoch it is not read, as the next begins anew",
        _IN_DRIVER),
)  # fmt: skip


_IN_HANDLER = "utils/checkpoint/checkpoint_handler.py:{}"


def _data_lacks(seen: Seen) -> object:
    """Data-parallel ranks that load have no file: ``{file}`` and ``{ranks}``."""
    dp = (
        seen.held.dp
        if verl_megatron.ON_MEGATRON(seen)
        else ranks_of(seen, _world(seen)) // (seen.settings.number(_SEQUENCE) or 1)
    )
    there = seen.ranks(TUNING.data)
    gone = [rank for rank in range(min(dp, MOST_RANKS)) if rank not in there]
    return gone and {"file": TUNING.data_file(gone[0]), "ranks": f"{len(gone)} of {dp}"}


_SEQUENCE = "engine.ulysses_sequence_parallel_size"
TUNED = rows_of(
    "verl 0.9.1, verl/",
    _anew(_IN_HANDLER.format("201 (_determine_resume_path)")),
    *_MODEL,
    Habit((Thing.COUNTERS,), _RESTORED, "the step, out of the folder's name", _IN_HANDLER.format("151 (load_checkpoint)"), ran=True),
    Habit((Thing.DATA,), _REFUSED, "{file} {wrong}: loading it fails", _IN_HANDLER.format("177 (_load_dataloader_state)"),
        broken(TUNING.data.format(rank="*")), True),
    Habit((Thing.DATA,), _ANEW, "{file} is not there ({ranks} ranks): a printed warning, and its rank's data from the start; "
        "sft_trainer_ray has one for all",
        _IN_HANDLER.format("188 (_load_dataloader_state)"), _data_lacks, True),
    Habit((Thing.DATA,), _REFUSED, STOPS, _IN_HANDLER.format("178 (_load_dataloader_state)"), stops_at(TUNING.data.format(rank="*")), True),
    Habit((Thing.DATA,), _RESTORED, f"{TUNING.data} of each data-parallel rank", _IN_HANDLER.format("178 (_load_dataloader_state)"),
        ran=True),
)  # fmt: skip

LOADER = Loader(TRAINER, "0.9.1", ROWS, ("trainer.resume_from_path",))
TUNING_LOADER = Loader(TUNING, "0.9.1", TUNED, ("trainer.resume_from_path",))

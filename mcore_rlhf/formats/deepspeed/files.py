"""Which files a native DeepSpeed checkpoint has, which rank writes each, and what the run's ``ds_config`` says of how they are.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_get_rank_zero_ckpt_name``, ``_get_ckpt_name``, ``_get_zero_ckpt_name``,
``_save_checkpoint``), ``runtime/pipe/module.py`` (``ckpt_layer_path``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from mcore_rlhf.errors import Corrupt, Incomplete, LayoutMismatch, NotACheckpoint, Problems, Unsupported, UsageError
from mcore_rlhf.models.meaning.bounds import MOST_RANKS
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath

_ACCELERATES_TAG = "pytorch_model"
"""The tag of DeepSpeed's in which accelerate has its model, and for which it asks by name: it needs no ``latest``. Of several models the
others' have ``_1``, … behind it.

Source: accelerate 1.15.0, ``accelerator.py`` (``save_state``, ``load_state``).
"""

LATEST = "latest"
_MODEL = re.compile(r"mp_rank_(\d{1,18})_model_states\.pt")
_MODEL_OF_RANK = re.compile(r"zero_pp_rank_(\d{1,18})_mp_rank_(\d{1,18})_model_states\.pt")
_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d{1,18})_mp_rank_(\d{1,18})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,18})(?:-model_(\d{1,18}))?-model_states\.pt")
_EXPERT = re.compile(r"layer_(\d{1,18})_expert_(\d{1,18})_mp_rank_(\d{1,18})_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_\d{1,18}_mp_rank_\d{1,18}_optim_states\.pt")
_OLD_EXPERT = re.compile(r"expert_\d{1,18}_mp_rank_\d{1,18}_model_states\.pt")
_MOST = 20
_AGAIN = "Copy the checkpoint again from where it came from, or use an older tag."


@dataclass(slots=True)
class TagFiles:
    """The files of one tag.

    Args:
        root: Folder that ``engine.load_checkpoint`` would be given.
        tag: Name of the tag's folder.
        model: Model file by model-parallel rank (stages 0 to 2).
        model_of_rank: Model file by (data-parallel, model-parallel) rank (stage 3).
        optim: Optimizer file by (data-parallel, model-parallel) rank.
        layers: Layer files of a ``PipelineModule`` by (layer, tensor-parallel rank).
        experts: Weight files of DeepSpeed's own experts by (layer, expert).
        expert_optim: Optimizer files of expert-parallel ranks, which stage 0 writes.
        prefix: What the optimizer files' names begin with: ``bf16_`` or nothing.
    """

    root: ReadablePath
    tag: str
    model: dict[int, str] = field(default_factory=dict)
    model_of_rank: dict[tuple[int, int], str] = field(default_factory=dict)
    optim: dict[tuple[int, int], str] = field(default_factory=dict)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    experts: dict[tuple[int, int], str] = field(default_factory=dict)
    expert_optim: list[str] = field(default_factory=list)
    prefix: str = ""

    @property
    def sliced(self) -> bool:
        """Whether every rank has a model file of its own: stage 3."""
        return bool(self.model_of_rank)

    @property
    def folder(self) -> ReadablePath:
        """The tag's folder."""
        return self.root / self.tag

    def path(self, name: str) -> str:
        """A file's path relative to the root."""
        return f"{self.tag}/{name}"


def model_name(mp_rank: int) -> str:
    """The model file of stages 0 to 2."""
    return f"mp_rank_{mp_rank:02d}_model_states.pt"


def model_name_of_rank(dp_rank: int, mp_rank: int) -> str:
    """The model file of stage 3; it never has a prefix."""
    return f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_model_states.pt"


def optim_name(dp_rank: int, mp_rank: int, prefix: str) -> str:
    """The optimizer file of stages 1 to 3; the prefix is ``bf16_`` where bf16 is enabled."""
    return f"{prefix}zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"


def layer_name(layer: int, tp_rank: int, tp: int) -> str:
    """The file of one layer of a ``PipelineModule``."""
    return f"layer_{layer:02d}-model_{tp_rank:02d}-model_states.pt" if tp > 1 else f"layer_{layer:02d}-model_states.pt"


def is_tag_folder(path: ReadablePath) -> bool:
    """Whether a folder holds files of a native tag, be they the optimizer's alone (a universal one has a folder ``zero`` beside them)."""
    if not path.is_dir() or (path / "zero").is_dir():
        return False
    with suppress(FileNotFoundError):  # a step beside the one that is meant may be deleted meanwhile
        return any(one.fullmatch(child.name) for child in path.iterdir() for one in (_MODEL, _MODEL_OF_RANK, _OPTIM))
    return False


def looks_like_root(path: ReadablePath) -> bool:
    """Whether a folder holds tags."""
    return any(True for _ in _tags(path))


def _tags(root: ReadablePath) -> Iterable[str]:
    return (child.name for child in (sorted(root.iterdir()) if root.is_dir() else []) if is_tag_folder(child))


def locate(path: ReadablePath, step: int | None) -> TagFiles:
    """Find the tag that a path means: a tag's folder itself, or a root whose ``latest`` decides.

    Raises:
        NotACheckpoint: There is none, or ``latest`` names one that is not there.
        UsageError: Several tags, and neither ``latest`` nor ``step`` says which.
        LayoutMismatch: Files of several runs are mixed.
        Unsupported: It has expert files of an old or a model-parallel run.
    """
    if is_tag_folder(path):
        return _sorted_out(path.parent, path.name)
    tags = list(_tags(path))
    if not tags:
        raise NotACheckpoint(f"{path}: no folder with …mp_rank_XX_model_states.pt in it{_what_latest_says(path)}")
    tag = _of_step(path, step, tags) if step is not None else _latest(path, tags)
    return _sorted_out(path, tag)


def _what_latest_says(root: ReadablePath) -> str:
    text = _read_latest(root)
    return "" if text is None else f"; '{LATEST}' names {text!r}, which is not such a folder\nIs it another root?"


def _read_latest(root: ReadablePath) -> str | None:
    path = root / LATEST
    return reading.read_line(path)[:200] if path.is_file() else None


def _latest(root: ReadablePath, tags: list[str]) -> str:
    tag, listed = _read_latest(root), ", ".join(tags[:_MOST])
    accelerates = [name for name in tags if re.fullmatch(rf"{_ACCELERATES_TAG}(_\d+)?", name)]
    if len(accelerates) > 1 and tag in (None, *accelerates):
        raise UsageError(
            f"{root}: holds {len(accelerates)} models of accelerate, each in a tag of its own: {', '.join(accelerates[:_MOST])}\n"
            "Give one of these folders itself."
        )
    if tag is None and accelerates:
        return accelerates[0]
    if tag is None:
        raise UsageError(
            f"{root}: there is no file '{LATEST}' to say which tag is meant; found {listed}\n"
            "Give the tag's folder itself, or its number with --step."
        )
    if tag not in tags:
        raise NotACheckpoint(
            f"{root}: '{LATEST}' names {tag!r}, but there is no such checkpoint; found {listed}\n"
            "Give one of these folders itself, or its number with --step."
        )
    return tag


def _of_step(root: ReadablePath, step: int, tags: list[str]) -> str:
    chosen = [tag for tag in tags if (match := re.search(r"(?<!\d)(\d{1,18})$", tag)) and int(match[1]) == step]
    if len(chosen) != 1:
        found = "several tags end" if chosen else "no tag ends"
        raise NotACheckpoint(
            f"{root}: {found} in {step}; found {', '.join(tags[:_MOST])}\nGive the tag's folder itself."
        )
    return chosen[0]


def _sorted_out(root: ReadablePath, tag: str) -> TagFiles:
    files, prefixes = TagFiles(root, tag), dict[str, str]()
    for name in sorted(child.name for child in (root / tag).iterdir()):
        if match := _MODEL.fullmatch(name):
            files.model[int(match[1])] = name
        elif match := _MODEL_OF_RANK.fullmatch(name):
            files.model_of_rank[int(match[1]), int(match[2])] = name
        elif match := _OPTIM.fullmatch(name):
            files.optim[int(match[2]), int(match[3])] = name
            prefixes.setdefault(match[1] or "", name)
        elif match := _LAYER.fullmatch(name):
            files.layers[int(match[1]), int(match[2] or 0)] = name
        else:
            _sort_out_expert(files, name)
    if not files.model and not files.model_of_rank:
        raise Incomplete(
            f"{files.folder / model_name(0)}: missing, as is {model_name_of_rank(0, 0)} of stage 3; of the optimizer "
            f"{next(iter(files.optim.values()))} is there\n{_AGAIN}"
        )
    _refuse_mixture(files, prefixes)
    files.prefix = next(iter(prefixes), "")
    return files


def _sort_out_expert(files: TagFiles, name: str) -> None:
    if match := _EXPERT.fullmatch(name):
        if int(match[3]):
            raise Unsupported(f"{files.folder / name}: experts with tensor or pipeline parallelism are not supported")
        files.experts[int(match[1]), int(match[2])] = name
    elif _EXPERT_OPTIM.fullmatch(name):
        files.expert_optim.append(name)
    elif _OLD_EXPERT.fullmatch(name):
        raise Unsupported(
            f"{files.folder / name}: experts without a layer's number, as DeepSpeed wrote them before 0.5.5\n"
            "Load it with DeepSpeed and save it again."
        )


def _refuse_mixture(files: TagFiles, prefixes: dict[str, str]) -> None:
    problems = Problems()
    advice = "Files of two runs are mixed in one tag: keep those of one."
    if len(prefixes) > 1:
        problems.add(LayoutMismatch, f"{files.folder}: holds both {' and '.join(prefixes.values())}", advice)
    if files.model and files.model_of_rank:
        both = f"{next(iter(files.model.values()))} (stages 0 to 2) and {next(iter(files.model_of_rank.values()))} (stage 3)"
        problems.add(LayoutMismatch, f"{files.folder}: holds both {both}", advice)
    problems.raise_if_any()


def check_complete(files: TagFiles, dp: int, mp: int, *, optimizer: bool) -> None:
    """Whether every rank's files are there, and none too many.

    Args:
        files: What is there.
        dp, mp: Degrees as the files themselves say.
        optimizer: Whether optimizer files are wanted.

    Raises:
        Corrupt: There was never a run of so many ranks.
        Incomplete: A rank's file is missing.
        LayoutMismatch: There is a file of a rank that the run did not have.
    """
    problems = Problems()
    if dp * mp > MOST_RANKS:  # before a list of them is made
        raise Corrupt(f"{files.folder}: its files say that the run had {dp}×{mp} ranks\n{_AGAIN}")
    ranks = [(dp_rank, mp_rank) for mp_rank in range(mp) for dp_rank in range(dp)]
    if files.sliced:
        _compare(files, {model_name_of_rank(*at) for at in ranks}, set(files.model_of_rank.values()), problems)
    else:
        _compare(files, {model_name(mp_rank) for mp_rank in range(mp)}, set(files.model.values()), problems)
    if optimizer:
        _compare(files, {optim_name(*at, files.prefix) for at in ranks}, set(files.optim.values()), problems)
    problems.raise_if_any()


def _compare(files: TagFiles, wanted: set[str], found: set[str], problems: Problems) -> None:
    for name in sorted(wanted - found):
        problems.add(Incomplete, f"{files.folder / name}: this rank's file is missing", _AGAIN)
    for name in sorted(found - wanted):
        problems.add(
            LayoutMismatch,
            f"{files.folder / name}: a rank that the run did not have, whose files say {len(wanted)} of this kind",
            "Files of runs with different world sizes are mixed in one tag: remove those that do not belong.",
        )


_REDUCED_SINCE = (0, 19, 3)


def section(config: object, name: str) -> Mapping[str, object]:
    """A section of it; empty where there is none."""
    found = config.get(name) if isinstance(config, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def is_round_robin(config: object) -> bool:
    """Whether stages 1 and 2 deal the parameters of a group to the ranks like cards."""
    return bool(section(config, "zero_optimization").get("round_robin_gradients"))


def momentum_is_flat(config: object, *, bf16_optimizer: bool) -> bool:
    """Whether stages 1 and 2 cut a momentum of Muon's like all other states.

    Source: deepspeed 0.19.8, ``runtime/bf16_optimizer.py`` (``_prepare_muon_updates``), ``runtime/zero/stage_1_and_2.py``
    (``_apply_muon_updates_cpu_offload``).

    Args:
        config: The run's.
        bf16_optimizer: Whether the run's optimizer is ``BF16_Optimizer``.
    """
    offload = section(section(config, "zero_optimization"), "offload_optimizer")
    return bf16_optimizer or offload.get("device") in ("cpu", "nvme")


def momentum_is_unreduced(config: object, version: object) -> bool:
    """Whether ranks computed momenta of gradients of which only their own elements were reduced.

    With ``reduce_scatter``, which is the default, DeepSpeed did so up to 0.19.2, and ranks do not agree on a parameter at a border.
    Source: deepspeedai/DeepSpeed, pull requests 8090 and 8141.

    Args:
        config: The run's.
        version: DeepSpeed's, as its files say it.
    """
    numbers = tuple(map(int, re.findall(r"\d{1,18}", str(version))[:3]))
    scattered = section(config, "zero_optimization").get("reduce_scatter") is not False
    return scattered and len(numbers) > 0 and numbers < _REDUCED_SINCE


_NAME_OF_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,18})(\..*)")


@dataclass(frozen=True, slots=True)
class ExpertName:
    """The name of an expert's parameter.

    Args:
        layer: What comes before the expert's number: one per layer.
        number: The expert's number, global or local.
        rest: What comes after it.
    """

    layer: str
    number: int
    rest: str

    def __str__(self) -> str:
        return f"{self.layer}{self.number}{self.rest}"


def expert_name(name: str) -> ExpertName | None:
    """The parts of a name, or None for what is no expert's."""
    found = _NAME_OF_EXPERT.fullmatch(name)
    return None if found is None else ExpertName(found[1], int(found[2]), found[3])

"""Reading the rank files of a checkpoint, every local tensor under its global name, and holding the ranks against each other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate, Rule, Values, same
from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, Problems, Unsupported, shown
from mcore_rlhf.families.megatron.arguments import Arguments, stored_arguments
from mcore_rlhf.families.megatron.complete import lacking
from mcore_rlhf.families.megatron.folders import MODEL_FILES, OPTIMIZER_FILE, FileRank, FoundIteration, model_file
from mcore_rlhf.families.megatron.state import ModelPart, RankValues, of_its_step
from mcore_rlhf.families.run_folders import adapted_step
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.megatron import expert_of, is_routed_expert, layer_of, renumbered
from mcore_rlhf.storage.pt import PtFile, read_pt
from mcore_rlhf.storage.stored import StoredTensor

PLAIN_FILE, _OPTIMIZER = "optimizer.pt", "optimizer"
"""What ROLL calls that of a plain optimizer, beside each rank's weights; and the key that it has elsewhere.

Source: ROLL 8eb27cc2, ``mcore_adapter/src/mcore_adapter/constants.py``, ``roll/distributed/strategy/megatron_strategy.py``.
"""
_DEALT_FILES = "layer_wise_optimizer_*.pt"
"""Those of a layer-wise optimizer, one for every data-parallel rank."""

MODEL_KEY = re.compile(r"model(\d*)")


@dataclass(slots=True)
class RankShard(RankValues):
    """Everything that one rank's folder holds, unread.

    Args:
        pt: The model file.
        distrib: The distributed optimizer's file, or None.
        dealt: The files of a layer-wise optimizer, by name.
        apart: A plain optimizer's file, where it has one of its own.
    """

    pt: PtFile
    distrib: PtFile | None
    dealt: dict[str, PtFile] = field(default_factory=dict)
    apart: PtFile | None = None

    @property
    def of_optimizer(self) -> PtFile:
        """The file that has the param groups."""
        return self.apart or self.pt

    @property
    def files(self) -> list[PtFile]:
        """The model file, and those of its optimizer."""
        return [self.pt, *filter(None, (self.distrib, self.apart)), *self.dealt.values()]


@dataclass(slots=True)
class RankFiles:
    """Opens the rank files of one checkpoint, each of them once.

    Args:
        located: Where the checkpoint is.
        stubs: Further pickled classes that may become inert stubs.
        optimizer: Whether the optimizer's own files are opened at all.
    """

    located: FoundIteration
    stubs: tuple[str, ...] = ()
    optimizer: bool = True
    _opened: dict[str, PtFile] = field(default_factory=dict)

    def shards(self, ranks: tuple[FileRank, ...]) -> list[RankShard]:
        """The files of all ranks; every problem is found before one error is raised.

        Raises:
            CheckpointError: A file is missing, damaged, or not what Megatron writes.
        """
        problems = Problems()
        shards = []
        for at in ranks:
            try:
                shards.append(self._shard(at))
            except CheckpointError as error:
                problems.add_error(error)
        problems.raise_if_any()
        return shards

    def first_arguments(self, folders: list[str]) -> tuple[str, dict[str, object]]:
        """The stored ``args`` of the first rank folder that can be read, and that file's name.

        Raises:
            CheckpointError: No folder has a readable model file.
        """
        problems = Problems()
        for folder in folders:
            try:
                pt = self._model(folder)
            except CheckpointError as error:
                problems.add_error(error)
                continue
            return pt.file, stored_arguments(pt.tree) if isinstance(pt.tree, dict) else {}
        problems.raise_if_any()
        raise Incomplete(f"{self.located.folder}: there are no rank folders")

    def _shard(self, at: FileRank) -> RankShard:
        pt = self._model(at.folder)
        if not isinstance(pt.tree, dict) or not any(MODEL_KEY.fullmatch(str(key)) for key in pt.tree):
            raise Unsupported(f"{pt.file}: expected a dictionary with 'model' or 'model0', found {_kind(pt.tree)}")
        distrib = None
        if self.optimizer and (self.located.folder / at.folder / OPTIMIZER_FILE).is_file():
            distrib = self._open(at.folder, OPTIMIZER_FILE)
        dealt = sorted(p.name for p in (self.located.folder / at.folder).glob(_DEALT_FILES)) if self.optimizer else []
        parts = [_model_part(pt, v) for v in _vpp_ranks(pt.tree)]
        files = {name: self._open(at.folder, name) for name in dealt}
        alone = self.optimizer and adapted_step(self.located.folder) is not None
        if not alone or not any(self.located.folder.glob(f"mp_rank_*/{PLAIN_FILE}")):
            return RankShard(at, of_its_step(pt.tree), parts, pt.materialize, pt, distrib, files)
        if not (self.located.folder / at.folder / PLAIN_FILE).is_file():
            raise Incomplete(f"{self.located.folder / at.folder / PLAIN_FILE}: missing, and other ranks have theirs")
        apart = self._open(at.folder, PLAIN_FILE)
        top = {**pt.tree, _OPTIMIZER: apart.tree}
        return RankShard(at, top, parts, pt.materialize, pt, distrib, files, apart)

    def _model(self, folder: str) -> PtFile:
        name = model_file(self.located.folder, folder)
        if name is None:
            raise Incomplete(f"{self.located.folder.name}/{folder}: no model_optim_rng.pt in it")
        return self._open(folder, name)

    def _open(self, folder: str, name: str) -> PtFile:
        file = f"{self.located.folder.name}/{folder}/{name}"
        if file not in self._opened:
            self._opened[file] = read_pt(self.located.root, file, stubs=self.stubs)
        return self._opened[file]


def _kind(tree: object) -> str:
    return f"a dictionary with {', '.join(map(str, tree))}"[:120] if isinstance(tree, dict) else type(tree).__name__


def _vpp_ranks(tree: Mapping[str, object]) -> list[int]:
    """The chunk numbers present: ``model`` is chunk 0. An empty virtual stage may be missing."""
    found = (MODEL_KEY.fullmatch(str(key)) for key in tree)
    return sorted(int(match.group(1) or 0) for match in found if match)


def _model_part(pt: PtFile, vpp_rank: int) -> ModelPart:
    tree = pt.tree
    assert isinstance(tree, dict)
    key = f"model{vpp_rank}" if f"model{vpp_rank}" in tree else "model"
    part = ModelPart(vpp_rank)
    for name, value in _state_dict(tree[key], pt.file).items():
        part.order.append(name)
        if isinstance(value, StoredTensor) and not name.endswith("._extra_state"):
            part.tensors[name] = value
        else:
            part.opaque[name] = value
    layers = [layer for name in part.order if (layer := layer_of(name)) is not None]
    part.local_layers = max(layers, default=-1) + 1
    return part


def _state_dict(value: object, file: str) -> Mapping[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise Unsupported(f"{file}: the model should be a state dict with names as keys, found {_kind(value)}")
    if "language_model" in value and isinstance(value["language_model"], dict):
        raise Unsupported(
            f"{file}: the model is one of Megatron-LM's own from before megatron-core (nested 'language_model')\n"
            "Convert it once with Megatron-LM's tools/checkpoint/convert.py --loader legacy --saver core (weights only)."
        )
    return value


def globalize(shards: list[RankShard], parallel: ParallelConfig, num_experts: int | None) -> int:
    """Replace local layer and expert numbers by global ones, in place.

    The files themselves say how many layers each chunk has, so any split of the layers is understood.

    Args:
        shards: All ranks.
        parallel: The degrees.
        num_experts: Routed experts of the model as the arguments say, or None.

    Returns:
        The number of decoder layers of the model.

    Raises:
        LayoutMismatch: Ranks of one stage disagree.
    """
    counts = _layer_counts(shards)
    offsets, total = {}, 0
    for vpp_rank in range(parallel.vpp):
        for pp_rank in range(parallel.pp):
            offsets[pp_rank, vpp_rank] = total
            total += counts.get((pp_rank, vpp_rank), 0)
    local_experts = _local_experts(shards, parallel, num_experts)
    for shard in shards:
        for part in shard.parts:
            layers, experts = offsets[shard.at.pp_rank, part.vpp_rank], shard.at.ep_rank * local_experts
            part.tensors = {_renamed(name, layers, experts): value for name, value in part.tensors.items()}
            part.opaque = {_renamed(name, layers, experts): value for name, value in part.opaque.items()}
            part.order = [_renamed(name, layers, experts) for name in part.order]
    return total


def _renamed(name: str, layers: int, experts: int) -> str:
    return renumbered(name, layers, experts if is_routed_expert(name) else 0)


def _layer_counts(shards: list[RankShard]) -> dict[tuple[int, int], int]:
    counts: dict[tuple[int, int], int] = {}
    problems = Problems()
    for shard in shards:
        for part in shard.parts:
            where = (shard.at.pp_rank, part.vpp_rank)
            if counts.setdefault(where, part.local_layers) != part.local_layers:
                problems.add(
                    LayoutMismatch,
                    f"{shard.pt.file}: {part.local_layers} layers, where other ranks of pipeline stage {where[0]} have {counts[where]}",
                )
    problems.raise_if_any()
    return counts


def _local_experts(shards: list[RankShard], parallel: ParallelConfig, num_experts: int | None) -> int:
    numbers = [
        number
        for shard in shards
        for part in shard.parts
        for name in part.tensors
        if (number := expert_of(name)) is not None
    ]
    found = max(numbers, default=-1) + 1
    if found and num_experts and found * parallel.ep != num_experts:
        raise LayoutMismatch(
            f"the files hold {found} experts on each of {parallel.ep} expert-parallel ranks, but args.num_experts is {num_experts}"
        )
    return found or (num_experts or 0) // parallel.ep


_SAME_EVERYWHERE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size", "context_parallel_size", "data_parallel_size", "num_layers", "hidden_size",
    "padded_vocab_size", "consumed_train_samples",
)  # fmt: skip


_OF_A_RANK = {"rank", "local_rank"}


def check_ranks(shards: Sequence[RankShard], located: FoundIteration, notes: Report) -> None:
    """The files of all ranks must be of one checkpoint.

    Raises:
        LayoutMismatch: They are of different iterations or runs, or lie in each other's folders; all problems together.
    """
    problems = Problems()
    _check_iterations(shards, located, problems)
    _check_arguments(shards, problems)
    _check_places(shards, problems)
    problems.raise_if_any()
    notes.through(_NOTES, (shards, located))


def _check_iterations(shards: Sequence[RankShard], located: FoundIteration, problems: Problems) -> None:
    found = {shard.pt.file: shard.top.get("iteration") for shard in shards}
    advice = "Files of two checkpoints are mixed, or a folder was renamed."
    if len(set(found.values())) > 1:
        some = ", ".join(f"{value} in {file}" for file, value in list(found.items())[:4])
        problems.add(LayoutMismatch, f"the ranks' files are of different iterations: {some}", advice)
        return
    iteration = next(iter(found.values()))
    if located.iteration is not None and iteration is not None and iteration != located.iteration:
        problems.add(
            LayoutMismatch,
            f"{located.folder.name}: the folder is of iteration {located.iteration}, its files are of iteration {iteration}",
            advice,
        )


def _check_arguments(shards: Sequence[RankShard], problems: Problems) -> None:
    first = _arguments(shards[0])
    for shard in shards[1:]:
        mine = _arguments(shard)
        for name in _SAME_EVERYWHERE:
            if mine and first and mine.get(name) != first.get(name):
                problems.add(
                    LayoutMismatch,
                    f"args.{name} is {first.get(name)} in {shards[0].pt.file}, but {mine.get(name)} in {shard.pt.file}",
                    "Files of two runs are mixed.",
                )


def _other_arguments(asked: tuple[Sequence[RankShard], FoundIteration]) -> list[Values]:
    """Ranks with other arguments than the first: one run gives all the same, but for who they are."""
    shards, _ = asked
    first, found = _arguments(shards[0]), dict[str, list[str]]()
    for shard in shards[1:]:
        mine = _arguments(shard)
        names = (first.keys() | mine.keys()) - _OF_A_RANK if first and mine else ()
        if differing := sorted(name for name in names if not same(first.get(name), mine.get(name))):
            text = ", ".join(
                f"{name:.60} ({shown(mine.get(name), 40)}, not {shown(first.get(name), 40)})" for name in differing[:3]
            )
            found.setdefault(f"{text}{_more(differing)}", []).append(shard.at.folder)
    first_folder = shards[0].at.folder
    return [
        {"where": folders, "more": _more(folders), "first": first_folder, "text": text}
        for text, folders in found.items()
    ]


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 3} more" if len(names) > 3 else ""


def _check_places(shards: Sequence[RankShard], problems: Problems) -> None:
    """Files know which rank wrote them; tools that do not care give all the same number, or none."""
    stored = {shard.at.rank: _arguments(shard).get("rank") for shard in shards}
    right = {shard.at.rank: shard for shard in shards if stored[shard.at.rank] == shard.at.rank}
    wrong = [shard for shard in shards if shard.at.rank not in right]
    if set(stored.values()) == set(stored):
        advice = "Rank folders were swapped."
    elif all(_is_copy(shard, right.get(stored[shard.at.rank])) for shard in wrong):  # type: ignore[call-overload]
        advice = "It is a copy of that rank's file; copy the rank's own from where the checkpoint was written."
    else:
        return
    for shard in wrong:
        problems.add(
            LayoutMismatch,
            f"{shard.pt.file}: written by rank {stored[shard.at.rank]}, but {shard.at.folder} belongs to rank {shard.at.rank}",
            advice,
        )


def _is_copy(shard: RankShard, other: RankShard | None) -> bool:
    """Whether two model files are the same byte for byte, as their checksums say."""
    return other is not None and shard.pt.directory.checksums == other.pt.directory.checksums != ()


def _arguments(shard: RankShard) -> Mapping[str, object]:
    return stored_arguments(shard.top)


def _other_files(asked: tuple[Sequence[RankShard], FoundIteration]) -> list[Values]:
    known, found = {*MODEL_FILES, OPTIMIZER_FILE, PLAIN_FILE}, list[Values]()
    for folder in [asked[1].folder / shard.at.folder for shard in asked[0]]:
        dealt = {p.name for p in folder.glob(_DEALT_FILES)}
        if others := sorted({p.name for p in folder.glob("*.pt")} - known - dealt):
            found.append({"folder": folder.name, "others": others})
    return found


_NOTES: tuple[Rule[tuple[Sequence[RankShard], FoundIteration]], ...] = (
    Rule(
        Fate.NOTE,
        "{where:3}{more}: other arguments than those of {first}, which are taken: {text}",
        _other_arguments,
        contradicts=True,
    ),
    Rule(Fate.LOST, "{folder}: {others:3}: not a file of this format, not read", _other_files),
)
"""What is said of all ranks' files together."""


def check_keys(shards: Sequence[RankShard], args: Arguments) -> None:
    """No rank and no layer may lack a key that its peers have.

    Raises:
        Incomplete: Some do; all of them are listed.
    """
    problems = Problems()
    _check_peers(shards, problems)
    for text in lacking({name for shard in shards for part in shard.parts for name in part.tensors}, args):
        problems.add(Incomplete, text)
    problems.raise_if_any()


def _check_peers(shards: Sequence[RankShard], problems: Problems) -> None:
    """Ranks of one pipeline stage hold the same dense keys."""
    keys: dict[tuple[int, int], dict[str, str]] = {}
    for shard in shards:
        for part in shard.parts:
            stage = keys.setdefault((shard.at.pp_rank, part.vpp_rank), {})
            stage.update((name, shard.pt.file) for name in part.tensors if not is_routed_expert(name))
    for shard in shards:
        for part in shard.parts:
            for name, file in keys[shard.at.pp_rank, part.vpp_rank].items():
                if name not in part.tensors:
                    problems.add(Incomplete, f"{shard.pt.file}: {name} is missing, which {file} has")

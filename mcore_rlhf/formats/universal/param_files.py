"""The files of the parameters: ``zero/<name>/<state>.pt``, each opened once, no tensor read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from mcore_rlhf.core.box import Shape
from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.storage.ptfile import PtFile, StoredTensor, read_pt

from .folders import Located
from .names import FP32, OPTIMIZER_FILE, PARAM_KEY, STEP, ZERO

_WRITTEN_AGAIN = "Convert the checkpoint again, or copy the folder again from where it came from."


@dataclass(slots=True)
class ParamFiles:
    """The folder of one parameter.

    Args:
        name: The parameter's name.
        tensors: By state as the files call it (``fp32``, ``exp_avg``), the tensor.
        keys: What the ``fp32`` file says besides the tensor: ``cat_dim`` and the like.
        step: The optimizer's step, where there is one.
    """

    name: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    keys: dict[str, object] = field(default_factory=dict)
    step: object | None = None

    @property
    def stored_shape(self) -> Shape:
        """The shape of its master copy as stored: flat in the stage 3 flavour."""
        return self.tensors[FP32].shape


@dataclass(slots=True)
class ZeroFolder:
    """Everything in ``zero/``.

    Args:
        params: The parameters' folders, by name.
        opened: All files that were opened.
        optimizer: ``optimizer_state.pt``, where it was asked for; None too where there are weights alone.
    """

    params: dict[str, ParamFiles]
    opened: list[PtFile]
    optimizer: Mapping[str, object] | None


def read_zero_folder(located: Located, stubs: tuple[str, ...], *, optimizer: bool) -> ZeroFolder:
    """Open the files in ``zero/``.

    Args:
        located: The checkpoint.
        stubs: Further pickled classes that may become inert stubs.
        optimizer: Whether anything but ``fp32`` is opened.

    Raises:
        CheckpointError: A file is damaged, missing or none that belongs there; all problems together.
    """
    folder = ZeroFolder({}, [], None)
    problems = Problems()
    for name, files in _folders(located.folder / ZERO, problems):
        try:
            folder.params[name] = _read_param(located, name, files, stubs, optimizer, folder.opened)
        except CheckpointError as error:
            problems.add_error(error)
    if optimizer and not _weights_alone(located, folder):
        try:
            folder.optimizer = _read_optimizer(located, stubs, folder.opened)
        except CheckpointError as error:
            problems.add_error(error)
    problems.raise_if_any()
    return folder


def _weights_alone(located: Located, folder: ZeroFolder) -> bool:
    """Whether there never was an optimizer: then nothing of one is there, neither settings nor a single state."""
    states = any(len(files.tensors) > 1 or files.step is not None for files in folder.params.values())
    return not states and not (located.folder / ZERO / OPTIMIZER_FILE).is_file()


def _folders(zero: Path, problems: Problems) -> Iterator[tuple[str, list[str]]]:
    """Every folder that has files: ``(name, files)``; a module's name may hold a slash."""
    for parent, folders, files in os.walk(zero):
        folders.sort()
        name = Path(parent).relative_to(zero).as_posix()
        if name == ".":
            files = [file for file in files if file != OPTIMIZER_FILE]
        stray = [file for file in sorted(files) if name == "." or not file.endswith(".pt")]
        for file in stray:
            problems.add(
                LayoutMismatch,
                f"{Path(parent, file)}: not a file of a universal checkpoint",
                "DeepSpeed takes every file in a parameter's folder for an optimizer state: remove what does not belong there.",
            )
        if files and name != ".":
            yield name, sorted(set(files) - set(stray))


def _read_param(
    located: Located, name: str, files: list[str], stubs: tuple[str, ...], optimizer: bool, opened: list[PtFile]
) -> ParamFiles:
    found = ParamFiles(name)
    if f"{FP32}.pt" not in files:
        have = ", ".join(files) or "nothing"
        raise Incomplete(
            f"{located.folder / ZERO / name}: expected {FP32}.pt, the master weights, found {have}\n{_WRITTEN_AGAIN}"
        )
    for file in files:
        key = file.removesuffix(".pt")
        if key != FP32 and not optimizer:
            continue
        pt = read_pt(located.root, f"{located.name}/{ZERO}/{name}/{file}", stubs=stubs)
        opened.append(pt)
        if key == STEP:
            found.step = _step(pt)
        else:
            found.tensors[key], keys = _tensor(pt)
            found.keys = keys if key == FP32 else found.keys
    return found


def _step(pt: PtFile) -> object:
    """The bare step: a tensor of one element in torch's optimizers, a number in DeepSpeed's own."""
    whole = isinstance(pt.tree, StoredTensor) and prod(pt.tree.shape) == 1
    if not whole and type(pt.tree) not in (int, float):
        raise Unsupported(f"{pt.root / pt.file}: expected a number, or a tensor of one element, found {pt.tree!r:.80}")
    return pt.materialize(pt.tree)


def _tensor(pt: PtFile) -> tuple[StoredTensor, dict[str, object]]:
    """The tensor of a state's file: bare (stage 3), or under ``param`` with what belongs to it."""
    if isinstance(pt.tree, StoredTensor):
        return pt.tree, {}
    tensor = pt.tree.get(PARAM_KEY) if isinstance(pt.tree, dict) else None
    if not isinstance(tensor, StoredTensor):
        kind = (
            f"a dictionary with {', '.join(map(str, pt.tree))}" if isinstance(pt.tree, dict) else type(pt.tree).__name__
        )
        raise Unsupported(
            f"{pt.root / pt.file}: expected a tensor, or a dictionary with one under 'param', found {kind[:120]}"
        )
    return tensor, {key: value for key, value in pt.tree.items() if key != PARAM_KEY}


def _read_optimizer(located: Located, stubs: tuple[str, ...], opened: list[PtFile]) -> Mapping[str, object]:
    file = f"{located.name}/{ZERO}/{OPTIMIZER_FILE}"
    if not (located.root / file).is_file():
        raise Incomplete(
            f"{located.root / file}: expected the optimizer's param groups, but there is no such file\n{_WRITTEN_AGAIN}"
        )
    pt = read_pt(located.root, file, stubs=stubs)
    opened.append(pt)
    if not isinstance(pt.tree, dict):
        raise Unsupported(f"{pt.root / file}: expected a dictionary, found {type(pt.tree).__name__}")
    return {key: _without_shard(pt, key, value) for key, value in pt.tree.items() if key != "fp32_flat_groups"}


def _without_shard(pt: PtFile, key: str, value: object) -> object:
    """A value with real tensors; of the shard of rank 0 that stage 3 carries along, only the steps and the like."""
    if key != "optimizer_state_dict" or not isinstance(value, dict):
        return pt.materialize(value)
    states = value.get("state")
    scalars = {
        number: {k: pt.materialize(v) for k, v in state.items() if not isinstance(v, StoredTensor) or v.shape == ()}
        for number, state in (states.items() if isinstance(states, dict) else ())
    }
    return {"state": scalars, "param_groups": pt.materialize(value.get("param_groups", []))}


def common_states(params: Mapping[str, ParamFiles], alike: Sequence[list[str]], folder: Path) -> tuple[str, ...]:
    """The states that every trained parameter has.

    Args:
        params: The parameters' folders.
        alike: Names of parameters that should have the same states.
        folder: The checkpoint, for messages.

    Raises:
        Incomplete: A parameter lacks a state that others have.
        LayoutMismatch: A few have one that others lack, or a state does not have its parameter's elements.
    """
    problems, found = Problems(), set[str]()
    for trained in alike:
        counts = Counter(key for name in trained for key in params[name].tensors)
        del counts[FP32]
        found.update(counts)
        for key, count in counts.items():
            _check_state(params, trained, folder / ZERO, (key, count), problems)
    _check_lengths(params, folder, problems)
    problems.raise_if_any()
    return tuple(sorted(found))


def _check_state(
    params: Mapping[str, ParamFiles], trained: list[str], zero: Path, counted: tuple[str, int], problems: Problems
) -> None:
    """A state that a few have is a stray file, and one that a few lack is missing."""
    key, count = counted
    few = count * 2 < len(trained)
    for name in trained:
        has = key in params[name].tensors
        if few and has:
            problems.add(
                LayoutMismatch,
                f"{zero / name / key}.pt: a stray file: only {count} of {len(trained)} parameters have {key!r}",
                "DeepSpeed takes every file in a parameter's folder for an optimizer state: remove what does not belong there.",
            )
        elif not few and not has:
            text = f"{zero / name}: {key}.pt is missing, which {count} parameters have"
            problems.add(Incomplete, text, _WRITTEN_AGAIN)


def _check_lengths(params: Mapping[str, ParamFiles], folder: Path, problems: Problems) -> None:
    for name, files in params.items():
        for key, tensor in files.tensors.items():
            if tensor.shape != files.stored_shape:
                problems.add(
                    LayoutMismatch,
                    f"{folder / ZERO / name / key}.pt: expected the shape of {FP32}.pt, {files.stored_shape}, found {tensor.shape}",
                )

"""``mcore-rlhf inspect``: what a checkpoint is, without reading its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mcore_rlhf.core.catalog import TensorName
from mcore_rlhf.errors import CheckpointError, NotACheckpoint, headline
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.carried import step_of
from mcore_rlhf.formats.registry import open_without_manifest
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.subject import Subject, look
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.publish import MANIFEST_NAME

from .describe import (
    chosen_facts,
    iteration_text,
    layout_text,
    of_each,
    origin_of,
    print_choice,
    source_facts,
    step_facts,
)
from .output import Column, Facts, count, emit_json, print_facts, print_table, say, size

if TYPE_CHECKING:
    from mcore_rlhf.core.catalog import TensorEntry
    from mcore_rlhf.models.spec import ModelSpec

_DEEPEST = 3
"""Folders above that may be the step's: those of a format's own lie in the role's."""
_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")


def run(path: Path, options: ReadOptions, pattern: str | None, json: bool) -> None:
    """Print what a checkpoint is; a model of a step that cannot be read does not hide the others.

    Args:
        path: The checkpoint.
        options: How it is opened.
        pattern: Which logical tensors to list, or None for none of them.
        json: For machines.

    Raises:
        CheckpointError: It cannot be opened.
        click.exceptions.Exit: With the code of the error of a step's model.
    """
    subject, models = look(
        path, options, partial(_models, pattern), lambda found: any("error" in one for one in found[1].values())
    )
    facts = next(iter(models.values())) if subject.alone else {**step_facts(subject), "models": models}
    if json:
        emit_json(facts)
    else:
        print_choice(subject.chosen)
        (_print_model if subject.alone else _print_step)(facts)
    codes = [model["error"]["exit_code"] for model in models.values() if "error" in model]
    if codes:
        raise click.exceptions.Exit(min(codes))


def _models(pattern: str | None, subject: Subject) -> tuple[Subject, dict[str, Facts]]:
    if pattern is not None:
        subject = subject.only("--tensors lists those of one model")
    return subject, of_each(subject, lambda role: _look(subject, role, pattern))


def _look(subject: Subject, role: str, pattern: str | None) -> Facts:
    folder = subject.models[role]
    source = open_without_manifest(folder, subject.reading(role))
    facts = model_facts(source, folder)
    if subject.alone:
        facts["chosen"] = chosen_facts(subject.chosen)
    if pattern is not None:
        facts["tensors"] = [_tensor_facts(source, entry) for entry in _matching(source, pattern)]
    return facts


def model_facts(source: Source, path: ReadablePath) -> Facts:
    """What a model's checkpoint is.

    Keys: those of :func:`~.describe.source_facts`; ``model``; ``optimizer`` (or null); ``unread`` (why the
    optimizer is not understood, or null); ``scheduler``; ``counters``;
    ``files`` (``path``, ``bytes``); ``bytes``; ``notes`` (``fate``, ``text``); ``manifest`` (or null).
    """
    args = source.state.args
    return {
        **source_facts(source),
        "model": {**_spec_facts(source.model), "hybrid_layer_pattern": _pattern(source)},
        "optimizer": _optimizer_facts(source),
        "unread": source.unread or None,
        "scheduler": source.state.scheduler,
        "counters": {name: args[name] for name in _COUNTERS if name in args},
        "files": [{"path": file.path, "bytes": file.nbytes} for file in source.files],
        "bytes": sum(file.nbytes for file in source.files),
        "notes": source.notes.as_json(),
        "manifest": _manifest_facts(path, source.root, source.root / step_of(source)) or _manifest_above(path),
    }


def _pattern(source: Source) -> str | None:
    """What every layer of a hybrid model is, and where its stages end."""
    family = MegatronState.of(source)
    pattern = None if family is None else family.args.pattern
    return None if pattern is None else str(pattern)


def _spec_facts(model: ModelSpec) -> Facts:
    """Layers, experts, vocabulary, number of tensors and of parameters, and parameters by dtype."""
    dtypes: Counter[str] = Counter()
    for param in model.params:
        dtypes[str(param.dtype)] += prod(param.global_shape)
    return {
        "num_layers": model.num_layers,
        "mtp_layers": model.mtp_layers,
        "num_experts": model.num_experts,
        "tied": model.tied,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.padded_vocab_size,
        "tensors": len(model.params),
        "parameters": sum(dtypes.values()),
        "dtypes": dict(dtypes),
    }


def _optimizer_facts(source: Source) -> Facts | None:
    """``kind``, ``states`` (name → dtype) and ``param_groups``, or None without optimizer."""
    if source.optimizer is None:
        return None
    groups = [{**_plain(group.fields), "expert": group.expert} for group in source.state.groups]
    return {"kind": source.optimizer, "states": _state_dtypes(source), "param_groups": groups}


def _plain(fields: Mapping[str, object]) -> Facts:
    """Numbers that are stored as tensors without dimensions, such as torch's ``step``, as numbers."""
    return {key: value.item() if getattr(value, "shape", None) == () else value for key, value in fields.items()}  # type: ignore[attr-defined]


def _state_dtypes(source: Source) -> dict[str, str | None]:
    """The dtype of each state, as the first trained parameter that has it stores it."""
    found: dict[str, str | None] = dict.fromkeys(source.states)
    for param in source.model.params:
        missing = [state for state, dtype in found.items() if dtype is None]
        if not missing or not param.trainable:
            continue
        for state in missing:
            entry = source.catalog.get(TensorName(source.role, param.name, state))
            found[state] = str(entry.dtype) if entry is not None else None
    return found


def _manifest_facts(*folders: ReadablePath) -> Facts | None:
    """The manifest in the first folder that has one; ``inside`` is null."""
    where = next((folder / MANIFEST_NAME for folder in folders if (folder / MANIFEST_NAME).is_file()), None)
    if where is None:
        return None
    try:
        return {**_told(where, Manifest.read(where)), "inside": None}
    except CheckpointError as error:
        return {"path": str(where), "error": str(error)}


def _manifest_above(folder: ReadablePath) -> Facts | None:
    """The manifest of a step for one of its folders, if it lists files there: ``inside`` is the folder's path in the step."""
    folder = folder.absolute() if isinstance(folder, Path) else folder
    for above in list(folder.parents)[:_DEEPEST]:
        where = above / steps.MANIFEST
        if not where.is_file():
            continue
        try:
            manifest = Manifest.read(where)
        except NotACheckpoint:  # another program's
            continue
        except CheckpointError as error:
            return {"path": str(where), "error": str(error)}
        inside = str(folder)[len(str(above)) :].strip("/").removeprefix(manifest.prefix).strip("/")
        if any(path.startswith(f"{inside}/") for path in manifest.files):
            return {**_told(where, manifest), "inside": inside}
    return None


def _told(where: ReadablePath, manifest: Manifest) -> Facts:
    return {
        "path": str(where),
        "step": manifest.step,
        "files": len(manifest.files),
        "lossless": manifest.lossless,
        "parts": [dict(part) for part in manifest.parts],
        "provenance": dict(manifest.provenance),
        "report": dict(manifest.report),
    }


def _matching(source: Source, pattern: str) -> Iterator[TensorEntry]:
    """Entries whose parameter has a name like the pattern: with wildcards, or a part of the name."""
    wanted = pattern if any(character in pattern for character in "*?[") else f"*{pattern}*"
    for name in source.catalog:
        entry = source.catalog.get(name) if fnmatchcase(name.param, wanted) else None
        if entry is not None:
            yield entry


def _tensor_facts(source: Source, entry: TensorEntry) -> Facts:
    """``name``, ``state``, ``global_shape``, ``dtype``, ``partition``, ``chunks``, ``replicas``, ``bytes``."""
    spec = source.model.get(entry.name.param)
    chunks = len(entry.primary())
    return {
        "name": entry.name.param,
        "state": entry.name.state,
        "global_shape": list(entry.global_shape),
        "dtype": str(entry.dtype),
        "partition": str(spec.partition) if spec is not None else None,
        "chunks": chunks,
        "replicas": len(entry.chunks) - chunks,
        "bytes": prod(entry.global_shape) * entry.dtype.itemsize,
    }


def _print_model(facts: Facts) -> None:
    say(facts["path"])
    print_facts(
        [
            ("format", f"{facts['format']}, {iteration_text(facts)}"),
            ("role", facts["role"]),
            ("layout", layout_text(facts["parallel"])),
            ("model", _model(facts["model"])),
            ("vocabulary", _vocabulary(facts["model"])),
            ("parameters", _parameters(facts["model"])),
            ("optimizer", _optimizer(facts)),
            ("samples", ", ".join(f"{name} {_value(value)}" for name, value in facts["counters"].items())),
            ("files", f"{count(len(facts['files']), 'file')}, {size(facts['bytes'])}"),
            ("manifest", _manifest(facts["manifest"])),
        ],
    )
    if facts["optimizer"] is not None:
        _print_groups(facts["optimizer"]["param_groups"])
    _print_notes(facts["notes"])
    if "tensors" in facts:
        _print_tensors(facts["tensors"])


def _model(model: Facts) -> str:
    parts = [count(model["num_layers"], "layer")]
    parts += [f"hybrid {model['hybrid_layer_pattern']}"] if model["hybrid_layer_pattern"] else []
    parts += [f"{model['mtp_layers']} for multi-token prediction"] if model["mtp_layers"] else []
    parts += [f"{model['num_experts']} experts per mixture layer"] if model["num_experts"] else []
    parts += ["embedding and output tied" if model["tied"] else "embedding and output not tied"]
    return ", ".join(parts)


def _vocabulary(model: Facts) -> str:
    words, rows = model["vocab_size"], model["padded_vocab_size"]
    if rows is None:
        return ""
    if words is None:
        return f"{count(rows)} rows with padding; the true number of words is not stored (--vocab-size)"
    return f"{count(words)} words in {count(rows)} rows, {count(rows - words)} of them padding"


def _parameters(model: Facts) -> str:
    dtypes = model["dtypes"]
    kinds = ", ".join(dtypes if len(dtypes) == 1 else [f"{count(n)} {dtype}" for dtype, n in dtypes.items()])
    return f"{count(model['parameters'])} in {count(model['tensors'], 'tensor')}, {kinds}"


def _optimizer(facts: Facts) -> str:
    optimizer = facts["optimizer"]
    if optimizer is None:
        return f"not understood: {headline(facts['unread'])}" if facts["unread"] else "none stored"
    states = ", ".join(f"{state} {dtype or ''}".strip() for state, dtype in optimizer["states"].items())
    return f"{optimizer['kind']}: {states}"


def _manifest(manifest: Facts | None) -> str:
    if manifest is None:
        return "none: not written by mcore_rlhf"
    if "error" in manifest:
        return f"damaged: {manifest['error']}"
    made = manifest["provenance"]
    converted = origin_of(manifest["report"]) == "conversion"
    kept = {True: ", lossless", False: ", not lossless"}.get(manifest["lossless"], "") if converted else ""
    above = manifest["path"].split("/")[-2] if manifest["inside"] is not None else ""
    where = f"of {above}, the step above, which lists these: " if above else ""
    return f"{where}{count(manifest['files'], 'file')}{kept}, mcore_rlhf {made.get('mcore_rlhf', '?')}, {made.get('time', '?')}"


def _print_groups(groups: list[Facts]) -> None:
    if not groups:
        return
    names = ("lr", "weight_decay", "step", "betas", "eps", "wd_mult", "lr_mult", "max_lr", "min_lr")
    shown = [name for name in names if any(name in group for group in groups)]
    say("\nparam groups")
    rows = [
        [f"{number} (experts)" if group["expert"] else str(number), *(_value(group.get(name, "")) for name in shown)]
        for number, group in enumerate(groups)
    ]
    print_table([Column("group"), *(Column(name, True) for name in shown)], rows)


def _print_notes(notes: list[Facts]) -> None:
    if notes:
        say("\nnotes")
    for note in notes:
        fate = "" if note["fate"] == "note" else f"{note['fate']}: "
        say(f"  {fate}{note['text']}")


def _print_tensors(tensors: list[Facts]) -> None:
    say(f"\n{count(len(tensors), 'tensor')}")
    columns = [Column("name"), Column("state"), Column("global_shape"), Column("dtype"), Column("cut")]
    rows = [
        (
            t["name"],
            t["state"],
            str(tuple(t["global_shape"])),
            t["dtype"],
            t["partition"] or "",
            count(t["chunks"]),
            count(t["replicas"]),
        )
        for t in tensors
    ]
    if rows:
        print_table([*columns, Column("chunks", True), Column("replicas", True)], rows)


def _value(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return count(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def _print_step(facts: Facts) -> None:
    say(facts["path"])
    models = [(role, _model_line(model)) for role, model in facts["models"].items()]
    manifest = facts["manifest"]
    lines = [("step", str(facts["step"])), ("manifest", _step_manifest(manifest)), ("live state", _live(manifest))]
    print_facts([*lines, *models, *_others(facts)])
    say("\nOne model in detail: mcore-rlhf inspect … --role ROLE")


def _model_line(model: Facts) -> str:
    if "error" in model:
        return f"cannot be read: {model['error']['message']}"
    none = "an optimizer that is not understood" if model["unread"] else "no optimizer"
    optimizer = model["optimizer"]["kind"] + " optimizer" if model["optimizer"] else none
    parameters = f"{count(model['model']['parameters'])} parameters"
    return f"{model['format']}, {layout_text(model['parallel'])}, {parameters}, {optimizer}, {size(model['bytes'])}"


def _step_manifest(manifest: Facts | None) -> str:
    if manifest is None:
        return "none: another trainer's step (mcore-rlhf adopt verifies it and writes one)"
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in manifest["metrics"].items())
    text = f"{count(manifest['files'], 'file')}, {size(manifest['bytes'])}, {manifest['time']}"
    return f"{text}; {metrics}" if metrics else text


def _live(manifest: Facts | None) -> str:
    """How much state the roles held when the step was saved, all of which is in it."""
    held = manifest["live"] if manifest else {}
    return "; ".join(f"{role} {count(own['tensors'], 'tensor')}, {size(own['bytes'])}" for role, own in held.items())


def _others(facts: Facts) -> list[tuple[str, str]]:
    unknown = [f"{role['role']} ({role['format']})" for role in facts["roles"] if role["role"] not in facts["models"]]
    return [("models of formats that are not read", ", ".join(unknown)), ("beside", ", ".join(facts["others"]))]

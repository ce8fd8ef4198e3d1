"""Whether what describes a source is the description of its tensors; asked for every source that is opened, whatever its format."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from mcore_rlhf.core.catalog import PARAM, TensorName
from mcore_rlhf.errors import LayoutMismatch, Problems
from mcore_rlhf.models.huggingface.texts import text_of
from mcore_rlhf.models.implied import Contradiction, against_arguments, against_config
from mcore_rlhf.models.torchtitan import under_huggingface_names

from .megatron.state import MegatronState
from .module import CONFIG, ModuleState
from .source import Source

_ADVICE = (
    "One of the two is another model's, or was edited, and which one nobody can tell: correct the field, or take the file that belongs to "
    "these tensors."
)


def check_described(source: Source) -> None:
    """Hold arguments, or a ``config.json``, against the tensors that they imply.

    Args:
        source: An opened checkpoint.

    Raises:
        LayoutMismatch: They contradict each other; every field is named with its file, and the tensors with theirs.
    """
    megatron, module = MegatronState.of(source), ModuleState.of(source)
    model = source.model
    shapes = {name: shape for name, shape in model.shapes.items() if name not in model.unused}
    if megatron is not None:
        args = megatron.args
        refuse_contradictions(against_arguments(args.values, shapes), args.where, source)
    elif module is not None and module.config:
        whole = not (module.without_frozen or model.quantized)
        where = f"{source.root}: its description"
        if source.carried is not None and CONFIG in source.carried.files:
            where = str(source.carried.files[CONFIG])
        shapes = under_huggingface_names(shapes)
        refuse_contradictions(against_config(_text_in(module.config), shapes, whole=whole), where, source)


def _text_in(config: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a ``config.json`` that describes the language model."""
    text = text_of(config)
    section = text.get("text_config")
    return section if isinstance(section, Mapping) else text


def refuse_contradictions(found: Iterable[Contradiction], where: str, source: Source) -> None:
    """Refuse a description that is not that of the tensors.

    Args:
        found: What it says otherwise.
        where: Its file.
        source: Whose tensors they are.

    Raises:
        LayoutMismatch: There is any.
    """
    problems = Problems()
    for wrong in found:
        problems.add(LayoutMismatch, f"{where}: {wrong}{_files(source, (*wrong.tensors, wrong.beside))}", _ADVICE)
    problems.raise_if_any()


def _files(source: Source, tensors: Collection[str]) -> str:
    """The file of the first of them that is there."""
    for name in tensors:
        entry = source.catalog.get(TensorName(source.role, name, PARAM))
        if entry is not None and entry.chunks:
            return f" ({entry.chunks[0].record.file})"
    return ""

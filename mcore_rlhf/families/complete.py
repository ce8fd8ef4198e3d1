"""What a model under a module's own names lacks: as the table of its class says, where that is known, and as its other layers do."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.errors import Incomplete, LayoutMismatch
from mcore_rlhf.models.huggingface.config import Config, misfits
from mcore_rlhf.models.huggingface.texts import text_of
from mcore_rlhf.models.torchtitan import under_huggingface_names

from .module import ModuleState, may_lack_frozen
from .source import Source

_NUMBER = re.compile(r"(?<=\.)\d{1,18}(?=\.)")
_ADDED = ("lora_", ".adapter.", "modules_to_save.")
"""What adapters add, which some layers may have and others not."""
_SHOWN = 3
_ADAPTED = re.compile(r"(.+)\.lora_(?:embedding_)?A\.")
_OUTPUT = "lm_head.weight"
_EMBEDDING = re.compile(r"emb|wte|word|vocab", re.IGNORECASE)
_USUAL = 4
"""So many alike, and more than there are otherwise, say how a member of a row is made; stages of models of images differ, and are fewer."""
_ADVICE = (
    "A tensor is missing or of another model, or the description is: copy the checkpoint again from where it came from, or give "
    "--reference-config."
)
_WRITES = ("ForCausalLM", "LMHeadModel")
_READS = (*_WRITES, "ForConditionalGeneration", "ForSequenceClassification", "ForTokenClassification")
"""How classes end that end in words, as an actor's does, and those that begin with words, as critics and reward models do."""
_PADDING = 1024
"""Rows that a vocabulary may have beyond its words, where that is not an eighth."""
GAPS: Rule[Sequence[str]] = Rule(Fate.NOTE, "{text}", lambda texts: [{"text": text} for text in texts])
"""What is said of what may be missing: some classes are made so, and no table knows all."""


def require_whole(source: Source, family: ModuleState) -> None:
    """See that the tensors are those of the class that the model's description names, where its tensors are known; and say what others
    of their kind have.

    Args:
        source: An opened checkpoint, with what lies beside it.
        family: What it has besides.

    Raises:
        LayoutMismatch: Some are missing, of other shapes, or of another class. What may have been left out is not asked for.
    """
    if family.config and not source.model.quantized:
        _require_described(source, family)
    source.notes.through([GAPS], list(gaps(source)))


def _require_described(source: Source, family: ModuleState) -> None:
    shapes = under_huggingface_names(_with_ties(source, family))
    found = list(misfits(text_of(family.config), shapes, whole=not family.without_frozen))
    if found:
        raise LayoutMismatch(
            f"{source.root}: its tensors are not those of its config.json: {'; '.join(found)}\n{_ADVICE}"
        )


def refuse_left_out(source: Source, config: Config) -> None:
    """See that nothing is missing where what is not trained may have been left out, and a whole model is wanted.

    Args:
        source: An opened checkpoint.
        config: The model's description; empty where nobody has one.

    Raises:
        Incomplete: Weights are missing, by name.
    """
    family = ModuleState.of(source)
    if family is None or not may_lack_frozen(source, family):
        return
    found = list(_left_out(source, replace(family, config=config)))
    if found:
        raise Incomplete(
            f"{source.root}: is not the whole model: {'; '.join(found)}\nWhat is not trained is not in it, as after DeepSpeed's "
            "save_checkpoint(exclude_frozen_parameters=True). Take a checkpoint that was saved without that; or, where the rest is "
            "elsewhere, say that what was trained is wanted alone: --exclude-frozen, ReadOptions(exclude_frozen=True)."
        )


def gaps(source: Source) -> Iterator[str]:
    """What is missing: of a layer, or an expert, that most others of its row have; and before and behind the layers. A sentence for each.

    Args:
        source: An opened checkpoint; of Megatron's names, and of a part of a model, nothing is said.
    """
    family = ModuleState.of(source)
    if family is None:
        return
    found = list(_left_out(source, family)) if family.without_frozen else []
    yield from found
    if not found:
        others = [*_of_config(source, family), *_of_rows(source)]
        yield from others
        if family.left_out and not others:
            yield UNSAID


UNSAID = (
    "what is not trained is not in it, if there is anything: its files are as those of save_checkpoint(exclude_frozen_parameters=True), "
    "and do not say what that was"
)


def _left_out(source: Source, family: ModuleState) -> Iterator[str]:
    """What is known to be missing of a checkpoint that may have been saved without its frozen weights; a critic has no output layer."""
    shapes = {_OUTPUT: (), **_with_ties(source, family)}
    bases = list(dict.fromkeys(found[1] for name in shapes if (found := _ADAPTED.match(name))))
    lost = [base for base in bases if f"{base}.base_layer.weight" not in shapes and f"{base}.weight" not in shapes]
    if lost:
        shown = ", ".join(lost[:_SHOWN]) + (", …" if len(lost) > _SHOWN else "")
        yield f"adapters change {len(lost)} layers whose own weights are not there: {shown}"
        return
    config = text_of(family.config) if family.config and not source.model.quantized else {}
    spoken = set(misfits(config, shapes, whole=False))
    absent = [line for line in misfits(config, shapes) if line not in spoken]
    yield from absent
    if family.left_out and not absent:
        for row, members in _blocks(source):
            yield from _absent(row, members)
        if not any(_EMBEDDING.search(name) for name in shapes):
            yield "no tensor is called as an embedding is"


def _with_ties(source: Source, family: ModuleState) -> dict[str, Shape]:
    shapes = source.model.shapes
    return shapes | {alias: shapes[owner] for alias, owner in family.shared.items() if owner in shapes}


def _of_config(source: Source, family: ModuleState) -> Iterator[str]:
    shapes = source.model.shapes
    if family.config and not (source.model.quantized or any(mark in name for name in shapes for mark in _ADDED)):
        outside = {name: shape for name, shape in shapes.items() if not _NUMBER.search(name)}
        yield from _outside(family.config, outside)


def _of_rows(source: Source) -> Iterator[str]:
    for row, members in _blocks(source):
        usual = max(Counter(members.values()).values())
        if usual >= _USUAL and 2 * usual > len(members):
            yield from _absent(row, members)
        yield from _of_row(row, members)


def _blocks(source: Source) -> Iterator[tuple[str, dict[int, frozenset[str]]]]:
    """Rows of blocks, not lists of plain modules."""
    for row, members in _rows(spec.name for spec in source.model.params).items():
        if any("." in key for keys in members.values() for key in keys):
            yield row, {number: frozenset(keys) for number, keys in members.items()}


def _outside(config: Config, shapes: Mapping[str, Shape]) -> Iterator[str]:
    """Embedding, last norm and output layer that are not there, as far as their sizes tell.

    Of the 160 classes of transformers 5.23.0 that end in words and say how many there are, two have a norm without a weight (NanoChat,
    OLMo), and get a sentence for it; of the 247 that begin with words, none gets one.

    Args:
        config: The model's description.
        shapes: What it has outside its layers.
    """
    text = text_of(config)
    words, width, classes = (text.get(name) for name in ("vocab_size", "hidden_size", "architectures"))
    named = str(classes[0]) if isinstance(classes, list) and classes else ""
    if not isinstance(words, int) or not named.endswith(_READS):
        return
    most = words + max(_PADDING, words // 8)
    with_words = [name for name, shape in shapes.items() if len(shape) == 2 and words <= shape[0] <= most]
    if not with_words:
        yield f"no tensor has a row for each of the {words} words of config.json: the embedding is not there"
    if not isinstance(width, int) or not named.endswith(_WRITES):
        return
    heads = [name for name, shape in shapes.items() if len(shape) == 2 and shape[1] == width and name not in with_words]
    if len(with_words) == 1 and not heads and text.get("tie_word_embeddings") is False:
        yield f"only {with_words[0]} has a row for each word, and tie_word_embeddings is false: embedding or output layer is gone"
    if (width,) not in shapes.values():
        yield f"no norm of {width}, hidden_size, lies outside the layers, behind which most classes have one"


_DEEPEST = 16
"""Rows within rows that are looked at: models have two or three, and a stranger's name of a megabyte a hundred thousand."""


def _rows(names: Iterable[str]) -> dict[str, dict[int, set[str]]]:
    """For each row of modules, as ``model.layers``, what each of its numbers has."""
    found: dict[str, dict[int, set[str]]] = {}
    for name in names:
        if not any(mark in name for mark in _ADDED):
            for number in islice(_NUMBER.finditer(name), _DEEPEST):
                row = found.setdefault(name[: number.start() - 1], {})
                row.setdefault(int(number[0]), set()).add(name[number.end() + 1 :])
    return found


def _absent(row: str, members: Mapping[int, frozenset[str]]) -> Iterator[str]:
    absent = max(members) + 1 - len(members)
    if absent:
        first = next(number for number in range(len(members) + 1) if number not in members)
        more = f" and {absent - 1} more are" if absent > 1 else " is"
        yield f"{row}.{first}{more} not there, and there is {row}.{max(members)}"


def _of_row(row: str, members: Mapping[int, frozenset[str]]) -> Iterator[str]:
    counted = Counter(members.values())
    usual = defaultdict[str, list[frozenset[str]]](list)  # by key: a stranger's row may have as many kinds as members
    for keys in (keys for keys, times in counted.items() if times >= _USUAL):
        for key in keys:
            usual[key].append(keys)
    for keys, count in counted.items():
        alike = min((usual.get(key, []) for key in keys), key=len, default=[])
        more_of = {other: counted[other] for other in alike if keys < other and counted[other] > count}
        if more_of:
            most, times = max(more_of.items(), key=lambda item: item[1])
            lacking, first = sorted(most - keys), min(number for number, found in members.items() if found == keys)
            shown = ", ".join(lacking[:_SHOWN]) + (", …" if len(lacking) > _SHOWN else "")
            others = f" nor have {count - 1} more" if count > 1 else ""
            yield f"{row}.{first} has no {shown}{others}, and {times} others have"

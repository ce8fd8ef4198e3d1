"""The rows of the table of options that say how a source is read: see :mod:`.options`."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rlhf.models.spec import Rules

from .option_types import (
    COUNT,
    FOLDER,
    LAYOUT,
    NAME,
    NAMES,
    PLANNING,
    READING,
    RULES,
    SAFETY,
    SOURCE,
    Option,
    flag,
    number,
    option,
    text,
)

RULES_ROW = Option(
    RULES,
    "YAML: how parameters are cut that no table knows.",
    group=SOURCE,
    more="See [rules](../how-to/write-rules.md).",
    commands=(*READING, "adopt"),
)
DESCRIPTION_ROW = Option(
    FOLDER,
    "The model's Hugging Face folder, or its config.json.",
    name="reference_config",
    group=LAYOUT,
    more="What [another family](../how-to/convert-between-megatron-and-deepspeed.md) needs; an adapter's `adapter_config.json`.",
    commands=(*PLANNING, "diff"),
)
VOCABULARY_ROW = Option(COUNT, "True number of words, where args lack it.", group=LAYOUT)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a source is to be read.

    Args:
        optimizer: Whether the optimizer is read at all; without it, its files may be missing or damaged.
        described_by: The folder, or file, of the model's ``config.json``, where somebody gives one; a conversion's is its target's.
        values: Whether anybody asks what is in tensors, and not only whether they are whole.
    """

    role: str | None = option(
        NAME, "Whose model, where a step holds several: actor, critic, …", group=SOURCE, commands=READING
    )
    step: int | None = option(
        number(0), "Which iteration, where the tracker does not decide.", group=SOURCE, commands=READING
    )
    only: str | None = option(
        text("FILTER"),
        "A part of the model: role, attribute or both (actor.policy), or a pattern with *.",
        group=SOURCE,
        more="An attribute's name is taken off; patterns leave names as they are (`'model.layers.*'`, `'!value_head'`; several with "
        "commas). Of Megatron's names, patterns only. What fits nothing is refused, with what there is.",
        commands=READING,
    )
    exclude_frozen: bool = flag(
        "Leave out parameters that are not trained.",
        "--include-frozen",
        group=SOURCE,
        more="They count as lost. Not for Megatron's formats.",
        commands=READING,
    )
    vocab_size: int | None = field(default=None, metadata={"option": VOCABULARY_ROW})
    rules: Rules = field(default_factory=Rules, metadata={"option": RULES_ROW})
    stubs: tuple[str, ...] = option(
        NAMES,
        "A pickled class to load as an inert stub; may be repeated.",
        (),
        group=SOURCE,
        name="stub",
        commands=(*READING, "adopt", "resume-check"),
    )
    follow_links: bool = flag(
        "Follow links that lead out of the checkpoint.",
        "--no-follow-links",
        group=SAFETY,
        more="Without it they are refused by name: they could bring in any file of the reader's. Those inside it, and a hub cache's "
        "into its blobs, need no word.",
        commands=READING,
    )
    optimizer: bool = True
    described_by: str | None = field(default=None, metadata={"option": DESCRIPTION_ROW})
    values: bool = True

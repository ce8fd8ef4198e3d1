"""From torchtitan's own names to Hugging Face's, and back."""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.core.facts import Fate, Item, Kind
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.module import ModuleState, described
from mcore_rlhf.families.source import Source
from mcore_rlhf.models.huggingface.config import sizes_of_config
from mcore_rlhf.models.huggingface.relation import shares_of_huggingface, shares_of_others
from mcore_rlhf.models.huggingface.texts import text_of
from mcore_rlhf.models.torchtitan import OLDER, huggingface_name, links_of, own_name, release_of

from .packing import recast


def of_torchtitan(source: Source) -> str:
    """The release of torchtitan whose own names a source under a module's names has; empty where it has others."""
    return release_of({spec.name for spec in source.model.params})


def with_other_names(source: Source, config: dict[str, object], wanted: str = "") -> Source:
    """A source under torchtitan's own names with Hugging Face's, or the other way round.

    Args:
        source: The source.
        config: The model's ``config.json``, which says how many heads it has.
        wanted: The release of torchtitan whose names it is to have, where it has Hugging Face's.

    Raises:
        UsageError: There is none.
        CheckpointError: Tensors have no such names, or are another model's.
    """
    if not config:
        raise UsageError(
            f"{source.root}: torchtitan's own names and Hugging Face's are to become each other, and nothing in it says how many heads "
            "the model has\nGive --reference-config, the folder with its config.json."
        )
    text, own = text_of(config), of_torchtitan(source)
    release = own or wanted or OLDER
    links = links_of(source.model.shapes, str(text.get("model_type")), sizes_of_config(text), release)
    if own:
        shapes = {link.huggingface: source.model.shapes[link.other] for link in links}
        shares, said = shares_of_huggingface(shapes, links), "torchtitan's own become Hugging Face's"
    else:
        shapes = {link.other: source.model.shapes[link.huggingface] for link in links}
        shares, said = shares_of_others(shapes, links), "Hugging Face's become torchtitan's own"
    family, notes = ModuleState.needed(source), source.notes.copy()
    turned = any(link.other_box.step is not None for link in links)
    rows = ", rows of queries and keys turned by halves of heads or by neighbours" if turned else ""
    notes.add(Fate.CHANGED, f"names: {said} ({len(shapes)} tensors{rows})", Item(Kind.MODEL))
    other = huggingface_name if own else own_name
    shared = {other(alias, release) or alias: other(owner, release) or owner for alias, owner in family.shared.items()}
    seen = recast(replace(source, notes=notes), shares, shapes)
    return described(replace(seen, family=replace(ModuleState.needed(seen), shared=shared)), lambda: config)

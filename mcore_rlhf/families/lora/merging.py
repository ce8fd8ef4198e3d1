"""``--merge-adapter``: a base model and its adapter as one model of ordinary weights, in whatever format is asked for.

Each adapted weight is a sum that is computed when it is written (see :mod:`mcore_rlhf.core.lowrank`). Nothing else of the base
changes, but for modules that the adapter has whole. Source of the arithmetic: peft 0.21.2, ``tuners/lora/layer.py``
(``get_delta_weight``, ``merge``): ``W + (alpha / r) · B · A``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.families.crossing.packing import repacked
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import Computed, Names, Source, below, bytes_of
from mcore_rlhf.storage.paths import absolute
from mcore_rlhf.storage.records import record_of

from .base_model import BaseModel, ModelFingerprint, fingerprint, sampled
from .bridge import with_peft_names
from .config import model_reference
from .merge import Merge, module_state
from .parts import adapter_in, carried, known_config


class BesideAdapter(Names):
    """As what a base is seen beside its adapter: under a module's names, its experts as they are stored."""

    adapter = True


def merged(
    opened: Source, write: WriteOptions, open_base: Callable[[WriteOptions], Source]
) -> tuple[Source, Source, WriteOptions]:
    """A model with its adapter added.

    Args:
        opened: A checkpoint with an adapter, and with its base unless ``write.base_model`` names one.
        write: ``base_model``, ``reference_config`` for what the adapter's configuration does not say, ``dtype``.
        open_base: Opens that base, as :class:`BesideAdapter` has it.

    Returns:
        All files that are read, as one source; the merged model, which is computed from it; and what is left to be said to
        the target.

    Raises:
        CheckpointError: There is no adapter or no base, they do not fit, or the adapter is of a kind that cannot be added.
    """
    adapter = with_peft_names(opened, write)
    module_state(adapter)
    config = known_config(adapter, write.reference_config)
    adapter_in(adapter, config.bias)  # where the user's own name for the folder is still known
    left = replace(write, reference_config=model_reference(write.reference_config))
    if write.base_model is None:
        return opened, Merge(adapter, adapter, write, config).source(opened.root), left
    base = open_base(left)
    if config.values.get("target_parameters") or any(_IN_MEMORY in name for name in adapter.model.shapes):
        base = _packed(base)
    _check_base(adapter, base)
    here, there = _side_by_side(adapter, base)
    result = Merge(here, there, write, config).source(base.root)
    both = here.catalog.joined(there.catalog)
    read_from = Computed(here.root, {})
    files = (*here.files, *there.files)
    return replace(here, root=opened.root, catalog=both, files=files, computed=read_from), result, left


def _side_by_side(a: Source, b: Source) -> tuple[Source, Source]:
    """Both with the folder that they have in common as their root.

    Args:
        a, b: Opened checkpoints, anywhere on this machine.
    """
    roots = [absolute(source.root) for source in (a, b)]
    common = next(folder for folder in (roots[0], *roots[0].parents) if roots[1].is_relative_to(folder))
    return below(a, common), below(b, common)


_UNCHECKED: Rule[Source] = Rule(
    Fate.NOTE, "{0.root}: the adapter has no fingerprint of its base, so that this was not checked"
)
_CHECKED: Rule[Source] = Rule(
    Fate.NOTE, "{0.root} is the base on which the adapter was trained: their fingerprints are equal"
)


_IN_MEMORY = "model.language_model."
"""What names of the text of a model of images have in memory, some of which have others on disk."""


def _check_base(adapter: Source, base: Source) -> None:
    """The base must be the one that the adapter was trained on, where the adapter says which."""
    said = carried(adapter).get("base")
    known = None if said is None else record_of(BaseModel, said, f"{adapter.root}: base", sparse=True)
    if known is None or known.fingerprint is None:
        adapter.notes.through([_UNCHECKED], base)
        return
    found = _fingerprint(base)
    if found != known.fingerprint:  # a running model has its experts packed
        found = _fingerprint(_packed(base))
    known.check(found, str(base.root))
    adapter.notes.through([_CHECKED], base)


def _packed(base: Source) -> Source:
    return repacked(base, module_state(base).config, packs_experts=True)


def _fingerprint(base: Source) -> ModelFingerprint:
    with bytes_of(base) as files:
        return fingerprint(sampled(base.catalog, base.role, [spec.name for spec in base.model.params], files))

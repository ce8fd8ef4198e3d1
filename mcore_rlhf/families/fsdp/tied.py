"""Second names of tied weights, which an FSDP run stores under both: an embedding and the output layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.storage.stored import StoredTensor
from mcore_rlhf.storage.torchzip import Directory

_TIED = "tie_word_embeddings"
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EMBEDDING = re.compile(r"(?:^|[._])(?:embed\w*|wte|word_embeddings)\.")


def find_aliases(
    shapes: Mapping[str, Shape],
    trained: Collection[str],
    config: Mapping[str, object],
    identity: Callable[[str], object],
    notes: Report,
) -> dict[str, str]:
    """Matrices that the optimizer does not know, and whose bytes are those of a trained one: an embedding and an output layer. One that is
    not stored is another's name where the model's description says so.

    Args:
        shapes: Of the model's tensors, by name.
        trained: Parameters that the optimizer has states of. Of those that it has none of, the model's description tells whether they
            are tied.
        config: That description, or empty.
        identity: What equal bytes have in common, for a tensor's name.
        notes: Told what was found.

    Returns:
        ``{alias: owner}``.
    """
    if not trained and not _says_tied(config):
        return {}
    embeddings, owning = {name for name in shapes if _EMBEDDING.search(name)}, {*trained}
    if _says_tied(config) and not owning & {*embeddings, _HEAD}:  # frozen, with both of its names
        owning |= embeddings
    owners: dict[Shape, list[str]] = {}
    for name in shapes:
        if name in owning:
            owners.setdefault(shapes[name], []).append(name)
    found: dict[str, str] = {}
    if _says_tied(config) and _EMBED in shapes and _HEAD not in shapes:
        found[_HEAD] = _EMBED  # as NeMo-RL leaves it out, and Hugging Face
    for alias in [name for name in shapes if name not in owning and len(shapes[name]) == 2]:
        for owner in owners.get(shapes[alias], ()):
            if _EMBEDDING.search(f"{alias} {owner}") and identity(alias) == identity(owner):
                found[alias] = owner
                notes.add(Fate.NOTE, f"{alias}: the same tensor as {owner}, stored twice")
                break
    return found


def untied(config: dict[str, object], own: Collection[str], notes: Report) -> dict[str, object]:
    """The description of a model that SkyRL trains with embedding and output layer apart, whatever its description says.

    Source: SkyRL 0.3.0, ``skyrl/backends/skyrl_train/distributed/fsdp_strategy.py`` (``_fsdp_init_model``: ``module.to("meta")`` makes two
    parameters of one, and nothing ties them again).

    Args:
        config: The description.
        own: Tensors that are not other ones' second names.
        notes: Told what was found.
    """
    if not (_says_tied(config) and {_EMBED, _HEAD} <= {*own}):
        return config
    notes.add(
        Fate.CHANGED, f"{_TIED}: true in config.json, and {_HEAD} was trained apart from {_EMBED}, as SkyRL does: false"
    )
    return {**config, _TIED: False}


def _says_tied(config: Mapping[str, object]) -> bool:
    """Whether a ``config.json`` says so, of a model of text or of one with a text inside."""
    inside = config.get("text_config")
    return any(part.get(_TIED) is True for part in (config, inside) if isinstance(part, Mapping))


def stored_identity(parts: Sequence[tuple[Directory, StoredTensor]]) -> object:
    """What parts of tensors have in common where their bytes are equal: records and places in them, or the CRCs of the records.

    Args:
        parts: The file of each part, and where it lies there.
    """
    return tuple((_of_record(of, stored), stored.start, stored.shape, stored.strides) for of, stored in parts)


def _of_record(directory: Directory, stored: StoredTensor) -> object:
    """Records of one CRC hold the same; in a file without CRCs a record is only itself."""
    member = directory.members[stored.record.key]
    if not directory.checksummed:
        return directory.path, member.name
    return stored.record.dtype, member.nbytes, member.crc32

"""The formats that are known, in the order in which a folder is looked at: a new one is a file or folder beside this with its ``FORMAT``
in it, and one line of :data:`KNOWN`.

:mod:`.registry` makes the formats of these lines. The help lists the lines: for that no reader is imported.
"""

from __future__ import annotations

from typing import NamedTuple


class KnownFormat(NamedTuple):
    """What a format says of itself, for who imports none: the registry holds it against the format.

    Args:
        name, family: See :class:`~mcore_rlhf.families.source.Names`.
        also: What the help says of it in brackets: another name, what it is not.
        module: The file or folder; empty where it is called as the format is, with ``_`` for ``-``.
    """

    name: str
    family: str
    also: str = ""
    module: str = ""


KNOWN: tuple[KnownFormat, ...] = (
    KnownFormat("megatron-dist", "megatron", "torch_dist"),
    KnownFormat("megatron", "megatron"),
    KnownFormat("universal", "module"),
    KnownFormat("deepspeed", "module", "ZeRO"),
    KnownFormat("hf-trainer", "module"),
    KnownFormat("hf-accelerate", "module"),
    KnownFormat("dcp", "module"),
    KnownFormat("fsdp-ranks", "module"),
    KnownFormat("hf", "module"),
    KnownFormat("peft", "module"),
    KnownFormat("torch", "module", "state.pt of torch.save; Megatron's --ckpt-format torch is megatron", "torch_file"),
)


def for_people(name: str, family: str) -> tuple[str, bool]:
    """The order in which people name formats: by family, and in it first the one that is called so.

    Args:
        name, family: A format's.
    """
    return family, name != family

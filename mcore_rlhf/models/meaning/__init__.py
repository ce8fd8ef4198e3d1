"""One table of what every argument of Megatron and every field of a supported ``config.json`` means.

Who wants to account for the description of a model asks here:

* :func:`~.lookup.of_arguments` and :func:`~.lookup.of_config` give, for every name in a source's arguments or its
  ``config.json``, a :class:`~.kinds.Meaning`: its :class:`~.kinds.Kind` (does it change what the model computes, and if
  not, what is it about), how the other family spells it, and its default.
* :meth:`Meaning.fate` says what becomes of it in a conversion to the other family that was not refused: ``kept``,
  ``derived``, ``lost`` (``--ignore-field``) or ``left behind`` (the reason is ``kind.value``).
* :func:`~.lookup.inexpressible_arguments` and :func:`~.lookup.inexpressible_fields` name what the other side cannot express.

The relations between the two sides are the ``fields`` of an architecture (:mod:`mcore_rlhf.models.huggingface`); what stands
in no relation is in :mod:`.arguments` (it must be neutral, or changes nothing) and :mod:`.lookup` (it changes nothing).
``declared.json`` is a snapshot of what megatron-core, Megatron-LM and transformers declare, with their defaults, so that
none of them is needed; a test holds it against the installed ones.
"""

from __future__ import annotations

from .kinds import Kind as Kind
from .kinds import Meaning as Meaning

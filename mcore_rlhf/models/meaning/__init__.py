"""One table of what every argument of Megatron and every field of a supported ``config.json`` means.

Who wants to account for the description of a model asks here:

* :func:`~.lookup.of_arguments` and :func:`~.lookup.of_config` give, for every name in a source's arguments or its
  ``config.json``, a :class:`~.kinds.Meaning`: what it says something :class:`~.kinds.About`, how the other family spells
  it, and its default; what becomes of it in a crossing is said by :data:`mcore_rlhf.families.crossing.rules.OF_PLACES`.
* :func:`~.lookup.inexpressible_arguments` and :func:`~.lookup.inexpressible_fields` name what the other side cannot express.

The relations between the two sides are the ``fields`` of an architecture (:mod:`mcore_rlhf.models.huggingface`); what stands
in no relation is in :mod:`.arguments` (it must be neutral, or changes nothing) and :mod:`.lookup` (it changes nothing).
``declared.json`` is a snapshot of what megatron-core, Megatron-LM and transformers declare, with their defaults, so that
none of them is needed; a test holds it against the installed ones.
"""

from __future__ import annotations

from .kinds import About as About
from .kinds import Meaning as Meaning

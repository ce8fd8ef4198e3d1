"""Saving and resuming a whole RLHF run: every model, the data, the RNG states, in one commit.

* ``run``: the manager, and what runs when a step is saved (``save`` → ``snapshot`` → ``write`` → ``commit``) or loaded (``load``);
  ``steps``, which says what lies in a root; ``policies`` (when to save) and ``retention`` (what to keep).
* ``rlhf``: the RLHF state (KL controllers, schedules, statistics, buffers) and the prompt sampler.
* ``config``: a run's configuration in YAML, and the objects that it asks for.
* ``prove``: ``mcore-rlhf resume-check``.
* ``subject`` and ``convert_step``: a step that is read or converted without a live run.

What scripts import of it stands in ``mcore_rlhf`` itself.
"""

"""A small but real GRPO and PPO trainer on megatron-core: what ``python -m mcore_rlhf.demo.train`` runs.

* ``task``: the prompts, their tokens, and the reward of an answer.
* ``settings``: what a run is told (plain values).
* ``options`` (with ``configuring``): the command line, and what it takes from a run's configuration.
* ``advantages``, ``losses`` and ``noise``: the arithmetic of GRPO and PPO, on plain tensors.
* ``passes``: one pass of Megatron's pipeline schedule, forward only or with gradients.
* ``rollouts``: answers sampled from the live policy, token by token.
* ``models``: actor, frozen reference policy and critic, on one layout.
* ``trainer``: the training step of either algorithm.
* ``checkpoints``: what the manager is given.
* ``run``: all of it together, from the first step or from a checkpoint to the last.
* ``digests`` and ``metrics``: one line per step, from which two runs can be compared byte by byte.
"""

"""A small but real GRPO and PPO trainer on megatron-core: what ``python -m mcore_rlhf.demo.train`` runs.

* ``run``: all of it together, from the first step or from a checkpoint to the last, and what the manager is given.
* ``trainer``: the training step of either algorithm.
* ``models``: actor, frozen reference policy and critic, on one layout, and digests of them.
* ``rollouts``: answers sampled from the live policy, token by token.
* ``passes``: one pass of Megatron's pipeline schedule, forward only or with gradients.
* ``losses``: the arithmetic of GRPO and PPO, advantages included, on plain tensors.
* ``task``: the prompts, their tokens, and the reward of an answer.
* ``options`` (with ``settings``): the command line, and what it takes from a run's configuration.
* ``metrics``: one line per step, from which two runs can be compared byte by byte.
* ``continuing``: a stretch of a run as a job for a pool of workers.
"""

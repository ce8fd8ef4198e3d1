"""Small models trained by real megatron-core, on the CPU when there is no GPU.

The demonstration and the tests share this folder. To learn how a trainer is saved and resumed, read ``rl/run`` and, for the
training step itself, ``rl/trainer``. All parts:

* ``rl`` and ``train``: a GRPO and PPO trainer, saved and resumed through the manager; ``python -m mcore_rlhf.demo.train``.
* ``command``: ``mcore-rlhf demo``, which trains with it, kills it, resumes it and proves it.
* ``configs``: what to train, on which layout, how (plain values, no torch).
* ``model``, ``data``, ``trainer``: GPT, deterministic batches, Megatron's own training step.
* ``cpu_megatron`` (with ``cpu_kernels``): the stand-ins that let megatron-core run without a GPU; import ``with_megatron``
  before ``megatron``.
* ``megatron_checkpoint`` (with ``megatron_args``): Megatron-LM's legacy checkpoint, written and read with
  megatron-core's own methods only. It knows nothing of the rest of this package and so can witness against it.
* ``live_state``, ``placed_state``: every live parameter, master and moment of a rank, for comparison.
* ``jobs`` and ``workers`` (with ``worker_process``): training runs as plain values, and resident processes that run them,
  and any other distributed job, on one machine.
"""

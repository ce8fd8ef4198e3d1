"""Native DeepSpeed checkpoints: ``<tag>/…model_states.pt`` and ``…optim_states.pt`` of ZeRO stages 0 to 3, ``latest``.

What a :class:`~mcore_rlhf.formats.base.Source` of the DeepSpeed family looks like, whichever format read it:

* Names are the module's own (``model.layers.0.mlp.up_proj.weight``; ``1.mlp.up_proj.weight`` and
  ``tied_modules.embed.…`` in a ``PipelineModule``). A parameter that is tied has one name, its owner's; the others are in
  ``state.other["shared_params"]`` as ``{alias: owner}``.
* States are ``param`` (the weight as the model computes with it, buffers and frozen parameters too), ``master``, and the
  optimizer's own keys: ``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``, … Stage 3 stores no weights but masters of what it
  trains, so its catalogue has no ``param`` for those: it is ``master``, rounded to the dtype of its ``ParamSpec``.
* ``model.params`` are in the order of the module's state dict. What is not ``trainable`` is a buffer if its name is in
  ``state.other["buffer_names"]``, and frozen otherwise.
* ``state.groups`` are the optimizer's param groups in order: ``fields`` has everything but ``params``, and ``step`` with it;
  ``scalars`` names those fields (``step``) that live in the optimizer's state and not in the group; ``params`` has the
  names, in the optimizer's own order, not shuffled by ``round_robin_gradients``.
* ``state.iteration`` is ``global_steps``. ``state.scheduler`` is ``lr_scheduler``. ``state.grad_scaler`` is a dictionary with
  the keys that the optimizer's state dict has: ``loss_scaler`` (a stub), ``dynamic_loss_scale``, ``overflow``, or those of
  stage 0, ``cur_scale``, ``cur_iter``, ….
* ``state.other`` has DeepSpeed's own keys: ``global_steps``, ``global_samples``, ``skipped_steps``, ``ds_config``, ``ds_version``,
  ``buffer_names``, ``shared_params``, ``data_sampler``, ``random_ltd``, ``universal_checkpoint_info``, ``clip_grad``, as far as
  they are stored; and ``client_state``: everything that the user gave to ``save_checkpoint``, with real tensors.
* ``parallel`` has ``tp`` and ``pp`` of the model-parallel ranks, and ``dp``. ``optimizer`` is ``zero0`` … ``zero3``, or None.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.formats.base import ReadOptions, Source, Target, WriteOptions

from .files import is_tag_folder, looks_like_root


@dataclass(frozen=True, slots=True)
class DeepSpeedFormat:
    """DeepSpeed's own checkpoints, written by ``engine.save_checkpoint``."""

    name: str = "deepspeed"

    def detect(self, path: Path) -> bool:
        """Whether a folder is a tag's, or a root with tags."""
        return is_tag_folder(path) or looks_like_root(path)

    def read(self, path: Path, options: ReadOptions) -> Source:
        """Open a checkpoint."""
        from .reader import read_deepspeed

        return read_deepspeed(path, options)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new checkpoint."""
        from .writer import deepspeed_target

        return deepspeed_target(source, options)


FORMAT = DeepSpeedFormat()

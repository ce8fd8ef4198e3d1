"""Native DeepSpeed checkpoints: ``<tag>/…model_states.pt`` and ``…optim_states.pt`` of ZeRO stages 0 to 3, ``latest``.

What a :class:`~mcore_rlhf.families.source.Source` of the DeepSpeed family looks like, whichever format read it
(:mod:`mcore_rlhf.families.module` says what both keep besides tensors, as ``Source.family``):

* Names are the module's own (``model.layers.0.mlp.up_proj.weight``; ``1.mlp.up_proj.weight`` and
  ``tied_modules.embed.…`` in a ``PipelineModule``). A parameter that is tied has one name, its owner's; the others are in
  ``ModuleState.shared``.
* States are ``param`` (the weight as the model computes with it, buffers and frozen parameters too), ``master``, and the
  optimizer's own keys: ``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``, … Stage 3 stores no weights but masters of what it
  trains, so its catalogue has no ``param`` for those: it is ``master``, rounded to the dtype of its ``ParamSpec``.
* ``model.params`` are in the order of the module's state dict. What is not ``trainable`` is a buffer if its name is in
  ``ModuleState.buffers``, and frozen otherwise.
* ``state.groups`` are the optimizer's param groups in order: ``fields`` has everything but ``params``, and ``step`` with it;
  ``scalars`` names those fields (``step``) that live in the optimizer's state and not in the group; ``params`` has the
  names, in the optimizer's own order, not shuffled by ``round_robin_gradients``.
* ``parallel`` has ``tp`` and ``pp`` of the model-parallel ranks, and ``dp``. ``optimizer`` is ``zero0`` … ``zero3``, or None.
"""

from __future__ import annotations

from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import Format, Target
from mcore_rlhf.storage.paths import ReadablePath

from .files import LATEST, is_tag_folder, looks_like_root


class DeepSpeedFormat(Format):
    """DeepSpeed's own checkpoints, written by ``engine.save_checkpoint``."""

    name = "deepspeed"
    holds_adapters = True
    takes = (Takes.MODEL_PARALLEL, Takes.DATA_PARALLEL, Takes.ZERO_STAGE, Takes.DTYPE, Takes.LIKE)
    deals_groups = True
    tracker = LATEST
    tags = True

    def load_hint(self, path: ReadablePath, *, optimizer: bool = True) -> str:
        """How the framework is told to load it."""
        return f'engine.load_checkpoint("{path}"{"" if optimizer else ", load_module_only=True"})'

    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder is a tag's, or a root with tags."""
        return is_tag_folder(path) or looks_like_root(path)

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open a checkpoint."""
        from .reader import read_deepspeed

        return read_deepspeed(path, options)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new checkpoint."""
        from .writer import deepspeed_target

        return deepspeed_target(source, options)


FORMAT: Format = DeepSpeedFormat()

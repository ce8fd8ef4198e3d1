"""What DeepSpeed's files look like, as far as they are read here.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_save_checkpoint``), ``runtime/zero/stage_1_and_2.py``, ``stage3.py`` and
``runtime/bf16_optimizer.py`` (``state_dict``), ``checkpoint/universal_checkpoint.py`` for ``affine_map``.
"""

from __future__ import annotations

from mcore_rlhf.formats.form import (
    INT,
    NUMBER,
    SHAPES,
    TEXT,
    by_key,
    by_name,
    each,
    either,
    fields,
    items,
    maybe,
    of,
)
from mcore_rlhf.storage.stored import StoredTensor

_TENSOR = of("a tensor", StoredTensor)
_NUMBER_OR_NAME = of("a number or a name", int, str)
_STATES = fields()
_TORCH_OPTIMIZER = fields(
    ("state", "param_groups"),
    state=fields(),
    param_groups=each(fields(("params",), params=each(_NUMBER_OR_NAME), param_names=each(TEXT))),
)
"""What ``torch.optim.Optimizer.state_dict`` gives."""

_STRIDED = items(INT, each(INT))
_PIECE = fields(("shape", "source", "dest"), shape=each(INT), source=_STRIDED, dest=_STRIDED, scale=NUMBER)
_OF_RANK = fields(("shard_shape", "pieces"), shard_shape=each(INT), pieces=each(_PIECE))
_AFFINE = fields(
    ("logical_shape", "ranks"),
    logical_shape=each(INT),
    ranks=by_key(_NUMBER_OR_NAME, _OF_RANK),
)

MODEL = fields(
    module=maybe(by_name()),
    buffer_names=maybe(each(TEXT)),
    param_shapes=maybe(each(SHAPES)),
    frozen_param_shapes=maybe(SHAPES),
    frozen_param_fragments=maybe(by_name(_TENSOR)),
    shared_params=maybe(by_name(TEXT)),
    optimizer=maybe(fields(optimizer_state_dict=_TORCH_OPTIMIZER)),
    global_steps=maybe(INT),
    num_experts=maybe(either(INT, each(INT))),
    checkpoint_parallel_dimensions=maybe(fields(pp_degree=INT, tp_degree=INT)),
    universal_checkpoint_info=maybe(fields(affine_map=maybe(fields(params=by_name(_AFFINE))))),
)
"""A model file."""

LAYER = by_name()
"""A layer of a ``PipelineModule``."""

OPTIMIZER = fields(
    optimizer_state_dict=fields(
        base_optimizer_state=either(each(_STATES), _TORCH_OPTIMIZER),
        optimizer_state_dict=_TORCH_OPTIMIZER,
        single_partition_of_fp32_groups=each(maybe(_TENSOR)),
        fp32_flat_groups=each(maybe(_TENSOR)),
        param_alignment_paddings=maybe(each(each(INT))),
        param_slice_mappings=maybe(each(by_name())),
        partition_count=either(INT, each(INT)),
        ds_version=maybe(TEXT),
    ),
)
"""An optimizer file of one rank."""

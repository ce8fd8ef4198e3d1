"""The state of NVIDIA's Model Optimizer (ModelOpt): which quantization, pruning or distillation was applied to a model, and how.

In the ``torch`` format it is a value of every rank's file, one for each model chunk; in ``torch_dist`` a checkpoint of its own in
:data:`FOLDER` of the iteration, which is looked into nowhere else, and in which what belongs to single modules is left out: since
0.29 that is in their ``_extra_state``.

Source: NVIDIA/Model-Optimizer main, ``modelopt/torch/opt/plugins/mcore_dist_checkpointing.py`` (``save_modelopt_state``,
``restore_modelopt_state``, ``save_sharded_modelopt_state``, ``restore_sharded_modelopt_state``, ``remove_per_module_state``), as
megatron-core 0.19.2 calls it in ``training/checkpointing.py`` (``save_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

KEY = "modelopt_state"
FOLDER = KEY
_MODES, _METADATA = "modelopt_state_dict", "metadata"
_OF_MODULES = ("quantizer_state", "subnet_config", "real_quantizer_state", "q_tensor_state")


def keys(chunks: int) -> tuple[str, ...]:
    """Under which keys a rank with so many model chunks has it.

    Args:
        chunks: Its model chunks.
    """
    return (KEY,) if chunks == 1 else tuple(f"{KEY}_{number}" for number in range(chunks))


def _metadata(state: object) -> Iterator[tuple[str, Mapping[str, object]]]:
    """For every mode that was applied, its name and what it keeps."""
    modes = state.get(_MODES) if isinstance(state, Mapping) else None
    for mode in modes if isinstance(modes, list | tuple) else ():
        if isinstance(mode, list | tuple) and len(mode) == 2 and isinstance(mode[1], Mapping):
            found = mode[1].get(_METADATA)
            yield str(mode[0]), found if isinstance(found, Mapping) else {}


def of_modules(state: object) -> tuple[str, ...]:
    """What of a state belongs to single modules, whose names are those of one layout: ``quantize.quantizer_state``, ….

    Args:
        state: ModelOpt's.
    """
    return tuple(f"{mode}.{key}" for mode, of in _metadata(state) for key in _OF_MODULES if of.get(key))


def without_modules(state: object) -> object:
    """A state as ``torch_dist`` has it.

    Args:
        state: ModelOpt's.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get(_MODES), list | tuple):
        return state
    modes: list[object] = []
    for mode in state[_MODES]:
        if isinstance(mode, list | tuple) and len(mode) == 2 and isinstance(mode[1], Mapping):
            found = mode[1].get(_METADATA)
            kept = {k: v for k, v in found.items() if k not in _OF_MODULES} if isinstance(found, Mapping) else {}
            mode = (mode[0], {**mode[1], _METADATA: kept})
        modes.append(mode)
    return {**state, _MODES: modes}

"""The loss scaler: an object in ZeRO's files, loose values in those of stage 0.

Source: deepspeed 0.19.8, ``runtime/fp16/loss_scaler.py`` (``LossScaler``, ``DynamicLossScaler``),
``runtime/fp16/fused_optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

from collections.abc import Mapping

from mcore_rlhf.storage.stubs import Stub, new_stub

_STATIC = "deepspeed.runtime.fp16.loss_scaler.LossScaler"
_DYNAMIC = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
_LOOSE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_DEFAULTS: dict[str, object] = {
    "cur_scale": 65536.0, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000,
    "min_scale": 1, "delayed_shift": 1, "cur_hysteresis": 1, "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True, "dtype": None, "dynamic": True,
}  # fmt: skip


def scaler_of(optimizer: Mapping[str, object]) -> Stub | None:
    """The loss scaler of an optimizer's state dict, or None where there is none."""
    stored = optimizer.get("loss_scaler")
    if isinstance(stored, Stub):
        return stored
    if "cur_scale" not in optimizer:
        return None
    if not optimizer.get("dynamic_loss_scale"):
        return static_scaler(optimizer["cur_scale"])
    return new_stub(_DYNAMIC, {**_DEFAULTS, **{key: optimizer[key] for key in _LOOSE if key in optimizer}})


def static_scaler(scale: object = 1.0) -> Stub:
    """A scale that never changes; 1 outside of fp16."""
    return new_stub(_STATIC, {"cur_scale": scale, "dynamic": False})


def is_dynamic(scaler: object) -> bool:
    """Whether a scaler adapts itself."""
    return bool(getattr(scaler, "dynamic", False)) if scaler is not None else False


def loose_values(scaler: object) -> dict[str, object]:
    """The scaler as stage 0 stores it."""
    dynamic = is_dynamic(scaler)
    keys = _LOOSE if dynamic else _LOOSE[:2]
    values = {key: getattr(scaler, key, {**_DEFAULTS, "cur_scale": 1.0}[key]) for key in keys}
    return {"dynamic_loss_scale": dynamic, **values}

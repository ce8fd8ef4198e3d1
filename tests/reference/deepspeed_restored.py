"""What a rank does to see what ``load_checkpoint`` restores of files from which something was taken."""

from __future__ import annotations

from typing import Any

from tests.reference.deepspeed_live import Live, look, module_of, steps
from tests.reference.deepspeed_models import Setting, build_engine
from tests.reference.deepspeed_resident import SAVED, begin, train


def after_loading(setting: Setting, root: str, options: dict[str, Any]) -> Any:
    """The engine as it is then; the error, where that or the first step after it fails; None where it says that nothing was loaded."""
    begin()
    engine = build_engine(setting, seed=9)
    try:
        path, _ = engine.load_checkpoint(root, **options)
        if path is None:
            return None
        seen = _seen(engine, setting)
        train(engine, SAVED, SAVED + 1)
    except Exception as error:  # whatever it is: that is what is looked at
        return f"{type(error).__name__}: {error}"
    return seen


def _seen(engine: Any, setting: Setting) -> Live:
    """The engine; one of whose optimizer a parameter has no moments yet has no states."""
    try:
        if setting.stage == 0 or steps(engine):
            return look(engine, setting.stage)
    except (KeyError, AttributeError, ValueError):
        pass
    counters = {"global_steps": engine.global_steps, "scheduler": engine.lr_scheduler.state_dict()}
    return Live(module_of(engine, setting.stage), {}, [], [], counters)

"""What ``trainer_state.json`` says of a run of transformers' Trainer: read, and made anew where a step becomes one of its.

Sources: transformers 5.23.0, ``trainer.py`` (``_save_checkpoint``), ``trainer_callback.py`` (``TrainerState``, ``TrainerControl.state``),
``trainer_utils.py`` (``compare_trainer_and_checkpoint_args``), ``training_args.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.errors import Corrupt, Unsupported
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath, cannot_open

from .fsdp.state import MOST_STEPS
from .source import Source
from .trainer_files import RunFiles

COUNTERS, STEP = "trainer_state", "global_step"
"""The key of client state under which the Trainer's counters travel, and the one of them that is the iteration."""
_BATCH, _DEFAULT_BATCH = "train_batch_size", 8
"""What the Trainer divides when it resumes, so that it has to be there."""
_CALLBACKS = {
    "TrainerControl": {
        "args": dict.fromkeys(
            ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log"), False
        ),
        "attributes": {},
    }
}
"""What every run of the Trainer's has, which stops at its next save without it."""
_OF_STEP = (
    "epoch", "log_history", "best_metric", "best_global_step", "best_model_checkpoint", "total_flos", "num_input_tokens_seen",
)  # fmt: skip


def read_counters(path: ReadablePath, files: RunFiles) -> dict[str, object]:
    """The Trainer's counters; empty where there are none.

    Args:
        path: The checkpoint's folder.
        files: What its files are called.

    Raises:
        CheckpointError: They are no JSON, or say no step that a run has.
    """
    file = path / files.counters
    if not files.counters or not file.is_file():
        return {}
    try:
        found = reading.read_json(file)
    except OSError as error:
        raise cannot_open(error, file) from error
    except ValueError as error:
        raise Corrupt(f"{file}: is no JSON: {error}\nCopy the file again from where it came from.") from None
    step = found.get(STEP) if isinstance(found, dict) else None
    if not isinstance(found, dict) or type(step) is not int or not 0 <= step < MOST_STEPS:
        raise Unsupported(f"{file}: expected an object whose {STEP} is a number of steps, found {step!r:.60}")
    return found


@dataclass(frozen=True, slots=True)
class NewCounters:
    """The counters of a step that is written.

    Args:
        source: What the step is made of.
        files: What the file is called.
        like: Those of the run that goes on, at any step; empty where nobody showed one.
    """

    source: Source
    files: RunFiles
    like: Mapping[str, object]

    @property
    def own(self) -> dict[str, object] | None:
        """The source's, where they are of its step."""
        found = (self.source.state.other.get(COUNTERS), self.beside)
        at = self.source.state.iteration
        return next((dict(own) for own in found if isinstance(own, dict) and own.get(STEP) == at), None)

    @property
    def beside(self) -> dict[str, object]:
        """Those that go along with the source, from beside the tag of DeepSpeed's files; empty where there are none."""
        carried = self.source.carried
        return (
            {}
            if carried is None or self.files.counters not in carried.files
            else read_counters(carried.folder, self.files)
        )

    @property
    def batch(self) -> int:
        """Samples that a rank takes at a time: as the source's run did, or else as the Trainer's own default says."""
        found = self.source.state.args.get("train_micro_batch_size_per_gpu")
        return found if isinstance(found, int) and found > 0 else _DEFAULT_BATCH

    def text(self) -> str:
        """The file: the source's counters, those of ``--like`` at this step, or the step and what the Trainer cannot do without."""
        found = {_BATCH: self.batch, **self._at_this_step()} if self.own is None else self.own
        return json.dumps(found, indent=2, sort_keys=True) + "\n"

    def _at_this_step(self) -> dict[str, object]:
        """The run's: what is of the run stays, what is of the step is left out or counted on."""
        own = {key: value for key, value in self.like.items() if key not in _OF_STEP}
        step, epoch, at = self.like.get(STEP), self.like.get("epoch"), self.source.state.iteration
        if isinstance(epoch, int | float) and isinstance(step, int) and step > 0:
            own["epoch"] = epoch * at / step
        return {"stateful_callbacks": _CALLBACKS, **own, STEP: at}


COUNTED: tuple[Rule[NewCounters], ...] = (
    Rule(Fate.DERIVED, "{0.files.counters}: as --like has them, at this step", lambda new: new.own is None and new.like),
    Rule(Fate.DERIVED, f"{{0.files.counters}}: {STEP}, and {_BATCH} {{found}}, which the Trainer compares with its own and warns "
         "of (with auto_find_batch_size it begins with it); it logs, evaluates and saves every 500 steps then, whatever its arguments say; "
         "--like FOLDER gives the run's own",
         lambda new: new.batch if new.own is None and not new.like else None),
)  # fmt: skip
"""What is said of counters that are written."""

"""miles' steps, each verified and given a manifest once it is written.

::

    --custom-megatron-post-save-hook-path mcore_rlhf.integrations.miles.post_save

miles calls that on rank 0 when Megatron-LM has written ``iter_NNNNNNN``, and its tracker names the step already. So a kill in the middle of
a save leaves what it leaves without us: a step that is listed as one without a manifest. What is added: a step with a manifest is whole, on
the disk, and any later damage is found; ``prune``, ``watch`` and ``diff`` know which to take. The step is read in a thread of its own, one
after the other, since a rank that reads for minutes would be missed by the others. Read, not run with miles, which needs a GPU.

Source: radixark/miles 31f1ca9, ``miles/backends/megatron_utils/actor.py`` (``save_model``), ``docs/user-guide/customization.md``. slime,
which it came of, has no such hook.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mcore_rlhf.errors import CheckpointError, headline
from mcore_rlhf.manager.run.adopt import Adoption, adopt

from .seam import LOG

_BEHIND = ThreadPoolExecutor(1, thread_name_prefix="mcore_rlhf adopt")  # Python waits for it at its end


def post_save(args: object, rollout_id: int, checkpoint_dir: str, hf_checkpoint_dir: str | None) -> Future[None]:
    """Give a step that was just written a manifest, behind training. One that cannot be given one is said, and training goes on.

    Args:
        args: Of Megatron-LM and miles.
        rollout_id: The step.
        checkpoint_dir: Its folder, ``<save>/iter_NNNNNNN``.
        hf_checkpoint_dir: The Hugging Face folder of it, where one was written; it is left as it is.

    Returns:
        What ends when it has one, or was refused; miles passes over it.
    """
    try:
        return _BEHIND.submit(_adopted, rollout_id, Path(checkpoint_dir))
    except RuntimeError as error:  # the system gives no thread: it waits for the next call
        LOG.warning("rollout %s: %s has no manifest yet: %s", rollout_id, checkpoint_dir, error)
        done = Future[None]()
        done.set_result(None)
        return done


def _adopted(rollout_id: int, folder: Path) -> None:
    try:
        adopt(folder, Adoption(workers=1, written_over=True))
    except CheckpointError as error:
        LOG.warning("rollout %s: %s has no manifest: %s", rollout_id, folder, headline(str(error)))
    except Exception:  # what becomes of a step that is there ends no training
        LOG.exception("rollout %s: %s has no manifest", rollout_id, folder)


__all__ = ["post_save"]

"""DeepSpeed's ``save_checkpoint`` and ``load_checkpoint``, whose tag folder is there as a whole or not at all.

::

    from mcore_rlhf.integrations.deepspeed_checkpoints import attach
    attach(engine)                            # after deepspeed.initialize(...), on every rank
    engine.save_checkpoint("runs/a", tag)     # as ever
    engine.load_checkpoint("runs/a")          # as ever, and verified before

The files of a tag are DeepSpeed's own, and its own ``load_checkpoint`` reads them with or without this package. It writes them into a
hidden folder, which it is given as its root; ``latest`` names the tag when that is published. DeepSpeed alone writes into the tag's folder
itself, and empties ``latest`` before it writes it. Importing this module does not import DeepSpeed.

Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``save_checkpoint``, ``load_checkpoint``, ``_copy_recovery_script``),
``runtime/checkpoint_engine/checkpoint_engine.py`` (``CheckpointEngine``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.manager.tagged import TagOptions, Tags

from .seam import Seam

SEAM = Seam(
    "deepspeed",
    "0.19.8",
    {
        "save_checkpoint": ("save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"),
        "load_checkpoint": ("load_dir", "tag"),
        "load_universal_checkpoint": (),
        "use_node_local_storage": (),
    },
)
FILES = Seam(
    "deepspeed",
    "0.19.8",
    {"save": ("state_dict", "path"), "commit": ("info",), "is_decoupled": ()},
)
_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""What DeepSpeed copies beside every tag."""
if TYPE_CHECKING:
    _Engine: Any = object
else:
    _Engine = object


class Telling:
    """Stands before a checkpoint engine of DeepSpeed's: a file that cannot be written is told of when all ranks have written.

    DeepSpeed's other ranks wait in a barrier for the one that raises, for as long as the process group lets them.

    Args:
        inner: The checkpoint engine.

    Attributes:
        failed: What the first file met that could not be written, while :attr:`saving`.
        saving: Whether it is us who hear of it; otherwise it is raised.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.failed: Exception | None = None
        self.saving = False

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # of one that is being copied
            raise AttributeError(name)
        return getattr(self._inner, name)

    def save(self, state_dict: Any, path: str) -> Any:
        """Write a file, unless one before could not be written."""
        return self._told("save", state_dict, path)

    def commit(self, info: Any) -> Any:
        """Wait for the files."""
        return self._told("commit", info)

    def _told(self, method: str, *args: Any) -> Any:
        try:
            if self.failed is None:
                return getattr(self._inner, method)(*args)
        except Exception as error:
            if not self.saving:
                raise
            self.failed = error
        return None

    def outcome(self) -> None:
        """Raise what was met.

        Raises:
            Exception: Whatever it was.
        """
        failed, self.failed = self.failed, None
        if failed is not None:
            raise failed


class CommittingEngine(_Engine):
    """Stands before an engine's class: what it saves is written aside and published whole; what it loads was verified."""

    _mcore_rlhf_tags: Tags
    checkpoint_engine: Any

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] = {},  # noqa: B006  as DeepSpeed's own, which does not change it
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's own. Collective.

        Raises:
            CheckpointError: A rank failed, on every rank; nothing was published, and ``latest`` is as it was.
        """
        name = str(tag) if tag is not None else f"global_step{self.global_steps}"

        def write(staging: Path) -> None:
            self.checkpoint_engine.saving = True
            try:
                super(CommittingEngine, self).save_checkpoint(
                    str(staging), name, client_state, False, exclude_frozen_parameters
                )
            finally:
                self.checkpoint_engine.saving = False
            self.checkpoint_engine.outcome()

        latest = "latest" if save_latest else ""
        self._mcore_rlhf_tags.save(save_dir, name, write, step=self.global_steps, latest=latest, beside=_SCRIPTS)
        return True

    def load_checkpoint(self, load_dir: str, tag: Any = None, *args: Any, **named: Any) -> Any:
        """As DeepSpeed's own; a tag that was committed is verified first. Collective.

        Raises:
            CheckpointError: It is damaged; all that is wrong is named, with the tags that are whole.
        """
        latest = "latest_universal" if self.load_universal_checkpoint() else "latest"
        self._mcore_rlhf_tags.check(load_dir, None if tag is None else str(tag), latest)
        return super().load_checkpoint(load_dir, tag, *args, **named)


def attach(engine: Any, options: TagOptions | None = None) -> None:
    """Have an engine commit its checkpoints. Call it on every rank, after ``deepspeed.initialize``.

    Args:
        engine: DeepSpeed's.
        options: How they are committed.

    Raises:
        Unsupported: It has not what we stand around, or writes what cannot be published as a whole; nothing was changed.
    """
    if isinstance(engine, CommittingEngine):
        return
    SEAM.check(type(engine))
    FILES.check(type(engine.checkpoint_engine))
    if engine.checkpoint_engine.is_decoupled():
        raise Unsupported(
            "checkpoint.writer.decoupled: the files would come after the tag was to be published\nLeave it at false."
        )
    if engine.use_node_local_storage():
        raise Unsupported(
            "checkpoint.use_node_local_storage: every host would have a part of the tag on a disk of its own, and none could publish it\n"
            "Save on a file system that all hosts share, and leave it at false."
        )
    engine._mcore_rlhf_tags = Tags("deepspeed", options)
    engine.checkpoint_engine = Telling(engine.checkpoint_engine)
    engine.__class__ = type(
        type(engine).__name__, (CommittingEngine, type(engine)), {"__module__": type(engine).__module__}
    )


__all__ = ["TagOptions", "attach"]

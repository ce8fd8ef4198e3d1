"""How the steps of a root are called, and how they are found: what retention and the seams ask, whoever writes there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from mcore_rlhf.errors import NotACheckpoint
from mcore_rlhf.storage.paths import ReadablePath

from . import steps
from .steps import Step


@dataclass(frozen=True, slots=True)
class Naming:
    """How the steps of a root are called, and how they are found: ours, :data:`OWN`, or another trainer's (:func:`..runs.naming_of`).

    Args:
        manifest: What the manifest is called in a step.
        step_of: The step whose folder is called so; None where none is.
        listed: See :func:`.steps.listed`; of several folders of one step, the one to go on from is the last.
        newest_first: See :func:`.steps.newest_first`.
    """

    manifest: str
    step_of: Callable[[str], int | None]
    listed: Callable[[ReadablePath], list[Step]]
    newest_first: Callable[[ReadablePath], Iterable[Step]]

    def newest(self, root: ReadablePath) -> Step | None:
        """See :func:`.steps.newest`."""
        return steps.newest_of(self.newest_first(root))

    def folders_of(self, root: ReadablePath, step: int) -> list[ReadablePath]:
        """The folders of a step that there is: one, but where names say more than the number.

        Raises:
            NotACheckpoint: There is none of that number.
        """
        found = [one.path for one in self.listed(root) if one.step == step and not steps.is_hidden(one.path)]
        if not found:
            raise NotACheckpoint(f"{root}: there is no step {step}\nList them: mcore-rlhf steps {root}")
        return found


OWN: Naming = Naming(
    steps.MANIFEST,
    lambda name: steps.step_of(PurePosixPath(name)),
    lambda root: steps.listed(root),
    lambda root: steps.newest_first(root),
)
"""``global_step_N``."""

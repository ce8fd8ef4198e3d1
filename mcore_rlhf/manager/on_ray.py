"""Converting on a Ray cluster: the parts of a conversion are tasks, which Ray places, and places again where a worker or a node is lost.

Nothing but the plan's options goes to the workers, and nothing but the names and lengths of files comes back: the bytes go from storage to
storage. So the cluster's nodes need this package, and see the source and the target under the same paths.

Source: Ray 2.60, ``ray.remote`` (``max_retries``, ``scheduling_strategy``), ``ray.wait``, ``ray.exceptions``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mcore_rlhf.errors import CheckpointError, StorageError, UsageError
from mcore_rlhf.execution.run import Progress
from mcore_rlhf.families.job_options import PartNumber
from mcore_rlhf.families.options import ConvertOptions
from mcore_rlhf.installation import to_install
from mcore_rlhf.storage.paths import ReadablePath

from .convert_step import StepJob, convert_part, finish_parts, prepare_step
from .subject import Subject

_WAVES = 2
"""Parts for every place where one can run: the slowest node does fewer of them."""
_MOST = 256
_RETRIES = 10
_LOOK_S = 1.0


def convert_with_ray(
    source: Subject,
    target: ReadablePath,
    options: ConvertOptions,
    address: str | None = None,
    progress: Progress | None = None,
) -> StepJob:
    """Convert a step, or a lone checkpoint, by tasks of a Ray cluster, and publish it here.

    Args:
        source, target, options: See :func:`.convert_step.convert_step`; every task takes as many CPUs as there are workers.
        address: Of the cluster; None for that of the environment (``RAY_ADDRESS``, or one on this machine), or a new local one.
        progress: Hears of every part that is done.

    Raises:
        CheckpointError: Something is wrong; nothing was published. Parts that are done stay for the next time.
        UsageError: Ray is not installed.
    """
    progress = progress or Progress()
    with _cluster(address) as ray:
        slots = max(1, int(ray.cluster_resources().get("CPU", 1)) // max(1, options.workers))
        count = min(_MOST, _WAVES * slots)
        planned = prepare_step(source, options)
        progress.stage(f"converting, {count} parts on {len(ray.nodes())} nodes", planned.nbytes)
        task = ray.remote(_part).options(
            max_retries=_RETRIES, num_cpus=options.workers, scheduling_strategy="SPREAD", name="mcore-rlhf convert"
        )
        pending = [task.remote(source, target, options, PartNumber(number + 1, count)) for number in range(count)]
        try:
            while pending:
                done, pending = ray.wait(pending, timeout=_LOOK_S)
                for one in done:
                    progress.advance(_result(ray, one))
        except BaseException:
            for one in pending:
                ray.cancel(one, force=True)
            raise
    return finish_parts(source, target, options, progress)


def _part(source: Subject, target: ReadablePath, options: ConvertOptions, part: PartNumber) -> int:
    """What runs on a worker; how many bytes it wrote."""
    files = convert_part(source, target, replace(options, resume=True), part)
    return sum(entry.nbytes for entry in files.values())


def _result(ray: Any, done: Any) -> int:
    try:
        return int(ray.get(done))
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, CheckpointError):
            raise cause from None
        raise
    except ray.exceptions.RayError as error:
        raise StorageError(
            f"Ray lost a part of the conversion, {_RETRIES} times: {str(error).splitlines()[0]}\n"
            "What is done is kept: the same command goes on there."
        ) from error


@contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """Ray, connected; one that the caller has connected already is used as it is."""
    try:
        import ray
    except ImportError:
        raise UsageError(
            f"--executor ray: Ray is not installed\nInstall it: {to_install('ray')}; or use --part and --finish."
        ) from None
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StorageError(f"cannot reach a Ray cluster at {address}: {str(error).splitlines()[0]}") from error
    try:
        yield ray
    finally:
        ray.shutdown()

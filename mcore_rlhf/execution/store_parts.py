"""Parts of a conversion whose target lies in an object store, where nothing can be renamed or linked, and no byte should move twice.

All parts send their files into the one transaction that ``--finish`` publishes, each under the key that it will have. For a target
``out``, with a transaction ``T`` whose name follows from the plan and from what is at the target now, so that hosts need not talk:

* ``out/.tx-T/…``                  the files
* ``out/.tx-T.parts/0003/…``       what part 3 has finished; whoever comes after a kill goes on from there
* ``out/.tx-T.parts/0003.json``    its ledger, put once: of two attempts the first counts

A part that is tried twice, even at once, sends the same bytes under the same keys. That an object is the one of which the ledger
speaks is told by its version (ETag); one that was put again meanwhile is read again, and held against the ledger's CRC-32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace

from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, Problems, Unsupported
from mcore_rlhf.families.job_options import PartNumber
from mcore_rlhf.families.options import ConvertOptions
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.manifest import FileEntry, Manifest, provenance
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.upload import StorePublication

from .fingerprint import Fingerprint, digest
from .journal import Done, StoreJournal
from .parts import Joined, share
from .run import Execution, Progress
from .work import PlannedTarget

_SHOWN = 8


def run_store_part(
    conversion: PlannedTarget,
    publication: StorePublication,
    part: PartNumber,
    options: ConvertOptions,
    progress: Progress,
) -> Mapping[str, FileEntry]:
    """Do one part of a conversion; see :func:`.parts.run_part`.

    Args:
        publication: Of the target; not begun.
    """
    fingerprint = _asked(conversion)
    with _shared(publication, _name(fingerprint, part.total, publication.before())) as shared:
        earlier = _ledger(shared, part, fingerprint)
        if earlier is not None:
            progress.note(f"part {part} is done already")
            return earlier.files
        notes = StoreJournal(shared, part.number)
        if options.resume and notes.read():
            progress.note(f"went on with part {part}, which a process left that was killed")
        mine, files = share(conversion.works, part), dict[str, FileEntry]()
        for work in conversion.works:
            files |= Execution(work, shared, options, progress, notes, mine).run()
        done = {name: replace(done, entry=None).as_plain() for name, done in notes.done.items()}
        report = {"part": list(part), "fingerprint": asdict(fingerprint), "done": done, "versions": notes.versions}
        text = Manifest(files, provenance=provenance(), report=report).to_json()
        if not shared.note(_ledger_name(part), text.encode(), once=True):
            progress.note(f"part {part} was done by another process meanwhile")
            first = _ledger(shared, part, fingerprint)
            return files if first is None else first.files
        return files


def finish_store_parts(
    conversion: PlannedTarget, publication: StorePublication, options: ConvertOptions, progress: Progress
) -> ReadablePath:
    """Join the parts of a conversion, and publish; see :func:`.parts.finish`.

    Args:
        publication: Of the target; not begun.
    """
    fingerprint = _asked(conversion)
    name, count = _found(publication, fingerprint)
    with _shared(publication, name) as shared:
        joined = _joined(shared, [PartNumber(number, count) for number in range(1, count + 1)], fingerprint)
        files: dict[str, FileEntry] = {}
        for work in conversion.works:
            files |= Execution(work, shared, options, progress, joined, joins=True).run()
        missing = [file.path for work in conversion.works for file in work.files if file.path not in files]
        if missing:
            raise Corrupt(f"{shared.target}: no part has written {', '.join(missing[:_SHOWN])}\nDo all parts again.")
        files |= conversion.put_known(shared, files)
        published = shared.commit(replace(conversion.manifest, files=files))
        shared.remove_notes()
        return published


def _asked(conversion: PlannedTarget) -> Fingerprint:
    assert conversion.fingerprint is not None  # who asks for parts asks for it
    return conversion.fingerprint


def _name(fingerprint: Fingerprint, count: int, before: str) -> str:
    """The transaction of all parts: another one where the target was published anew meanwhile."""
    return f"parts-{fingerprint.key}-of-{count}-{digest([before])[:8]}"


def _ledger_name(part: PartNumber) -> str:
    return f"{part.number:04d}.json"


@contextmanager
def _shared(publication: StorePublication, name: str) -> Iterator[StorePublication]:
    """The publication as that of all parts, of whose files nothing is removed by one that fails."""
    shared = replace(publication, transaction=name, goes_on=True)
    with shared:
        try:
            yield shared
        except BaseException:
            shared.leave()
            raise
        shared.leave()


def _found(publication: StorePublication, fingerprint: Fingerprint) -> tuple[str, int]:
    """The transaction that has most parts of a plan, and how many there should be.

    Raises:
        Incomplete: There are none.
        Unsupported: There are only those of another plan, or of a target that was replaced since then.
    """
    pattern = re.compile(r"parts-([0-9a-f]+)-of-(\d+)-[0-9a-f]+")
    there = {name: (found, names) for name, names in publication.noted().items() if (found := pattern.fullmatch(name))}
    before = publication.before()
    mine = {
        name: (sum(ledger.endswith(".json") for ledger in names) / int(found[2]), int(found[2]))
        for name, (found, names) in there.items()
        if name == _name(fingerprint, int(found[2]), before)
    }
    if mine:
        best = max(mine, key=mine.__getitem__)
        return best, mine[best][1]
    if there:
        raise Unsupported(
            f"{publication.target}: there are parts, and they are of another source, other options or another release, or were begun "
            f"before the target was published: {', '.join(sorted(there))}\n"
            "Give the options that the parts were given, or do all parts again; prune --dead removes what is dead after a day."
        )
    raise Incomplete(
        f"{publication.target}: no part has been done\nDo them with --part 1/N to --part N/N, and then --finish."
    )


def _joined(shared: StorePublication, parts: list[PartNumber], fingerprint: Fingerprint) -> Joined:
    """What all parts did.

    Raises:
        Incomplete: Some are missing.
        Corrupt: What some have sent is not there any more as it was; those are to be done again.
    """
    ledgers = {part: _ledger(shared, part, fingerprint) for part in parts}
    missing = [str(part) for part, ledger in ledgers.items() if ledger is None]
    if missing:
        some = ", ".join(missing[:_SHOWN]) + (f", … ({len(missing)} of {len(parts)})" if len(missing) > _SHOWN else "")
        raise Incomplete(
            f"{shared.target}: parts are not done yet: {some}\nDo them with --part, and then --finish again."
        )
    there, done, problems = shared.versions(), dict[str, Done](), Problems()
    for part, ledger in ledgers.items():
        assert ledger is not None
        for name, told in ledger.report["done"].items():
            done[name] = replace(Done.of_plain(told), entry=ledger.files.get(name))
        wrong = [name for name in ledger.files if not _is_there(shared, name, ledger, there)]
        if wrong:
            shared.remove_notes(part.number)
            problems.add(
                Corrupt,
                f"{shared.target}: what part {part} has sent is not there as it was: {', '.join(wrong[:_SHOWN])}",
                f"Its ledger was removed: do it again with --part {part}, and then --finish.",
            )
    problems.raise_if_any()
    return Joined(done, {})


def _is_there(shared: StorePublication, name: str, ledger: Manifest, there: Mapping[str, tuple[int, str]]) -> bool:
    entry = ledger.files[name]
    nbytes, version = there.get(name, (-1, ""))
    if nbytes != entry.nbytes or (version and version == ledger.report["versions"].get(name)):
        return nbytes == entry.nbytes
    crc = 0
    for piece in shared.again(name):
        crc = crc32(piece, crc)
    return crc == entry.crc32


def _ledger(shared: StorePublication, part: PartNumber, fingerprint: Fingerprint) -> Manifest | None:
    """What a part says that it did; None where it is not done.

    Raises:
        CheckpointError: It is damaged, or is another part's.
    """
    text = next(iter(shared.notes(_ledger_name(part))), None)
    if text is None:
        return None
    where = f"{shared.target}/{shared.prefix}.parts/{_ledger_name(part)}"
    try:
        found = Manifest.from_json(text, where)
    except CheckpointError as error:
        raise type(error)(f"{error}\nRemove it, and do part {part} again.") from error
    if found.report.get("part") != list(part) or found.report.get("fingerprint") != asdict(fingerprint):
        raise Corrupt(f"{where}: is not that of part {part} of this plan\nRemove it, and do the part again.")
    return found

"""Files that go along as they are: the tokenizer, how the model generates, and code that is never run here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.errors import LayoutMismatch, UsageError
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath, cannot_open

from .config import with_eos
from .files import CHAT_TEMPLATES, CONFIG, GENERATION_CONFIG, is_code, is_of_tokenizer
from .series import read_json


def files_beside(own: Mapping[str, ReadablePath], tokenizer: str | None, report: Report) -> dict[str, ReadablePath]:
    """Everything beside the weights that goes into a new folder as it is, by its name there.

    Args:
        own: Files that go along with the source.
        tokenizer: Folder whose tokenizer takes the place of the source's own, or None.
        report: Told what is replaced.

    Raises:
        UsageError: There is no such folder, or no tokenizer in it.
    """
    found = {name: path for name, path in own.items() if name not in (CONFIG, GENERATION_CONFIG)}
    if tokenizer is None:
        return found
    given = _tokenizer_files(Path(tokenizer).expanduser())
    gone = [name for name in found if is_of_tokenizer(name)]
    if gone:
        report.add(Fate.CHANGED, f"--tokenizer: its files take the place of {', '.join(gone)}")
    return {**{name: path for name, path in found.items() if name not in gone}, **given}


def _tokenizer_files(folder: ReadablePath) -> dict[str, ReadablePath]:
    """The tokenizer in a folder that the user gave, with the code that its configs name; nothing else in it is looked at."""
    paths = sorted([*folder.glob("*"), *folder.glob(f"{CHAT_TEMPLATES}/*")])
    names = [path.relative_to(folder).as_posix() for path in paths if path.is_file()]
    found = [name for name in names if is_of_tokenizer(name)]
    if not found:
        raise UsageError(
            f"{folder}: there is no tokenizer in it; looked for tokenizer.json, tokenizer.model, vocab.json, …"
        )
    code = [name for name in names if is_code(name) and name not in found] if _names_code(folder) else []
    return {name: folder / name for name in (*found, *code)}


def generation_config(
    given: str | None, beside: Iterable[str | ReadablePath | None], eos: tuple[int, ...]
) -> bytes | None:
    """The ``generation_config.json`` to write: what is given, otherwise the first there is; byte for byte if nothing changes.

    Args:
        given: The user's own: a file, or a folder with one.
        beside: Folders that may have one.
        eos: Ids of the tokens that end a text; empty to leave them.

    Raises:
        UsageError: What is given is not there.
        CheckpointError: It is no JSON.
    """
    if given is not None:
        named = Path(given).expanduser()
        named = named / GENERATION_CONFIG if named.is_dir() else named
        if not named.is_file():
            raise UsageError(f"--generation-config: {named}: no such file")
        path: ReadablePath | None = named
    else:
        folders = (Path(folder).expanduser() if isinstance(folder, str) else folder for folder in beside if folder)
        path = next((place for folder in folders if (place := folder / GENERATION_CONFIG).is_file()), None)
    own = read_json(path.parent, path.name) if path is not None else {}
    if not eos:
        return _content(path) if path is not None else None
    return (json.dumps(with_eos(own, eos), indent=2) + "\n").encode()


def check_vocabulary(files: Mapping[str, ReadablePath], rows: int | None) -> None:
    """Every id that the tokenizer makes has a row in the embedding; further rows are usual.

    Args:
        files: What :func:`files_beside` found.
        rows: Rows of the embedding, or None where there is none.

    Raises:
        LayoutMismatch: There are too few rows.
    """
    ids = [
        number
        for name in ("tokenizer.json", "vocab.json", "added_tokens.json")
        if name in files
        for number in _ids(name, _content(files[name]))
    ]
    if rows is None or not ids or max(ids) < rows:
        return
    raise LayoutMismatch(
        f"the tokenizer has ids up to {max(ids)}, so it needs {max(ids) + 1} rows, but the model's embedding has {rows}\n"
        "It is another model's tokenizer, or words were added to it after training; a smaller --vocab-size would also do this."
    )


def _ids(name: str, content: bytes) -> Iterator[int]:
    """All ids in one of the tokenizer's files.

    Source: huggingface/tokenizers, ``tokenizers/src/tokenizer/serialization.rs``: ``added_tokens`` and ``model.vocab``, which is
    a list for ``Unigram`` and a mapping otherwise.
    """
    tree = _parsed(name, content)
    if name != "tokenizer.json":
        yield from _numbers(tree.values())
        return
    model, added = tree.get("model"), tree.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list) and vocabulary:
        yield len(vocabulary) - 1
    elif isinstance(vocabulary, dict):
        yield from _numbers(vocabulary.values())
    yield from (
        _numbers(token.get("id") for token in added or () if isinstance(token, dict)) if isinstance(added, list) else ()
    )


def _parsed(name: str, content: bytes) -> dict[str, object]:
    try:
        tree = reading.parse_json(content)
    except ValueError as error:
        raise LayoutMismatch(
            f"{name}: is no JSON: {error}\nTake the tokenizer's files from where the model was published."
        ) from None
    return tree if isinstance(tree, dict) else {}


def _numbers(values: object) -> Iterator[int]:
    yield from (value for value in values if isinstance(value, int))  # type: ignore[attr-defined]


def _names_code(folder: ReadablePath) -> bool:
    """Whether a config there names code of its own, which may import more of what lies beside it: carried, never run."""
    for config in (CONFIG, "tokenizer_config.json"):
        section = (read_json(folder, config) if (folder / config).is_file() else {}).get("auto_map")
        values = section.values() if isinstance(section, dict) else ()
        texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
        if any(isinstance(text, str) and "--" not in text for text in texts):  # "--" refers to another repository
            return True
    return False


def _content(path: ReadablePath) -> bytes:
    try:
        return reading.read_bytes(path)
    except OSError as error:
        raise cannot_open(error, path) from error

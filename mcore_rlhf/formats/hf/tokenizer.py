"""Files that go along as they are: the tokenizer, how the model generates, and code that is never run here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mcore_rlhf.errors import LayoutMismatch, UsageError
from mcore_rlhf.storage.paths import cannot_open

from .config import with_eos
from .names import CONFIG, GENERATION_CONFIG, TOKENIZER_FILES
from .series import read_json

_CODE = re.compile(r"[A-Za-z_]\w*\.py")


def carried_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer's files in a folder, byte for byte, with the code that its configs name.

    Raises:
        StorageError: They cannot be read.
    """
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return {name: _content(folder / name) for name in (*names, *_code(folder))}


def tokenizer_files(folder: str) -> dict[str, bytes]:
    """The files of a folder that the user gave.

    Raises:
        UsageError: There is no such folder, or no tokenizer in it.
    """
    path = Path(folder).expanduser()
    found = carried_files(path) if path.is_dir() else {}
    if not any(name in TOKENIZER_FILES for name in found):
        raise UsageError(f"{path}: there is no tokenizer in it; looked for {', '.join(TOKENIZER_FILES[:3])}, …")
    return found


def generation_config(given: str | None, beside: Iterable[str | Path | None], eos: tuple[int, ...]) -> bytes | None:
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
        path = Path(given).expanduser()
        path = path / GENERATION_CONFIG if path.is_dir() else path
        if not path.is_file():
            raise UsageError(f"--generation-config: {path}: no such file")
    else:
        places = [Path(folder).expanduser() / GENERATION_CONFIG for folder in beside if folder is not None]
        path = next((place for place in places if place.is_file()), Path())
    own = read_json(path.parent, path.name) if path.name else {}
    if not eos:
        return _content(path) if path.name else None
    return (json.dumps(with_eos(own, eos), indent=2) + "\n").encode()


def check_vocabulary(files: Mapping[str, bytes], rows: int | None) -> None:
    """Every id that the tokenizer makes has a row in the embedding; further rows are usual.

    Args:
        files: What :func:`carried_files` found.
        rows: Rows of the embedding, or None where there is none.

    Raises:
        LayoutMismatch: There are too few rows.
    """
    ids = [
        number
        for name in ("tokenizer.json", "vocab.json", "added_tokens.json")
        if name in files
        for number in _ids(name, files[name])
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
        tree = json.loads(content)
    except ValueError as error:
        raise LayoutMismatch(
            f"{name}: is no JSON: {error}\nTake the tokenizer's files from where the model was published."
        ) from None
    return tree if isinstance(tree, dict) else {}


def _numbers(values: object) -> Iterator[int]:
    yield from (value for value in values if isinstance(value, int))  # type: ignore[attr-defined]


def _code(folder: Path) -> list[str]:
    """Files of code that ``auto_map`` names: carried, never run."""
    named: dict[str, None] = {}
    for config in (CONFIG, "tokenizer_config.json"):
        tree = read_json(folder, config) if (folder / config).is_file() else {}
        section = tree.get("auto_map")
        for value in section.values() if isinstance(section, dict) else ():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and "--" not in text:  # "--" refers to another repository
                    named[text.partition(".")[0] + ".py"] = None
    return [name for name in named if _CODE.fullmatch(name) and (folder / name).is_file()]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise cannot_open(error, path) from error

"""Nothing goes round the door: what changes a file system is done in a few modules, and what is pickled in one.

There no link is followed and every name is looked at. It is found here under whatever name it is imported, and called or only handed on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable

import pytest

from tests.contract.test_architecture import MODULES, PACKAGE, PROJECT

_CHANGES = {
    "os": {
        "rename", "replace", "renames", "remove", "unlink", "rmdir", "removedirs", "mkdir", "makedirs", "link", "symlink", "truncate",
        "mkfifo", "mknod", "chmod", "chown", "lchown", "utime", "system", "popen", "sendfile", "copy_file_range",
    },
    "shutil": {
        "copy", "copy2", "copyfile", "copyfileobj", "copymode", "copystat", "copytree", "move", "rmtree", "chown", "unpack_archive",
        "make_archive",
    },
    "tempfile": {
        "mkdtemp", "mkstemp", "NamedTemporaryFile", "SpooledTemporaryFile", "TemporaryDirectory", "TemporaryFile",
    },
    "logging": {"FileHandler"},
    "logging.handlers": {"RotatingFileHandler", "TimedRotatingFileHandler", "WatchedFileHandler"},
    "sqlite3": {"connect"},
    "numpy": {"save", "savez", "savez_compressed", "savetxt", "memmap"},
    "safetensors.torch": {"save_file", "save_model"},
    "safetensors.numpy": {"save_file"},
}  # fmt: skip
_CHANGING_METHODS = {
    "write_text", "write_bytes", "mkdir", "rmdir", "unlink", "touch", "symlink_to", "hardlink_to", "link_to", "chmod", "lchmod", "rename",
    "tofile",
}  # fmt: skip
_PICKLES = {
    "pickle": {"dump", "dumps", "load", "loads", "Pickler", "Unpickler", "_Pickler", "_Unpickler", "_dumps", "_loads"},
    "marshal": {"dump", "dumps", "load", "loads"}, "shelve": {"open"}, "torch": {"save", "load"}, "numpy": {"load", "save"},
    "torch.serialization": {"save", "load"}, "torch.jit": {"load", "save"}, "yaml": {"load", "unsafe_load", "full_load", "dump"},
    "builtins": {"eval", "exec"}, "runpy": {"run_path", "run_module"},
}  # fmt: skip
_NO_PATHS = {"chosen", "names", "self", "formatter"}
"""Have methods of such names that are about names, or a help text."""
_WRITING = {"O_CREAT", "O_WRONLY", "O_RDWR", "O_TRUNC", "O_APPEND"}
_OPENING = {"open", "ZipFile", "TarFile", "GzipFile", "BZ2File", "LZMAFile", "fdopen", "FileIO"}
_HOLD_THE_DOOR = (
    *(f"storage/{name}.py" for name in ("beneath", "fetched", "publish", "transactions", "upload", "uploaded", "urls")), "demo/",
    "cli/doctor.py", "cli/__init__.py", "cli/logs.py", "manager/prove/command.py",
)  # fmt: skip
"""The door itself; the demo, which writes logs of its own processes into a folder of its own; a probe that is gone at once; and descriptors
that the door, or the shell, has opened."""
_PICKLE = ("storage/pickling.py", "storage/unpickle.py", "manager/run/snapshot.py", "manager/run/meeting.py", "demo/")
"""The one writer and the one reader; copies of a trainer's own objects in its memory; what its ranks say to each other; and jobs of the
demo's own processes."""


def changes(source: str, table: dict[str, set[str]] = _CHANGES) -> list[str]:
    """Where a module makes, changes or removes files by itself; or, with another table, what else is not its own to do."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = _imported(nodes)
    found = []
    for node in (node for node in nodes if isinstance(node, ast.Name | ast.Attribute | ast.Call)):
        why = _named(node, imported, table)
        if isinstance(node, ast.Call) and table is _CHANGES:
            why = why or _changes(node, imported)
        if why:
            found.append(
                f"line {node.lineno}: {why} belongs in storage/: see storage/beneath.py and storage/pickling.py"
            )
    return found


def _imported(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """What each name that is imported stands for, in full."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _full(node: ast.AST, imported: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return imported.get(node.id, f"builtins.{node.id}" if node.id in _PICKLES["builtins"] else node.id)
    if isinstance(node, ast.Attribute) and (owner := _full(node.value, imported)):
        return f"{owner}.{node.attr}"
    return ""


def _named(node: ast.AST, imported: dict[str, str], table: dict[str, set[str]]) -> str:
    """What of a table a name or an attribute is, and what of ``pathlib`` is handed on."""
    full = _full(node, imported)
    owner, _, name = full.rpartition(".")
    method = owner == "pathlib.Path" and name in {*_CHANGING_METHODS, "replace"} and table is _CHANGES
    return full if name in table.get(owner, ()) or method else ""


def _changes(call: ast.Call, imported: dict[str, str]) -> str:
    func = call.func
    name = func.attr if isinstance(func, ast.Attribute) else _full(func, imported).rpartition(".")[2]
    owner = func.value.id if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) else ""
    if name in _CHANGING_METHODS and isinstance(func, ast.Attribute) and owner not in _NO_PATHS:
        return f".{name}()"
    if name == "replace" and isinstance(func, ast.Attribute) and len(call.args) == 1 and not call.keywords:
        return ".replace() of a path"  # that of a text has two arguments
    return "an open() that writes" if name in _OPENING and _writes(call) else ""


def _writes(call: ast.Call) -> bool:
    """Whether a call of ``open``, of whatever, asks for more than reading, or may."""
    flags = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(call)
        if isinstance(node, ast.Attribute | ast.Name)
    }
    given = [*call.args, *(word.value for word in call.keywords)]
    modes = [node.value for node in given if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    unknown = (
        isinstance(call.func, ast.Name)
        and call.func.id == "open"
        and len(call.args) > 1
        and not isinstance(call.args[1], ast.Constant)
    )
    return unknown or bool(flags & _WRITING and "devnull" not in flags) or any(_asks_to_write(mode) for mode in modes)


def _asks_to_write(mode: str) -> bool:
    return bool(re.fullmatch(r"[rwaxbt+]{1,3}([:|](gz|bz2|xz|\*)?)?", mode)) and bool(
        set(mode.partition(":")[0]) & set("wax+")
    )


def _beside(allowed: tuple[str, ...], look: Callable[[str], list[str]]) -> list[str]:
    """What is found in modules whose paths do not begin so."""
    others = [path for path in MODULES if not path.as_posix().startswith(allowed)]
    return [f"{path}: {one}" for path in others for one in look((PROJECT / PACKAGE / path).read_text(encoding="utf-8"))]


def test_nothing_goes_round_the_door() -> None:
    assert _beside(_HOLD_THE_DOOR, lambda source: changes(source, _CHANGES)) == []
    assert _beside(_PICKLE, lambda source: changes(source, _PICKLES)) == []


@pytest.mark.parametrize(
    "line",
    [
        "os.rename(a, b)", "shutil.rmtree(a)", "path.write_text(x)", "path.mkdir()", "open(path, 'w')", "path.open('xb')",
        "open(path, mode='a')", "os.open(path, os.O_CREAT | os.O_RDWR)", "tempfile.mkdtemp()", "path.rename(b)", "path.unlink()",
        "from shutil import rmtree\nrmtree(a)", "import os as system\nsystem.remove(a)", "list(map(os.unlink, paths))", "path.replace(b)",
        "open(path, how)", "tarfile.open(path, 'w:gz')", "zipfile.ZipFile(path, 'a')", "import numpy as np\nnp.save(a, b)",
        "from os import O_CREAT\nimport os\nos.open(a, O_CREAT)", "from pathlib import Path\nlist(map(Path.unlink, a))",
    ],
)  # fmt: skip
def test_the_door_is_watched(line: str) -> None:
    assert changes(line)
    assert not changes(
        "open(path, 'rb'); path.open(); os.open(path, os.O_RDONLY); names.rename(a); shutil.disk_usage(a); text.replace(a, b); replace(a)"
    )


@pytest.mark.parametrize(
    "line",
    [
        "import pickle\npickle.dumps(a)",
        "from torch import save\nsave(a, b)",
        "from pickle import loads as read\nread(a)",
        "eval(a)",
    ],
)
def test_pickles_are_watched(line: str) -> None:
    assert changes(line, _PICKLES)
    assert not changes("import torch\ntorch.equal(a, b)\nchunk.eval()\nyaml.safe_load(a)", _PICKLES)


def test_what_a_destination_does_with_names_is_final() -> None:
    module = ast.parse((PROJECT / PACKAGE / "storage/destination.py").read_text(encoding="utf-8"))
    final = {
        node.name
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(word, ast.Name) and word.id == "final" for word in node.decorator_list)
    }
    assert final == {"writer", "put", "again", "take", "_taking", "_put"}


_READ_THEMSELVES = (
    "__init__.py", "installation.py", "cli/jobs.py", "cli/scripts.py", "cli/doctor.py", "execution/journal.py",
    "models/meaning/declared.py", "report/page.py", "models/spec.py",
    "manager/prove/command.py", "manager/run/commit.py", "manager/run/root.py", "manager/rlhf/data_state.py", "demo/", "storage/",
)  # fmt: skip
"""What is the program's own, the system's, or a page, rules or data that the user names: no file of a checkpoint."""


def reads(source: str) -> list[str]:
    """Where a module opens files by itself, with no look at what stands there, how much it is, or where a link leads."""
    return [
        f"line {node.lineno}: reading belongs in storage/reading.py"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id == "open")
            or (
                isinstance(node.func, ast.Attribute)
                and node.func.attr in ("read_text", "read_bytes")
                and not (isinstance(node.func.value, ast.Name) and node.func.value.id == "reading")
            )
        )
    ]


def test_nothing_is_read_beside_the_door() -> None:
    assert _beside(_READ_THEMSELVES, reads) == []


@pytest.mark.parametrize("line", ["open(path)", "path.read_text()", "(folder / name).read_bytes()"])
def test_reading_is_watched(line: str) -> None:
    assert reads(line)
    assert not reads("reading.read_text(path); read_text(path); folder.open()")

"""The house keeps its shape: who may import whom, what stays pure, who prints, and how long a file may grow.

Everything is read off the source with ``ast``; only the last test imports the package.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pytest

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = "mcore_rlhf"
MAX_LINES = 500

# The rooms, lowest first, each with the rooms that it may import. Nowhere else is this written.
_PURE = {"errors", "installation", "core", "models", "layouts"}
_BELOW = _PURE | {"storage", "families"}
_OFFLINE = _BELOW | {"formats", "verify", "execution", "convert"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "installation": set(),
    "core": {"errors", "installation"},
    "models": {"errors", "core"},
    "layouts": {"errors", "core", "models"},
    "storage": {"errors", "installation", "core"},
    "families": _PURE | {"storage"},
    "formats": _BELOW,
    "verify": _BELOW | {"formats"},
    "execution": _BELOW | {"verify"},
    "convert": _BELOW | {"formats", "verify", "execution"},
    "consolidate": _OFFLINE,
    "engines": _OFFLINE,
    "manager": _OFFLINE | {"engines"},
    "report": _OFFLINE | {"manager"},
    "integrations": {"errors", "manager", "engines"},
    "demo": _OFFLINE | {"engines", "manager", "integrations"},
    "cli": _OFFLINE | {"consolidate", "engines", "manager", "report", "integrations", "demo"},
    "__init__": _OFFLINE | {"consolidate", "engines", "manager"},
    "__main__": {"cli"},
}

# Imported lazily, inside functions: the command line imports these rooms where there is no torch.
LAZY = {"torch": {"core", "consolidate"}}
# Reading, planning, converting, verifying and comparing need no torch; a merged adapter is the one thing that does.
NEEDS_TORCH = {"core/lowrank.py"}
# Packages that only these rooms may import, at top level or inside a function.
ONLY_IN = {
    "torch": {"engines", "manager", "integrations", "demo", "consolidate"},
    "megatron": {"engines", "integrations", "demo"},
    "deepspeed": {"engines", "integrations", "demo"},
    "transformer_engine": {"engines", "integrations", "demo"},
    "transformers": set(),
    "peft": set(),
    "ray": {"manager"},
    "click": {"cli"},
    "rich": {"cli"},
}
CORE_NEVER = {
    "fcntl", "glob", "io", "mmap", "os", "pathlib", "shutil", "socket", "subprocess", "tempfile",
    "torch.distributed",
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One imported module, and where.

    Args:
        module: Absolute dotted name, down to the imported name: ``from a import b`` is ``a.b``.
        line: Line number.
        lazy: Whether it stands inside a function.
    """

    module: str
    line: int
    lazy: bool

    def is_of(self, package: str) -> bool:
        """Whether the module is that package, or lies in it."""
        return f"{self.module}.".startswith(f"{package}.")


@dataclass
class Reader(ast.NodeVisitor):
    """Collects the imports and the calls of one module.

    Args:
        package: Dotted name of the package that the module's relative imports start from.
    """

    package: str
    imports: list[Import] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    depth: int = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        """Imports under ``if TYPE_CHECKING`` never happen; everything else in an ``if`` may."""
        never = ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        for child in node.orelse if never else [node.test, *node.body, *node.orelse]:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parts = [node.module] if node.module else []
        if node.level:
            above = self.package.split(".")
            parts = above[: len(above) - node.level + 1] + parts
        for alias in node.names:
            self._add(".".join([*parts, alias.name]), node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        self.calls.append((name, node.lineno))
        if name.endswith("import_module") and node.args and isinstance(node.args[0], ast.Constant):
            target = str(node.args[0].value)
            self._add(self.package + target if target.startswith(".") else target, node.lineno)
        self.generic_visit(node)

    def _add(self, module: str, line: int) -> None:
        self.imports.append(Import(module, line, lazy=self.depth > 0))


def violations(path: PurePosixPath, source: str) -> list[str]:
    """Everything in which a module breaks the rules.

    Args:
        path: Where it lies, from the package's folder: ``core/catalog.py``.
        source: Its text.
    """
    room = path.parts[0].removesuffix(".py")
    if room not in ROOMS:
        return [f"{room!r} is a new room: say in ROOMS what it may import"]
    tree = ast.parse(source)
    reader = Reader(".".join([PACKAGE, *path.parent.parts]))
    reader.visit(tree)
    found = [
        *_bad_rooms(room, reader.imports),
        *_bad_formats(path, reader.imports),
        *_bad_packages(room, path, reader.imports),
        *_bad_calls(room, reader.calls),
        *_bad_file(path, tree, source),
    ]
    return [f"{PACKAGE}/{path}{problem}" for problem in found]


def _bad_rooms(room: str, imports: list[Import]) -> Iterator[str]:
    for item in imports:
        if not item.is_of(PACKAGE):
            continue
        target = item.module.split(".")[1] if "." in item.module else "__init__"
        if target not in ROOMS[room] | {room, "__version__"}:
            yield f":{item.line}: {room} may not import {item.module}"


def _folders_in(room: str) -> set[str]:
    return {path.parent.name for path in (PROJECT / PACKAGE / room).glob("*/__init__.py")}


def _bad_formats(path: PurePosixPath, imports: list[Import]) -> Iterator[str]:
    """A format imports families, containers and layouts, and what all formats share; never another format."""
    if path.parts[0] != "formats" or len(path.parts) < 3:
        return
    mine, others = path.parts[1], _folders_in("formats")
    for item in imports:
        target = item.module.removeprefix(f"{PACKAGE}.formats.").split(".")[0]
        if item.is_of(f"{PACKAGE}.formats") and target in others - {mine}:
            yield f":{item.line}: the format {mine} may not import the format {target}: {item.module}"


def _bad_packages(room: str, path: PurePosixPath, imports: list[Import]) -> Iterator[str]:
    for item in imports:
        for package, rooms in LAZY.items():
            if item.is_of(package) and not item.lazy and room in rooms:
                yield f":{item.line}: in {room}, {item.module} is imported inside a function"
        for package, rooms in ONLY_IN.items():
            if item.is_of(package) and room not in rooms and not (package == "torch" and str(path) in NEEDS_TORCH):
                yield f":{item.line}: only {', '.join(sorted(rooms))} may import {package}"
        if room == "core" and any(item.is_of(name) for name in CORE_NEVER):
            yield f":{item.line}: core is pure and may not import {item.module}"


def _bad_calls(room: str, calls: list[tuple[str, int]]) -> Iterator[str]:
    for name, line in calls:
        if name == "print" and room != "cli":
            yield f":{line}: only cli prints"
        if room == "core" and (name == "open" or name.endswith(".open")):
            yield f":{line}: core is pure and may not open files"


def _bad_file(path: PurePosixPath, tree: ast.Module, source: str) -> Iterator[str]:
    length = len(source.splitlines())
    if length > MAX_LINES:
        yield f": {length} lines, and {MAX_LINES} is the limit"
    if path.name == "utils.py":
        yield ": name it after what it is for"
    is_private = path.name.startswith("_") and not path.name.startswith("__")
    if not is_private and ast.get_docstring(tree) is None:
        yield ": a public module starts with a docstring"


MODULES = sorted(path.relative_to(PROJECT / PACKAGE) for path in (PROJECT / PACKAGE).rglob("*.py"))


def test_there_is_something_to_check() -> None:
    assert MODULES


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_module_keeps_the_rules(path: Path) -> None:
    source = (PROJECT / PACKAGE / path).read_text(encoding="utf-8")
    problems = violations(PurePosixPath(path.as_posix()), source)
    assert not problems, "\n".join(problems)


BROKEN = [
    ("core/plan.py", "from mcore_rlhf.formats import registry", "core may not import mcore_rlhf.formats"),
    ("core/plan.py", "from ..layouts.tensor import split", "core may not import mcore_rlhf.layouts"),
    ("core/deep/plan.py", "from ...storage import zip", "core may not import mcore_rlhf.storage"),
    ("core/__init__.py", "from ..models import spec", "core may not import mcore_rlhf.models"),
    ("errors.py", "from .core import box", "errors may not import mcore_rlhf.core"),
    ("storage/zip.py", "def f():\n    import mcore_rlhf.formats.hf", "storage may not import"),
    ("formats/hf.py", "from .. import convert", "formats may not import mcore_rlhf.convert"),
    ("formats/hf.py", "from .. import open_catalog", "formats may not import mcore_rlhf.open_catalog"),
    ("formats/hf.py", "import mcore_rlhf", "formats may not import mcore_rlhf"),
    ("manager/save.py", "from ..cli import app", "manager may not import mcore_rlhf.cli"),
    ("formats/hf.py", "importlib.import_module('mcore_rlhf.cli')", "formats may not import mcore_rlhf.cli"),
    ("families/source.py", "from ..formats.base import Target", "families may not import mcore_rlhf.formats"),
    ("formats/hf/reader.py", "from ..dcp import keys", "the format hf may not import the format dcp"),
    ("formats/dcp/reader.py", "def f():\n    import mcore_rlhf.formats.hf.files", "may not import the format hf"),
    ("core/lowrank.py", "import torch", "torch is imported inside"),
    ("consolidate.py", "try:\n    from torch import nn\nexcept ImportError:\n    pass", "torch.nn is imported inside a function"),
    ("models/llama.py", "def f():\n    from torch.nn import Module", "may import torch"),
    ("storage/pickling.py", "def f():\n    import torch", "may import torch"),
    ("formats/hf/reader.py", "def f():\n    import torch", "may import torch"),
    ("cli/main.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "may import torch"),
    ("core/lowrank.py", "def f():\n    from torch import distributed", "core is pure"),
    ("core/execute.py", "from pathlib import Path", "may not import pathlib.Path"),
    ("core/execute.py", "def f(name):\n    return open(name)", "may not open files"),
    ("formats/megatron.py", "def f():\n    import megatron.core", "may import megatron"),
    ("demo/report.py", "import rich.table", "only cli may import rich"),
    ("demo/report.py", "print('hello')", "only cli prints"),
    ("layouts/utils.py", "", "name it after what it is for"),
    ("layouts/flat.py", "\n" * (MAX_LINES - 1) + "pass", f"{MAX_LINES} is the limit"),
    ("attic/old.py", "", "new room"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "code", "expected"), BROKEN)
def test_a_broken_rule_is_found(path: str, code: str, expected: str) -> None:
    (problem,) = violations(PurePosixPath(path), f'"""A module."""\n{code}')
    assert expected in problem


def test_a_missing_docstring_is_found() -> None:
    (problem,) = violations(PurePosixPath("layouts/flat.py"), "x = 1")
    assert "starts with a docstring" in problem


ALLOWED = [
    ("core/plan.py", "from . import box\nfrom .. import errors\nfrom ..errors import Problems"),
    ("core/plan.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch, pathlib"),
    ("core/lowrank.py", "def f():\n    import torch"),
    ("convert.py", "from . import __version__\nfrom .formats.registry import detect"),
    (
        "formats/hf/reader.py",
        "from ..base import Target\nfrom .names import STEM\nfrom mcore_rlhf.families import crossing",
    ),
    ("engines/megatron.py", "from megatron.core import parallel_state"),
    ("cli/main.py", "import click\nprint('hello')"),
    ("layouts/_table.py", "x = 1"),
]


@pytest.mark.parametrize(("path", "code"), ALLOWED)
def test_what_is_allowed_passes(path: str, code: str) -> None:
    assert violations(PurePosixPath(path), f'"""A module."""\n{code}\n') == []


def _graph() -> dict[str, set[str]]:
    """Which module imports which, wherever the import stands, even where it is for types alone."""
    names = {".".join([PACKAGE, *path.with_suffix("").parts]).removesuffix(".__init__"): path for path in MODULES}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        reader = Reader(".".join([PACKAGE, *PurePosixPath(path.as_posix()).parent.parts]))
        for node in ast.walk(ast.parse((PROJECT / PACKAGE / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                reader.visit(node)
        wanted = {item.module for item in reader.imports} | {item.module.rpartition(".")[0] for item in reader.imports}
        graph[name] = (wanted & names.keys()) - {name, PACKAGE}
    return graph


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph, done = _graph(), set[str]()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " → ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                if not name.startswith(f"{other}."):  # a package's own names, from a module in it
                    visit(other, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_no_class_name_stands_for_three_things() -> None:
    found: dict[str, list[str]] = {}
    for path in MODULES:
        for name in re.findall(
            r"^ *class (\w+)\b", (PROJECT / PACKAGE / path).read_text(encoding="utf-8"), re.MULTILINE
        ):
            found.setdefault(name, []).append(path.as_posix())
    assert "Publication" in found
    assert {name: where for name, where in found.items() if len(where) > 2} == {}


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, mcore_rlhf.cli; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr


# What changes a file system is done in storage/ alone, where no link is followed and every name is looked at: nothing goes round the door.
_CHANGES = {
    "os": {
        "rename", "replace", "renames", "remove", "unlink", "rmdir", "removedirs", "mkdir", "makedirs", "link", "symlink", "truncate",
        "mkfifo", "mknod", "chmod", "chown",
    },
    "shutil": {"copy", "copy2", "copyfile", "copyfileobj", "copytree", "move", "rmtree", "chown", "unpack_archive"},
    "tempfile": {"mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile"},
}  # fmt: skip
_CHANGING_METHODS = {
    "write_text", "write_bytes", "mkdir", "rmdir", "unlink", "touch", "symlink_to", "hardlink_to", "link_to", "chmod", "rename",
}  # fmt: skip
_NO_PATHS = {"chosen", "names", "self", "formatter"}
"""Have methods of such names that are about names, or a help text."""
_WRITING = {"O_CREAT", "O_WRONLY", "O_RDWR", "O_TRUNC", "O_APPEND"}
_ROUND_THE_DOOR = ("storage/", "demo/", "cli/doctor.py")
"""The room itself; the demo, which writes logs of its own processes into a folder of its own; and a probe that is gone at once."""


def changes(source: str) -> list[str]:
    """Calls in a module that make, change or remove files by themselves."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (why := _changes(node)):
            found.append(f"line {node.lineno}: {why} belongs in storage/: see storage/beneath.py")
    return found


def _changes(call: ast.Call) -> str:
    func = call.func
    name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    owner = func.value.id if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) else ""
    if name in _CHANGES.get(owner, ()):
        return f"{owner}.{name}"
    if name in _CHANGING_METHODS and isinstance(func, ast.Attribute) and owner not in _NO_PATHS:
        return f".{name}()"
    return "an open() that writes" if name == "open" and _writes(call) else ""


def _writes(call: ast.Call) -> bool:
    """Whether a call of ``open``, of whatever, asks for more than reading."""
    flags = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
    given = [*call.args, *(word.value for word in call.keywords)]
    modes = [node.value for node in given if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return bool(flags & _WRITING and "devnull" not in flags) or any(
        len(mode) < 4 and set(mode) & set("wax+") for mode in modes
    )


@pytest.mark.parametrize("path", [path for path in MODULES if not path.as_posix().startswith(_ROUND_THE_DOOR)], ids=str)
def test_nothing_goes_round_the_door(path: Path) -> None:
    assert changes((PROJECT / PACKAGE / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "os.rename(a, b)", "shutil.rmtree(a)", "path.write_text(x)", "path.mkdir()", "open(path, 'w')", "path.open('xb')",
        "open(path, mode='a')", "os.open(path, os.O_CREAT | os.O_RDWR)", "tempfile.mkdtemp()", "path.rename(b)", "path.unlink()",
    ],
)  # fmt: skip
def test_the_door_is_watched(line: str) -> None:
    assert changes(line)
    assert not changes(
        "open(path, 'rb'); path.open(); os.open(path, os.O_RDONLY); names.rename(a); shutil.disk_usage(a)"
    )


def test_what_a_destination_does_with_names_is_final() -> None:
    module = ast.parse((PROJECT / PACKAGE / "storage/destination.py").read_text(encoding="utf-8"))
    final = {
        node.name
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(word, ast.Name) and word.id == "final" for word in node.decorator_list)
    }
    assert final == {"writer", "put", "again", "take", "_taking", "_put"}

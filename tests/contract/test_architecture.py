"""The house keeps its shape: who may import whom, what stays pure, who prints, and how long a file may grow.

Everything is read off the source with ``ast``; only the last test imports the package.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pytest

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = "mcore_rlhf"
MAX_LINES = 500

# The rooms, lowest first, each with the rooms that it may import. Nowhere else is this written.
_PURE = {"errors", "installation", "suggestions", "core", "models", "layouts"}
_BELOW = _PURE | {"storage", "families", "trainers"}
_OFFLINE = _BELOW | {"formats", "verify", "execution", "convert"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "installation": set(),
    "suggestions": set(),
    "core": {"errors", "installation", "suggestions"},
    "models": {"errors", "core"},
    "layouts": {"errors", "core", "models"},
    "storage": {"errors", "installation", "suggestions", "core"},
    "families": _PURE | {"storage"},
    "trainers": {"errors", "core", "storage", "families"},
    "formats": _BELOW,
    "verify": _BELOW | {"formats"},
    "execution": _BELOW | {"verify"},
    "convert": _BELOW | {"formats", "verify", "execution"},
    "consolidate": _OFFLINE,
    "weights": _OFFLINE | {"consolidate"},
    "dcp": _OFFLINE | {"consolidate", "weights"},
    "engines": _OFFLINE,
    "manager": _OFFLINE | {"engines"},
    "report": _OFFLINE | {"manager"},
    "integrations": {"errors", "families", "weights", "manager", "engines"},
    "demo": _OFFLINE | {"engines", "manager", "integrations"},
    "cli": _OFFLINE | {"consolidate", "engines", "manager", "report", "integrations", "demo"},
    "__init__": _OFFLINE | {"consolidate", "weights", "engines", "manager"},
    "__main__": {"cli"},
}

# Imported lazily, inside functions: the command line imports these rooms where there is no torch.
LAZY = {"torch": {"core", "consolidate", "weights"}}
# Reading, planning, converting, verifying and comparing need no torch; a merged adapter is the one thing that does.
NEEDS_TORCH = {"core/lowrank.py"}
# Packages that only these rooms may import, at top level or inside a function.
ONLY_IN = {
    "torch": {"engines", "manager", "integrations", "demo", "consolidate", "weights", "dcp"},
    "megatron": {"engines", "integrations", "demo"},
    "deepspeed": {"engines", "integrations", "demo"},
    "transformer_engine": {"engines", "integrations", "demo"},
    "transformers": set(),
    "peft": set(),
    "ray": {"manager", "integrations"},
    "torch_checkpointing": {"dcp"},
    "click": {"cli"},
    "rich": {"cli"},
}
CORE_NEVER = {
    "fcntl", "glob", "io", "mmap", "os", "pathlib", "shutil", "socket", "subprocess", "tempfile",
    "torch.distributed",
}  # fmt: skip


_DRAWS = re.compile(
    r"random\.(?!getstate|setstate|Random$|SystemRandom$)\w+|(np|numpy)\.random\.(?!get_state|set_state|RandomState$|default_rng$)\w+"
    r"|torch\.(rand|randn|randint|randperm|normal|bernoulli|multinomial|manual_seed|seed)"
)
"""Calls that change a random state of the process. A draw of ours would change what training draws next."""


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
        if room != "demo" and _DRAWS.fullmatch(name):
            yield f":{line}: the process' random states are training's; draw from a generator of your own, not {name}"


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


def test_modules_keep_the_rules() -> None:
    sources = {path: (PROJECT / PACKAGE / path).read_text(encoding="utf-8") for path in MODULES}
    problems = [line for path, text in sources.items() for line in violations(PurePosixPath(path.as_posix()), text)]
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
    ("storage/requests.py", "pause = random.uniform(0.5, 1)", "random states are training's"),
    ("manager/watch.py", "np.random.shuffle(steps)", "random states are training's"),
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


def test_a_class_name_stands_for_one_thing() -> None:
    """Whoever looks for the name of a class finds that class; names with an underscore are their module's own."""
    found: dict[str, list[str]] = {}
    for path in MODULES:
        for name in re.findall(
            r"^ *class ([A-Z]\w*)\b", (PROJECT / PACKAGE / path).read_text(encoding="utf-8"), re.MULTILINE
        ):
            found.setdefault(name, []).append(path.as_posix())
    assert "Publication" in found
    of_trainers = found.pop("CommittedCheckpointManager")  # each stands in for its trainer's CheckpointManager
    assert all(path.startswith("integrations/") for path in of_trainers)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def given_twice(source: str) -> list[str]:
    """Names that a module gives to two things, of which all of it means the second."""
    counted: Counter[str] = Counter()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            counted[node.name] += 1
        elif isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            counted.update(
                name.id
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            )
    return [name for name, times in counted.items() if times > 1]


def test_no_name_of_a_module_stands_for_two_things() -> None:
    assert {
        str(path): found for path in MODULES if (found := given_twice((PROJECT / PACKAGE / path).read_text()))
    } == {}
    assert given_twice("D: int\nD = 1\nA = 1\nB: int = 2\n(A, C) = 3, 4\ndef B(): ...") == ["A", "B"]


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, mcore_rlhf.cli; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr


# What is true of a format stands in its folder, as an attribute: nobody else asks for one by its name. These words are other things.
_OTHER_THINGS = {
    "suggestions.py": "formats, by what others call them",
    "formats/known.py": "the names of all, each in its line, and nothing that asks for one",
    "storage/urls.py": "a scheme",
    "families/megatron/state.py": "a family of names",
    "families/options.py": "what is written where nobody says what",
    "weights.py": "a spelling of names",
    "cli/doctor.py": "packages",
    "cli/tools/reshape_megatron.py": "words of Megatron's own tool",
    "demo/command.py": "a package",
    "families/run_folders.py": "a folder of a trainer's",
    "trainers/loaders/transformers.py": "a key of its configuration",
    "demo/train.py": "a package",
    "demo/rl/options.py": "a framework that trains",
    "manager/config/sections.py": "frameworks that train",
    "integrations/deepspeed_checkpoints.py": "a package, and who saves",
    "integrations/megatron_arguments.py": "who loads",
    "integrations/megatron_lm.py": "who loads",
    **{f"trainers/loaders/{name}.py": "a backend of its configuration" for name in ("rlinf", "skyrl", "verl")},
    **{f"trainers/loaders/{name}.py": "what the trainer is called" for name in ("deepspeed", "megatron")},
    **dict.fromkeys(
        map("trainers/{}.py".format, (
            "accelerate", "areal", "megatron", "ms_swift", "nemo_rl", "open_instruct", "openrlhf", "prime_rl", "rlinf", "roll", "skyrl",
            "slime", "torchtitan", "transformers", "verl",
        )),
        "what the trainer is given",
    ),
}  # fmt: skip


def formats_by_name(source: str) -> list[str]:
    """Where a module has the name of a format as a text of its own; texts with more in them are for people."""
    names = _folders_in("formats") - {"megatron_dist"} | {"megatron-dist"}
    if not any(f"{quote}{name}{quote}" in source for name in names for quote in "\"'"):
        return []
    words = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and node.value in names]
    return [
        f"line {node.lineno}: {node.value!r}: ask the format for what is true of it, or take its FORMAT.name"
        for node in words
    ]


def test_no_format_is_asked_for_by_its_name() -> None:
    names = [path.as_posix() for path in MODULES]
    others = [one for one in names if not (one.startswith("formats/") and one.count("/") > 1)]
    texts = {name: (PROJECT / PACKAGE / name).read_text(encoding="utf-8") for name in others}
    found = {name: lines for name, text in texts.items() if (lines := formats_by_name(text))}
    assert found.keys() == _OTHER_THINGS.keys(), found


def test_a_formats_name_is_found() -> None:
    assert len(formats_by_name("a = to == 'hf' or to in ('dcp', 'megatron-dist')")) == 3
    assert not formats_by_name("'Give --to hf.'; to.name; FORMAT.name; 'safetensors'")

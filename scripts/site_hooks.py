"""What MkDocs does not do by itself: links that lead out of docs/, anchors and lists as code hosts have them, the public names.

A page of docs/ may link to any file of the repository, as it is read there. The site has such a file as a page of its own,
below ``repository/``; so no link needs to know where the repository is published.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PROJECT = Path(__file__).resolve().parents[1]
_OUTSIDE = "repository"
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):<code>~?\.*(?:[\w.]*\.)?(\w+)</code>")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".sbatch": "bash"}


def on_config(config: Any) -> Any:
    """Anchors of headings as code hosts make them: pages are read there, too."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda text, separator: re.sub(
        r"[^\w\- ]", "", text.strip().lower()
    ).replace(" ", separator)
    return config


def on_files(files: Files, config: Any) -> Files:
    """A page for every file outside docs/ that a page links to, and for those that these link to in turn."""
    known = {PROJECT / "docs" / file.src_uri: file.src_uri for file in files if file.is_documentation_page()}
    open_pages = list(known)
    while open_pages:
        page = open_pages.pop()
        for target in _targets(page):
            if target not in known and target.exists() and not target.is_relative_to(PROJECT / "docs"):
                known[target] = _uri(target)
                files.append(File.generated(config, known[target], content=_page(target)))
                if target.suffix == ".md":
                    open_pages.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between docs/ and the rest, as they are on the site; the public names, each with its docstring."""
    if page.file.src_uri.startswith(_OUTSIDE):
        at = PROJECT / page.file.src_uri.removeprefix(f"{_OUTSIDE}/")
    else:
        at = PROJECT / "docs" / page.file.src_uri
    markdown = markdown.replace(
        "<!-- public names -->", "\n\n".join(f"::: mcore_rlhf.{name}" for name in public_names())
    )
    parts = _FENCED.split(markdown)
    parts[::2] = [
        _LINK.sub(lambda found: _relinked(found, at, page.file.src_uri), _spaced(part)) for part in parts[::2]
    ]
    return "".join(parts)


def _spaced(text: str) -> str:
    """Python-Markdown wants a line between a paragraph and a list or table, and four blanks in front of what a list holds."""
    indented = re.sub(r"^(?: {2})+(?=[|*-] ?)", lambda found: found[0] * 2, text, flags=re.MULTILINE)
    return re.sub(r"^(?![*-] |[|#>]|\d+\. )(\S.*)\n(?=\* |- |\d+\. |\|)", r"\1\n\n", indented, flags=re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings mark names as Sphinx does."""
    return _ROLE.sub(r"<code>\1</code>", html)


def public_names() -> list[str]:
    """What ``mcore_rlhf`` exports, in its order, without importing it."""
    stub = (PROJECT / "mcore_rlhf" / "__init__.pyi").read_text(encoding="utf-8")
    return re.findall(r"^from \S+ import \w+ as (\w+)$", stub, re.MULTILINE)


def _targets(page: Path) -> Iterator[Path]:
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    for found in _LINK.finditer(text):
        if "://" not in found[2]:
            yield Path(os.path.normpath(page.parent / found[2]))


def _uri(target: Path) -> str:
    """Where the page of a file or folder outside docs/ lies on the site."""
    name = target.relative_to(PROJECT).as_posix()
    return f"{_OUTSIDE}/{name}" if target.suffix == ".md" else f"{_OUTSIDE}/{name}.md"


def _page(target: Path) -> str:
    name = target.relative_to(PROJECT).as_posix()
    if target.suffix == ".md":
        return target.read_text(encoding="utf-8")
    if target.is_dir():
        names = sorted(
            path.name + "/" * path.is_dir() for path in target.iterdir() if not path.name.startswith(("__", "."))
        )
        return f"# {name}/\n\n" + "".join(f"* `{entry}`\n" for entry in names)
    return f"# {name}\n\n````{_LANGUAGES.get(target.suffix, 'text')}\n{target.read_text(encoding='utf-8')}\n````\n"


def _relinked(found: re.Match[str], at: Path, uri: str) -> str:
    link, anchor = found[2], found[3] or ""
    target = Path(os.path.normpath(at.parent / link))
    if "://" in link or not target.is_relative_to(PROJECT) or not target.exists():
        return found[0]
    docs = PROJECT / "docs"
    goal = target.relative_to(docs).as_posix() if target.is_relative_to(docs) else _uri(target)
    return f"{found[1]}{posixpath.relpath(goal, posixpath.dirname(uri) or '.')}{anchor})"

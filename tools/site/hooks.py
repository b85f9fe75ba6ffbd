"""What mkdocs.yml needs beyond docs/: the pages at the root of the repository, benchmark tables, and an API reference.

Pages are written for the repository, so links may leave docs/. Those to pages of the site are rewritten; those to other files
become plain text until the repository has an address.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any, Final

from griffe import Class, Extension, Function, Module
from mkdocs.structure.files import File, Files

from tools.docs.docstrings import markdown

ADDRESS: Final = ""
"""Where the repository shows a file, such as ``https://.../blob/main``. Empty: links to files become plain text."""
ROOT: Final = Path(__file__).parents[2]
NAMED: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
API: Final = {
    "ops": ("onepass", "Functions on tensors."),
    "nn": ("onepass.nn", ""),
    "models": ("onepass.models", ""),
    "engines": ("onepass.engines", ""),
    "dist": ("onepass.dist", ""),
    "prologues": ("onepass.prologues", ""),
}
"""A page for each of these packages, with the names of its ``__all__``."""
CELL: Final = re.compile(r"<td\b.*?</td>|<h\d [^>]*doc-heading.*?</h\d>", re.DOTALL)
NAME: Final = re.compile(r"(<code>|doc-object-name[^>]*>)([^<]*)")
LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
EXAMPLE: Final = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)
PICTURE: Final = re.compile(
    r'<picture>.*?srcset="(.*?)".*?alt="(.*?)" src="(.*?)" width="(\d+)".*?</picture>', re.DOTALL
)


def outside() -> dict[str, str]:
    """Files beyond docs/ that the site has: their paths in the repository, and on the site."""
    tables = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "benchmarks").rglob("*.md")))
    charts = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "benchmarks").glob("*/*.svg")))
    # mkdocs would take a README.md for the page of its section and leave it out of the navigation
    return NAMED | {path: path.replace("README", "all") for path in (*tables, *charts)}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures that are not in docs/."""
    for source, target in outside().items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for name, (package, words) in API.items():
        if text := reference(package, words):
            files.append(File.generated(config, f"api/{name}.md", content=text))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page. The landing page has all of the width."""
    found = {site: source for source, site in outside().items()}
    here = page.file.src_uri
    if here == NAMED["README.md"]:
        page.meta["hide"] = ["navigation", "toc"]
    return converted(text, found.get(here, f"docs/{here}"), here)


def on_page_content(html: str, **_: Any) -> str:
    """Let names in tables and headings of the reference break between their words, for narrow screens."""

    def broken(name: re.Match[str]) -> str:
        return name[1] + re.sub(r"([_/]|\.(?=[A-Za-z_]))(?=.)", r"\1<wbr>", name[2])

    return CELL.sub(lambda cell: NAME.sub(broken, cell[0]), html)


def converted(text: str, source: str, site: str) -> str:
    """The text of a file of the repository, as the page ``site``. Code is left as it is."""
    text = PICTURE.sub(r"![\2](\3#only-light){ width=\4 }\n![\2](\1#only-dark){ width=\4 }", text)
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [LINK.sub(lambda match: link(match, source, site), escaped(part)) for part in parts[::2]]
    return "".join(parts)


def escaped(text: str) -> str:
    """Text in which ``f(a[, b][, c])`` is no link, as on GitHub. Code in backticks is left as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [part.replace("][", "]\\[") for part in parts[::2]]
    return "".join(parts)


def link(match: re.Match[str], source: str, site: str) -> str:
    """One link, relative to a page of the site."""
    picture, words, target = match.groups()
    if re.match(r"[a-z]+:|#", target):
        return match[0]
    path, mark, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if path.startswith("docs/") and (ROOT / path).is_file():
        path = path.removeprefix("docs/")
    elif path in outside():
        path = outside()[path]
    elif ADDRESS:
        return f"{picture}[{words}]({ADDRESS}/{path}{mark}{anchor})"
    else:
        return f'<span title="{path}">{words}</span>'
    return f"{picture}[{words}]({posixpath.relpath(path, posixpath.dirname(site) or '.')}{mark}{anchor})"


def reference(package: str, words: str) -> str:
    """A page of the API reference: the package's docstring, then each public name; empty if there is no such package."""
    file = ROOT / "src" / package.replace(".", "/") / "__init__.py"
    if not file.exists():
        return ""
    tree = ast.parse(file.read_text())
    pages = {named for named, _ in API.values()}
    names = [name for name in public(tree) if f"{package}.{name}" not in pages]
    head = f"# {package}\n\n{words or markdown(ast.get_docstring(tree) or '')}\n"
    return "\n".join((head, *(f"::: {package}.{name}\n" for name in sorted(names, key=str.lower))))


def public(tree: ast.Module) -> list[str]:
    """The names of ``__all__``, which a module assigns once and may extend."""
    names: list[str] = []
    for node in tree.body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AugAssign)
            else None
        )
        if isinstance(target, ast.Name) and target.id == "__all__" and isinstance(node, ast.Assign | ast.AugAssign):
            names += ast.literal_eval(node.value)
    return [name for name in names if not name.startswith("_")]


class Docstrings(Extension):  # type: ignore[misc]
    """Convert docstrings to Markdown before mkdocstrings reads them."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Convert that of a function."""
        convert(func)

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Convert that of a class."""
        convert(cls)

    def on_module(self, *, mod: Module, **_: Any) -> None:
        """Convert that of a module."""
        convert(mod)


def convert(member: Any) -> None:
    """Convert a docstring in place, and its examples to code."""
    if member.docstring is not None:
        text = re.sub(EXAMPLE, r"```pycon\n\g<0>\n```", markdown(member.docstring.value))
        parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.DOTALL | re.MULTILINE)
        parts[::2] = [escaped(part) for part in parts[::2]]
        member.docstring.value = "".join(parts)

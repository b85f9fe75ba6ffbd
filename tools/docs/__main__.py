"""``python -m tools.docs``: write the generated pages."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from . import (
    architectures_page,
    dist_page,
    invariance_page,
    invariance_picture,
    models_page,
    ops_page,
    peers_page,
    tokens_picture,
)

PAGES: Final = (
    ops_page,
    dist_page,
    architectures_page,
    models_page,
    invariance_page,
    invariance_picture,
    *peers_page.PAGES,
    *tokens_picture.PAGES,
)


def write(path: Path, text: str) -> bool:
    """Write the file if its content would change. Return whether it did."""
    if path.exists() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return True


def main(arguments: list[str] | None = None) -> None:
    """Write all pages and report which changed."""
    names = ", ".join(map(str, (page.PATH for page in PAGES)))
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=f"Write {names}.")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository (default: the current directory)")
    root = parser.parse_args(arguments).root
    for page in PAGES:
        changed = write(root / page.PATH, page.render())
        print(f"{page.PATH} {'written' if changed else 'is up to date'}")


if __name__ == "__main__":
    main()

"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; it becomes ``path`` when all is written."""
    temporary = path.with_name(path.name + ".tmp")
    yield temporary
    os.replace(temporary, path)


def write_atomic(path: Path, text: str) -> None:
    """Writes beside the file and renames: a reader sees the old content or the new, never half."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

"""Options as people write them, and files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from autoshard.errors import RequestError


def given(**options: Any) -> dict[str, Any]:
    """The options that were given: those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def writable(path: Path | None) -> None:
    """Check, before anything long is begun, that ``path`` can be written.

    Raises:
        RequestError: its folder does not exist or must not be written to, or it is a folder.
    """
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise RequestError(f"--out {path} is a folder; name a file in it: {path / 'plan.json'}")
    if not folder.is_dir():
        raise RequestError(f"--out {path}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise RequestError(f"--out {path}: folder {folder} must not be written to; name another")


def write(path: Path, text: str) -> None:
    """Write a file whole, or leave what was there; a device or a pipe is written to as it is.

    Raises:
        RequestError: it cannot be written.
    """
    text = text if text.endswith("\n") else text + "\n"
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; name another file") from error

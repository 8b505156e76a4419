"""Texts that are kept in files and compared. AUTOSHARD_UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import os
from pathlib import Path


def check(path: Path, text: str) -> None:
    if os.environ.get("AUTOSHARD_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text

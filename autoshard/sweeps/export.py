"""Rows as CSV, Parquet and JSON. The columns are those of :data:`autoshard.sweeps.rows.COLUMNS`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from autoshard.errors import RequestError
from autoshard.sweeps.rows import COLUMNS, Row

FORMATS = (".csv", ".parquet", ".json")


def check_format(path: str | Path) -> str:
    """The ending of a file that rows can be written to.

    Raises:
        RequestError: another ending, or Parquet without pyarrow.
    """
    ending = Path(path).suffix.lower()
    if ending not in FORMATS:
        raise RequestError(f"{path}: rows are written as {', '.join(FORMATS)}; name such a file")
    if ending == ".parquet":
        _pyarrow()
    return ending


def write_rows(rows: Sequence[Row], path: str | Path) -> None:
    """Write rows to a file; its ending says how.

    Raises:
        RequestError: another ending than ``FORMATS``, or the file cannot be written.
    """
    ending = check_format(path)
    if ending == ".csv":
        content = csv_text(rows).encode()
    elif ending == ".json":
        content = json.dumps([r.to_json() for r in rows], indent=1).encode() + b"\n"
    else:
        content = _parquet(rows)
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; name another file") from error


def csv_text(rows: Sequence[Row]) -> str:
    """A line of column names and a line a row; what is None is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(r.to_json() for r in rows)
    return out.getvalue()


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise RequestError(
            "Parquet needs pyarrow: pip install 'autoshard[parquet]', or write .csv or .json"
        ) from error
    return pyarrow


def _parquet(rows: Sequence[Row]) -> bytes:
    arrow = _pyarrow()
    types = {bool: arrow.bool_(), int: arrow.int64(), float: arrow.float64()}
    hints = get_type_hints(Row)

    def of(column: str) -> Any:
        inner = getattr(hints[column], "__args__", (hints[column],))
        return next((types[t] for t in inner if t in types), arrow.string())

    schema = arrow.schema([(c, of(c)) for c in COLUMNS])
    table = arrow.Table.from_pylist([r.to_json() for r in rows], schema=schema)
    sink = arrow.BufferOutputStream()
    arrow.parquet.write_table(table, sink)
    return bytes(sink.getvalue())

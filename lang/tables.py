"""Rows of dicts with equal keys, as lines of text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns in line, numbers to the right; "" for no rows."""
    if not rows:
        return ""
    columns = []
    for key in rows[0]:
        cells = [key, *(_cell(row[key]) for row in rows)]
        width = max(map(len, cells))
        to_the_right = any(isinstance(row[key], int) for row in rows)
        columns.append([cell.rjust(width) if to_the_right else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def as_html(rows: Sequence[Mapping[str, Any]], *, above: str, below: str) -> str:
    """A plain table for notebooks, between two paragraphs."""
    head = "".join(f"<th>{html.escape(key)}</th>" for key in (rows[0] if rows else ()))
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return _paragraph(above) + table + _paragraph(below)


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>".replace("\n", "<br>") if text else ""


def _cell(value: Any) -> str:
    return "" if value is None else str(value)

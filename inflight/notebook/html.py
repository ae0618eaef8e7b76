"""HTML of results for the `_repr_html_` that Jupyter calls.

Text of a model or another tenant is escaped, because a notebook runs scripts in HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_ANSWER = '<div style="white-space: pre-wrap">{}</div>'
_NOTE = "<small>{}</small>"


def answer(texts: Sequence[str], note: str) -> str:
    """Returns the text of each choice with its line breaks, and a line in small print."""
    return "".join(_ANSWER.format(escape(text)) for text in texts) + _NOTE.format(escape(note))


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """Returns a table and a line in small print."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    small = _NOTE.format(escape(note)) if note else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{small}"

"""A page: one HTML file with its style and script inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files


def page(title: str, body: Iterable[str]) -> str:
    """A page that needs no network, no server and no other file.

    Args:
        title: Its title, as plain text.
        body: HTML, part by part.
    """
    folder = files("lightning_tspipe.pages")
    style, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.css", "timeline.js")
    )
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # An icon of its own, else browsers ask a server for one.
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            *body,
            f"<script>\n{script}</script>\n</body>\n</html>\n",
        ]
    )


def table(rows: Sequence[Sequence[str]], *, caption: str = "") -> str:
    """A table whose first row and first column are its headings.

    Args:
        rows: Cells, as plain text.
        caption: A line above it, as plain text.
    """
    head, *body = rows
    lines = ["<table>", f"<caption>{escape(caption)}</caption>" if caption else ""]
    lines.append("<thead><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head))
    lines.append("</tr></thead><tbody>")
    for first, *others in body:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return "\n".join([*filter(None, lines), "</tbody></table>"])

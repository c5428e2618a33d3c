"""Matplotlib's drawings as elements of a page: inline SVG whose text stays text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

from predmask.analysis.report.markup import Element
from predmask.plotting import RC

_SETTINGS: dict[Any, Any] = {
    **RC,
    "svg.fonttype": "none",
    # As wide as each other, so that what was measured here fits there.
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
}
_WIDTH = 4.0
"""Inches: a phone's column, on which 9 points are easy to read."""


@contextmanager
def drawing(height: float) -> Iterator[tuple[Any, Any]]:
    """An empty figure of one column's width, and its axes; to be drawn on, and written, inside the block."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        yield figure, figure.subplots()


def to_svg(figure: Any, name: str) -> Element:
    """The figure as an element of the page: its ids begin with the figure's name, its size is the page's matter."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(buffer.getvalue())  # noqa: S314  of our own making
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    names = {node.attrib["id"]: f"{name}-{count}" for count, node in enumerate(root.iter()) if "id" in node.attrib}
    used = set(re.findall(r"#([\w.-]+)", " ".join(value for node in root.iter() for value in node.attrib.values())))
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
        attributes = {key.rpartition("}")[2]: value for key, value in node.attrib.items()}
        if attributes.get("id") not in used:
            attributes.pop("id", None)
        else:
            attributes["id"] = names[attributes["id"]]
        node.attrib = {key: _renamed(value, names) for key, value in attributes.items()}
        node.tail = None
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    return root


def _renamed(value: str, names: Mapping[str, str]) -> str:
    """References to ids by their new names."""
    if value.startswith("#") and value[1:] in names:
        return f"#{names[value[1:]]}"
    return re.sub(r"url\(#([\w.-]+)\)", lambda found: f"url(#{names[found[1]]})", value)

"""HTML as a tree of elements: text goes in as text.

Characters that would act instead of being seen are spelled out (`visible`); the others are escaped where the tree is
written.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

from predmask.analysis.text import visible

Element = ElementTree.Element


def element(tag: str, *content: Element | str | None, **attributes: str) -> Element:
    """An element with text and elements in it (None: nothing); `class_` is class, and `aria_label` is aria-label."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): visible(value) for name, value in attributes.items()})
    last: Element | None = None
    for part in content:
        if isinstance(part, str):
            if last is None:
                made.text = (made.text or "") + visible(part)
            else:
                last.tail = (last.tail or "") + visible(part)
        elif part is not None:
            made.append(part)
            last = part
    return made


def table(head: Iterable[str], rows: Iterable[Iterable[Element | str]], *, caption: str = "") -> Element:
    """A table; the first cell of a row is its heading."""
    headings = [element("th", name, scope="col") for name in head]
    body = [
        element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in others))
        for first, *others in rows
    ]
    return element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", element("tr", *headings)) if headings else None,
        element("tbody", *body),
    )


def figure(drawing: Element, *, title: str, label: str, caption: str, numbers: Element | None = None) -> Element:
    """A drawing with its title, caption and, for those who cannot see it, label and numbers."""
    drawing.attrib |= {"role": "img", "aria-label": visible(label)}
    return element(
        "figure",
        element("h3", title),
        drawing,
        element("figcaption", caption),
        None
        if numbers is None
        else element("details", element("summary", "Numbers"), element("div", numbers, class_="scroll")),
    )


def render(page: Element) -> str:
    """The document."""
    return "<!DOCTYPE html>\n" + ElementTree.tostring(page, encoding="unicode", method="html") + "\n"


def number(value: object) -> str:
    """Three figures of a number; a dash for anything else."""
    return f"{value:.3g}" if isinstance(value, int | float) else "–"

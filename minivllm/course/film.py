"""Pictures that step: a fixed set of boxes whose looks change from frame to frame, as one SVG with a slider.

A film lives in a notebook, in the built book (also from file://) and in a terminal, without any library. The boxes stand still;
a frame only says which of them look different now, so that forty steps cost little more than one. Without JavaScript the last
frame shows; with it, the first. Colours carry no information that the labels don't repeat, and ink is the page's own, so that dark pages work.
"""

from __future__ import annotations

import hashlib
import html
import json
from dataclasses import dataclass, field

HUES = ("#2f6db3", "#a85400", "#2f7d3b", "#8250a8", "#b83a3a", "#1f7a80", "#7a5a2e", "#b03a78")
NUM_HUES = len(HUES)
CELL, GAP = 30.0, 4.0

STYLE = (
    ".film{margin:1em 0;max-width:36rem}.film svg{width:100%;height:auto;display:block;background:none}"
    ".film text{fill:currentColor;font:11px system-ui,sans-serif;text-anchor:middle;stroke:none}"
    ".film text.head{text-anchor:start;font-weight:600}.film text.name{text-anchor:end}.film text.note{font-size:7.5px}"
    ".film rect{fill:none;stroke:currentColor;stroke-opacity:.4;rx:3px}"
    ".film circle{display:none;fill:#ffd34d;stroke:#0008;stroke-width:.5}.film .pub circle{display:inline}"
    ".film .none{display:none}.film .null rect{stroke-dasharray:2 2}.film .null text,.film .dim text{fill-opacity:.55}"
    ".film .cached rect{fill:currentColor;fill-opacity:.13}"
    ".film .held text{fill:#fff}.film .held rect{stroke:none}"
    ".film .gone rect{fill-opacity:.3;stroke-dasharray:3 2}.film .gone text{fill:currentColor}"
    ".film .new rect{stroke:currentColor;stroke-opacity:1;stroke-width:2.2}"
    ".film .hit rect{stroke:#e0a100;stroke-opacity:1;stroke-width:2.6}"
    ".film .decode rect{fill-opacity:.55}.film .decode text{fill:currentColor}"
    + "".join(f".film .h{i} rect{{fill:{hue}}}" for i, hue in enumerate(HUES))
    + ".film .bar{display:flex;gap:.6em;align-items:baseline;flex-wrap:wrap}.film input{flex:1 1 12rem;accent-color:#2f6db3}"
    ".film output{flex:1 1 100%;min-height:2.8em;font-size:.9em}.film .bar[hidden]{display:none}"
    ".film figcaption{font-size:.8em;text-align:left;font-style:normal;color:inherit;opacity:.8}"
)

SCRIPT = """(() => {
for (const film of document.querySelectorAll("figure.ID:not([data-on])")) {
film.dataset.on = 1;
const [looks, frames] = DATA, boxes = film.querySelectorAll("g[data-box]"), slider = film.querySelector("input");
const words = film.querySelector("output"), bar = film.querySelector(".bar");
const show = () => {
const now = {};
for (let i = 0; i <= slider.value; i++) for (const [box, look] of frames[i][1]) now[box] = look;
boxes.forEach((g, i) => {
const [kind, label, note, title] = looks[now[i] ?? 0];
g.setAttribute("class", kind);
g.children[0].textContent = title;
g.children[2].textContent = label;
g.children[3].textContent = note;
});
words.textContent = frames[slider.value][0];
slider.setAttribute("aria-valuetext", frames[slider.value][0]);
};
bar.hidden = false;
slider.oninput = show;
slider.value = 0;
show();
}
})()"""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, in the picture's units."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Look:
    """How a box looks: style classes (`held h3 new`), a label, a small second line, and the words that hovering shows."""

    kind: str = "none"
    label: str = ""
    note: str = ""
    title: str = ""


ABSENT = Look()


@dataclass(frozen=True, slots=True)
class Frame:
    """One step: what to say about it, and the look of each box that is there (by its number)."""

    caption: str
    looks: dict[int, Look]


@dataclass(frozen=True, slots=True)
class Label:
    """Words that never change: a heading (`head`) or a row's name (`name`, ending at x)."""

    x: float
    y: float
    text: str
    kind: str = "head"


@dataclass(slots=True, repr=False)
class Film:
    """Boxes, labels and at least one frame. `legend` is printed below, `text` is what a terminal shows."""

    width: float
    height: float
    title: str
    boxes: list[Box] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    legend: str = ""
    text: str = ""

    def add_box(self, x: float, y: float, width: float, height: float) -> int:
        """Add a box; returns its number, for the frames' `looks`."""
        self.boxes.append(Box(x, y, width, height))
        return len(self.boxes) - 1

    def add_heading(self, text: str) -> None:
        """Add words below everything that is there already."""
        self.labels.append(Label(2, self.height + 14, text))
        self.height += 20

    def add_grid(self, count: int, per_row: int, left: float = 0.0, height: float = CELL) -> list[int]:
        """Add `count` boxes in rows below everything that is there already; returns their numbers."""
        first = len(self.boxes)
        for i in range(count):
            row, column = divmod(i, per_row)
            self.add_box(left + column * (CELL + GAP) + 2, self.height + row * (height + GAP), CELL, height)
        self.height += -(-count // per_row) * (height + GAP)
        return list(range(first, len(self.boxes)))

    @property
    def id(self) -> str:
        """A class name made of the content: the same film has the same id in every build."""
        return "film-" + hashlib.sha256(repr((self.boxes, self.labels, self.frames)).encode()).hexdigest()[:10]

    def svg(self, index: int = -1) -> str:
        """Frame `index` as SVG."""
        looks = self.frames[index].looks
        cells = [_cell(box, looks.get(i, ABSENT)) for i, box in enumerate(self.boxes)]
        words = [f'<text x="{w.x:g}" y="{w.y:g}" class="{w.kind}">{html.escape(w.text)}</text>' for w in self.labels]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{html.escape(self.title)}">{"".join(words + cells)}</svg>'
        )

    def _repr_html_(self) -> str:
        last, caption = len(self.frames) - 1, html.escape(self.frames[-1].caption)
        slider = (
            f'<div class="bar" hidden><input type="range" min="0" max="{last}" value="{last}" '
            f'aria-label="step of: {html.escape(self.title)}" aria-valuetext="{caption}"></div>'
        )
        return (
            f'<figure class="film {self.id}"><style>{STYLE}</style>{self.svg()}{slider if last else ""}'
            f'<output aria-live="polite">{caption}</output>'
            f"<figcaption>{html.escape(self.legend)}</figcaption></figure>{self._script() if last else ''}"
        )

    def _script(self) -> str:
        data = json.dumps(self._changes(), separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
        return f"<script>{SCRIPT.replace('ID', self.id).replace('DATA', data)}</script>".replace("\n", "")

    def _changes(self) -> tuple[list[tuple[str, str, str, str]], list[tuple[str, list[tuple[int, int]]]]]:
        """All looks, the absent one first, and for each frame its caption and the boxes that changed: (box, look)."""
        numbers: dict[Look, int] = {ABSENT: 0}
        frames, before = [], dict.fromkeys(range(len(self.boxes)), 0)
        for frame in self.frames:
            now = {i: numbers.setdefault(frame.looks.get(i, ABSENT), len(numbers)) for i in before}
            frames.append((frame.caption, [(i, look) for i, look in now.items() if look != before[i]]))
            before = now
        return [(k.kind, k.label, k.note, k.title) for k in numbers], frames

    def __repr__(self) -> str:
        return f"{self.title}: {self.frames[-1].caption}\n{self.text}".rstrip()


def _cell(box: Box, look: Look) -> str:
    middle, low = box.x + box.width / 2, box.y + box.height / 2 + (1 if look.note else 4)
    return (
        f'<g data-box class="{look.kind}"><title>{html.escape(look.title)}</title>'
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"/>'
        f'<text x="{middle:g}" y="{low:g}">{html.escape(look.label)}</text>'
        f'<text x="{middle:g}" y="{box.y + box.height - 3:g}" class="note">{html.escape(look.note)}</text>'
        f'<circle cx="{box.x + box.width - 4.5:g}" cy="{box.y + 4.5:g}" r="2.6"/></g>'
    )

"""Line plots as SVG that is the same in every build and takes its ink from the page, so that it works in the dark."""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

from minivllm.course.film import HUES

RC: Any = {
    "svg.hashsalt": "minivllm",  # element ids are made of this and the content, not of a random number
    "svg.fonttype": "none",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.prop_cycle": cycler(color=list(HUES)),
}
_STYLE = ".plot{margin:1em 0;max-width:40rem}.plot svg{width:100%;height:auto}.plot text{fill:currentColor}"


def axes(x: str, y: str, *, width: float = 6.2, height: float = 3.0, **scales: str) -> Axes:
    """An empty plot with named axes, inches wide and high; `xscale="log"` and the like as keywords."""
    with mpl.rc_context(RC):
        made = Figure(figsize=(width, height), layout="constrained").add_subplot()
        made.set(xlabel=x, ylabel=y, **scales)
    return made


class Plot:
    """A finished plot, with words for those who can't see it."""

    def __init__(self, drawn: Axes, words: str) -> None:
        self.words = words
        self._svg = _svg(drawn)

    def _repr_html_(self) -> str:
        return f'<figure class="plot" role="img" aria-label="{html.escape(self.words)}"><style>{_STYLE}</style>{self._svg}</figure>'

    def __repr__(self) -> str:
        return f"<plot: {self.words}>"


def _svg(drawn: Axes) -> str:
    buffer = io.StringIO()
    figure = drawn.get_figure(root=True)
    assert isinstance(figure, Figure)
    if (
        legend := drawn.get_legend()
    ):  # made by the lesson, outside RC: its white frame would hide the text on dark pages
        legend.set_frame_on(False)
    with mpl.rc_context(RC):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # names like axes_1, the same in every plot of a page
    return re.sub(r"<(metadata|style type)\b.*?</(metadata|style)>", "", svg, flags=re.S).strip()

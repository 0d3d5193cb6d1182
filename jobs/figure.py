"""Axes to draw on, as SVG text that stands inside HTML or as a PNG; the user's matplotlibrc has no
say. SVGs have no ids in common and no outside links.

What is neither data nor background has one ink: in an SVG the colour of the page's text, so that a
plot reads on light and on dark pages.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any

from batchmla.errors import JobError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#3b82c4", "#d9822b", "#3fa66b", "#a66bbf")
INK = "#010203"  # stands for the page's text colour while an SVG is made
WIDE_INCHES = (8.0, 2.6)
_MARGINS = {"left": 0.11, "right": 0.85, "bottom": 0.18, "top": 0.96}  # shares of the size
_PNG_DOTS_PER_INCH = 160

Size = tuple[float, float]


def check_library(command: str) -> None:
    """Refuses to go on without matplotlib, which is an extra."""
    try:
        import matplotlib  # noqa: F401  # late: an extra
    except ImportError:
        raise JobError(
            f"{command} draws with matplotlib, which is not installed; "
            "pip install 'batchmla[report]'"
        ) from None


@contextmanager
def svg_axes(
    name: str, size_inches: Size = WIDE_INCHES, margins: Mapping[str, float] = _MARGINS
) -> Iterator[tuple["Axes", StringIO]]:
    """Axes to draw on; on leaving, the text has the plot. `name` is unique on its page."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    text, made = StringIO(), StringIO()
    with _figure(name, size_inches, margins) as figure:
        FigureCanvasSVG(figure)
        yield figure.add_subplot(), text
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(made, format="svg", transparent=True, metadata=nothing)
    text.write(_inline(name, made.getvalue()))


@contextmanager
def png_axes(
    name: str, size_inches: Size = WIDE_INCHES, margins: Mapping[str, float] = _MARGINS
) -> Iterator[tuple["Axes", BytesIO]]:
    """Axes to draw on; on leaving, the bytes have the plot on white."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    made = BytesIO()
    with _figure(name, size_inches, margins) as figure:
        FigureCanvasAgg(figure)
        yield figure.add_subplot(), made
        figure.savefig(made, format="png", dpi=_PNG_DOTS_PER_INCH, metadata={"Software": None})


def plain_numbers(axes: "Axes") -> None:
    """1,000,000 and not 1e6."""
    from matplotlib.ticker import FuncFormatter

    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)


@contextmanager
def _figure(name: str, size_inches: Size, margins: Mapping[str, float]) -> Iterator["Figure"]:
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = matplotlib.rcParams
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        settings.update(_style(name))
        figure = Figure(figsize=size_inches)
        figure.subplots_adjust(**margins)
        yield figure


def _style(name: str) -> dict[str, Any]:
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(inked, INK),
        "grid.color": INK,
        "grid.alpha": 0.15,
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": name,
    }


def _inline(name: str, svg: str) -> str:
    """The element alone, with ids of its own and the page's text colour."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg, count=2)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace('xlink:href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    head = f'<svg role="img" aria-label="{name}"'
    return svg.replace("<svg", head, 1).replace(INK, "currentColor")

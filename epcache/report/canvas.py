"""How a drawing becomes files, and a picture inside the page that follows its theme.

A drawing is made in the colours of the light theme. Inside the page each of these colours is
replaced by a variable of ``style.css``, so one picture serves light and dark; text stays text.
"""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epcache.palette import CATEGORICAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#1c2128", "#59626e", "#dde2e8", "#fffffe"
VARIABLES = {
    INK: "--ink", MUTED: "--muted", GRID: "--rule", PAPER: "--paper",
    **{colour.lower(): f"--c{place}" for place, colour in enumerate(CATEGORICAL)},
}  # fmt: skip
"""What each colour of a drawing is called in ``style.css``."""

WIDE, NARROW = 1040, 350
"""Pixels that the page gives a picture on a desk and on a phone; a unit of a drawing is one."""
FILE_DPI = 144


@dataclass(kw_only=True)
class Canvas:
    """A figure to draw on, with what the drawings share."""

    figure: Figure
    is_narrow: bool
    tips: dict[str, str] = field(default_factory=dict)
    """What is shown over a mark, by its id."""
    later: list[Callable[[], None]] = field(default_factory=list)
    """What is drawn last, when places on paper are known."""

    def panels(
        self, count: int, *, most: int = 3, height: int = 330, share: bool = True
    ) -> list[Axes]:
        """Axes for ``count`` panels, as many beside each other as fit, and the figure's size."""
        columns = 1 if self.is_narrow else min(count, most)
        rows = -(-count // columns)
        width = NARROW if self.is_narrow else WIDE
        each = round(height * 0.9) if self.is_narrow else height + 40 * (columns == 1)
        self.figure.set_size_inches(width / 72, rows * each / 72)
        grid = self.figure.subplots(rows, columns, squeeze=False, sharey=share and count > 1)
        axes = list(grid.flat)
        for unused in axes[count:]:
            unused.remove()
        for ax in axes[:count]:
            plain(ax)
        return axes[:count]

    def tip(self, text: str) -> str:
        """An id for a mark that shows ``text`` when it is pointed at."""
        name = f"tip{len(self.tips)}"
        self.tips[name] = text
        return name

    def legend(self, handles: list[Any]) -> None:
        """One for all panels: beside a single one on a desk, else below."""
        if not handles:
            return
        longest = max(len(str(handle.get_label())) for handle in handles)
        width = self.figure.get_size_inches()[0] * 72
        columns = max(1, min(len(handles), int(width // (7.2 * longest + 44))))
        is_beside = not self.is_narrow and len(self.figure.axes) == 1
        self.figure.legend(
            handles=handles, frameon=False, handlelength=1.8, columnspacing=1.4,
            loc="outside right upper" if is_beside else "outside lower center",
            ncols=1 if is_beside else columns,
        )  # fmt: skip

    def finish(self) -> None:
        """Settle the layout once for all files, then draw what waited for it."""
        self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")
        for draw in self.later:
            draw()


def plain(ax: Axes) -> None:
    """Axes without a box: a light grid and two quiet lines."""
    ax.grid(visible=True, color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(MUTED)
    ax.tick_params(colors=MUTED, which="both", length=3)


def log_axis(axis: Axis, least: float, last: float) -> None:
    """A logarithmic axis with plain numbers: 1, 2 and 5 where it spans little, else decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    decades = math.log10(last / least)
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 1.6 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(NullFormatter())


def number(value: float) -> str:
    """``970``, ``1.4 k``, ``11 M``: to three digits."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A finished figure of the page, with its files."""

    name: str
    title: str
    caption: str
    """What it shows and how, in plain text."""
    wide: str
    """Inline SVG for a desk, and for a phone; the same marks."""
    narrow: str
    files: tuple[Path, ...]


Draw = Callable[[Canvas], None]


def make_picture(name: str, title: str, caption: str, draw: Draw, folder: Path) -> Picture:
    """Draw once for a desk (also as PNG and SVG) and once for a phone."""
    wide, png = _render(draw, is_narrow=False)
    narrow, _ = _render(draw, is_narrow=True)
    folder.mkdir(parents=True, exist_ok=True)
    png_path, svg_path = folder / f"{name}.png", folder / f"{name}.svg"
    png_path.write_bytes(png)
    svg_path.write_text(on_paper(wide[0]), encoding="utf-8")
    return Picture(
        name=name, title=title, caption=caption, files=(png_path, svg_path),
        wide=inline(*wide, prefix=f"{name}-w", label=title),
        narrow=inline(*narrow, prefix=f"{name}-n", label=title),
    )  # fmt: skip


def _render(draw: Draw, *, is_narrow: bool) -> tuple[tuple[str, Mapping[str, str]], bytes]:
    """A drawing as SVG with its tips, and on a desk's canvas as PNG."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    size = 11.5 if is_narrow else 12.5
    style: Any = {
        "svg.fonttype": "none", "svg.hashsalt": "epcache", "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"], "font.size": size, "axes.titlesize": size + 0.5,
        "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.labelsize": size,
        "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "text.usetex": False,
        "text.parse_math": False, "axes.unicode_minus": True,
    }  # fmt: skip
    # these have no argument; the contexts put them back
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # a name in a script that the font of files lacks: the page's own fonts have it
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(layout=ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.05), dpi=72)
        canvas = Canvas(figure=figure, is_narrow=is_narrow)
        draw(canvas)
        canvas.finish()
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        data = io.BytesIO()
        if not is_narrow:
            figure.savefig(
                data, format="png", dpi=FILE_DPI, facecolor="white", metadata={"Software": None}
            )
    return (text.getvalue(), canvas.tips), data.getvalue()


def on_paper(svg: str) -> str:
    """A file's SVG: on white, since it may be looked at anywhere."""
    paper = '<rect width="100%" height="100%" fill="#ffffff"/>\n'
    return re.sub(r"(<svg\b[^>]*>\n?)", lambda m: m.group(1) + paper, svg, count=1)


def inline(svg: str, tips: Mapping[str, str], *, prefix: str, label: str) -> str:
    """SVG for inside the page: theme's colours, ids of its own, tips, a name for screen readers."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    for name, text in tips.items():
        title = f"<title>{html.escape(text)}</title>"
        body = body.replace(f'<g id="{name}">', f'<g class="mark">{title}')
    body = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r"url\(#", f"url(#{prefix}-", body)
    body = re.sub(r'xlink:href="#', f'href="#{prefix}-', body)
    body = re.sub(r' xmlns(:xlink)?="[^"]*"', "", body)
    body = re.sub(
        r"#[0-9a-f]{6}\b",
        lambda m: f"var({VARIABLES[m.group()]})" if m.group() in VARIABLES else m.group(),
        body,
        flags=re.IGNORECASE,
    )
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', body)
    if size:
        attributes = f'role="img" aria-label="{html.escape(label)}" style="max-width:{size[1]}px"'
        body = body.replace(size.group(), attributes, 1)
    return body.strip()

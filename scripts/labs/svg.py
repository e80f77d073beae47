"""Small SVG figures: bars and curves with axes, labels and a legend. No dependencies.

Knows numbers and names. Knows no experiments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final, Protocol

WIDTH: Final = 820
LEFT: Final = 330
RIGHT: Final = 70
PLOT_HEIGHT: Final = 260
COLOURS: Final = ("#3b6ea5", "#d1495b", "#66a182", "#edae49", "#7b5ea7", "#8d8d8d", "#2e4057", "#c97c5d")
FONT: Final = "font-family='Helvetica, Arial, sans-serif'"


class Panel(Protocol):
    """One part of a page."""

    @property
    def height(self) -> int:
        """Pixels that it needs."""
        ...

    def draw(self) -> list[str]:
        """Its elements, from (0, 0)."""
        ...


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars of shares: a group for each name, a bar for each series."""

    title: str
    names: Sequence[str]
    series: Mapping[str, Sequence[float]]

    @property
    def height(self) -> int:
        """Pixels that it needs."""
        return 70 + len(self.names) * (10 * len(self.series) + 10)

    def draw(self) -> list[str]:
        """See `Panel.draw`."""
        top = max((value for values in self.series.values() for value in values), default=0.0) or 1.0
        scale = (WIDTH - LEFT - RIGHT) / top
        parts = [text(12, 20, self.title, size=14, weight="bold"), *legend(list(self.series), 40)]
        y = 56
        for number, name in enumerate(self.names):
            parts.append(text(LEFT - 8, y + 5 * len(self.series) + 4, name, anchor="end"))
            for place, values in enumerate(self.series.values()):
                value = values[number]
                parts.append(
                    f"<rect x='{LEFT}' y='{y}' width='{max(value * scale, 0.5):.1f}' height='9' "
                    f"fill='{COLOURS[place % len(COLOURS)]}'/>"
                )
                parts.append(text(LEFT + value * scale + 4, y + 8, share(value), size=9))
                y += 10
            y += 10
        return parts


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves over a logarithmic or linear x axis; y from 0 to 1 unless `log_y`.

    `series` maps a name to its (x, y) points; `marks` are vertical lines by label.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    marks: Mapping[str, float] = field(default_factory=dict)
    log_x: bool = True
    log_y: bool = False
    dashed: frozenset[str] = frozenset()

    @property
    def height(self) -> int:
        """Pixels that it needs."""
        return PLOT_HEIGHT + 100 + 16 * len(self.series)

    def draw(self) -> list[str]:
        """See `Panel.draw`."""
        points = [point for values in self.series.values() for point in values]
        xs = [x for x, _ in points] + list(self.marks.values())
        ys = [y for _, y in points]
        across = Axis(min(xs), max(xs), 70, WIDTH - RIGHT, log=self.log_x)
        up = Axis(min(ys) if self.log_y else 0.0, max(*ys, 1e-9) if self.log_y else 1.0,
                  40 + PLOT_HEIGHT, 40, log=self.log_y)  # fmt: skip
        parts = [text(12, 20, self.title, size=14, weight="bold"), *self._axes(across, up)]
        for number, (name, values) in enumerate(self.series.items()):
            colour = COLOURS[number % len(COLOURS)]
            again = number >= len(COLOURS)  # the colours begin anew
            dash = " stroke-dasharray='5 3'" if name in self.dashed or again else ""
            line = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in values)
            parts.append(
                f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='1.6'{dash}/>"
            )
            y = PLOT_HEIGHT + 96 + 16 * number
            parts.append(f"<line x1='70' x2='100' y1='{y - 4}' y2='{y - 4}' stroke='{colour}'{dash}/>")
            parts.append(text(108, y, name))
        for label, x in self.marks.items():
            at = across.at(x)
            parts.append(f"<line x1='{at:.1f}' x2='{at:.1f}' y1='40' y2='{40 + PLOT_HEIGHT}' "
                         "stroke='#222' stroke-dasharray='2 3'/>")  # fmt: skip
            parts.append(text(at + 3, 50, label, size=9))
        return parts

    def _axes(self, across: Axis, up: Axis) -> list[str]:
        bottom = 40 + PLOT_HEIGHT
        parts = [
            f"<rect x='70' y='40' width='{WIDTH - RIGHT - 70}' height='{PLOT_HEIGHT}' "
            "fill='none' stroke='#999'/>"
        ]
        for value in across.ticks():
            at = across.at(value)
            parts.append(f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{bottom}' y2='{bottom + 4}' stroke='#999'/>")
            parts.append(text(at, bottom + 16, number_text(value), anchor="middle", size=10))
        for value in up.ticks():
            at = up.at(value)
            parts.append(f"<line x1='66' x2='70' y1='{at:.1f}' y2='{at:.1f}' stroke='#999'/>")
            parts.append(text(62, at + 3, number_text(value), anchor="end", size=10))
        parts.append(text((70 + WIDTH - RIGHT) / 2, bottom + 34, self.x_label, anchor="middle"))
        parts.append(text(14, 34, self.y_label, size=10))
        return parts


@dataclass(frozen=True, slots=True)
class Axis:
    """Values `low` to `high` at pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; values outside are drawn at the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            span = math.log(self.high / self.low) or 1.0
            share_ = math.log(value / self.low) / span
        else:
            share_ = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share_ * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values within."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            step = max(1, (last - first) // 8)
            return [10.0**power for power in range(first, last + 1, step)]
        step = 10 ** math.floor(math.log10((self.high - self.low) or 1.0))
        step = (
            step / 5
            if (self.high - self.low) / step < 2
            else step / 2
            if (self.high - self.low) / step < 5
            else step
        )
        count = int((self.high - self.low) / step + 1e-9)
        return [self.low + step * number for number in range(count + 1)]


def page(panels: Sequence[Panel]) -> str:
    """One SVG document of the panels, one under the other."""
    height = sum(panel.height + 20 for panel in panels)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
        f"viewBox='0 0 {WIDTH} {height}'>",
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>",
    ]
    y = 0
    for panel in panels:
        parts += [f"<g transform='translate(0 {y})'>", *panel.draw(), "</g>"]
        y += panel.height + 20
    return "\n".join([*parts, "</svg>", ""])


def legend(names: Sequence[str], y: float) -> list[str]:
    """Coloured names in a line."""
    parts, x = [], 12.0
    for number, name in enumerate(names):
        parts.append(
            f"<rect x='{x:.0f}' y='{y - 9}' width='10' height='10' fill='{COLOURS[number % len(COLOURS)]}'/>"
        )
        parts.append(text(x + 14, y, name))
        x += 34 + 6.5 * len(name)
    return parts


def text(
    x: float, y: float, content: str, *, size: int = 11, anchor: str = "start", weight: str = "normal"
) -> str:
    """A text element."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {FONT} font-size='{size}' text-anchor='{anchor}' "
        f"font-weight='{weight}'>{escape(content)}</text>"
    )


def share(value: float) -> str:
    """A share for a person."""
    if value == 0:
        return "0"
    return f"{100 * value:.3g} %"


def number_text(value: float) -> str:
    """A tick for a person."""
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if 0 < abs(value) < 0.001 else f"{value:g}"

"""`python docs/pictures/draw.py`: the pictures of the site, as SVG beside this file.

The collectives of a conversion are those that `redistribute` makes.
"""

from itertools import pairwise
from pathlib import Path

from autopar.sbp.redistribute import CONVERSIONS

HERE = Path(__file__).parent
FILLS = ("#5b8fc7", "#e0a458")
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" font-family="sans-serif">'
)
_HEAD += '<rect width="{w}" height="{h}" fill="#ffffff"/>'


def svg(width: int, height: int, parts: list[str]) -> str:
    """A picture on white, so that it is read on a dark page too."""
    return "\n".join([_HEAD.format(w=width, h=height), *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="#222222">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> str:
    """A filled rectangle with a rim."""
    at = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect {at} fill="{fill}" fill-opacity="{opacity}" stroke="#444444"/>'


def placements() -> str:
    """A tensor of 4 x 4 on two devices, in each placement."""
    parts = [text(150, 20, "device 0"), text(300, 20, "device 1")]
    rows = (
        ("S(0)", "rows split", ((0, 0, 80, 40), (0, 40, 80, 40)), 1.0),
        ("S(1)", "columns split", ((0, 0, 40, 80), (40, 0, 40, 80)), 1.0),
        ("P", "pending sum: add both", ((0, 0, 80, 80), (0, 0, 80, 80)), 0.4),
        ("B", "whole", ((0, 0, 80, 80), (0, 0, 80, 80)), 1.0),
        ("B*", "whole, its gradient a pending sum", ((0, 0, 80, 80), (0, 0, 80, 80)), 1.0),
    )
    for number, (name, words, held, opacity) in enumerate(rows):
        y = 35 + 100 * number
        parts.append(text(20, y + 45, name, size=18))
        for device, (x0, y0, width, height) in enumerate(held):
            x = 140 + 150 * device
            parts.append(f'<rect x="{x}" y="{y}" width="80" height="80" fill="none" stroke="#bbbbbb"/>')
            fill = FILLS[device] if opacity < 1 or name.startswith("S") else FILLS[0]
            parts.append(box(x + x0, y + y0, width, height, fill, opacity))
        parts.append(text(400, y + 45, words))
    return svg(640, 545, parts)


def conversions() -> str:
    """The collectives of each conversion on one axis, forward and backward, as the package lists them."""
    names = {"S": "S", "B": "I", "B*": "R", "P": "P"}
    wanted = {name: key for name, key in names.items() if name != "P"}
    parts = [text(20, 25, "from \\ to")]
    parts += [text(190 + 190 * column, 25, name, size=16, anchor="middle") for column, name in enumerate(wanted)]
    for row, (src, held) in enumerate(names.items()):
        y = 45 + 60 * row
        parts.append(text(20, y + 30, src, size=16))
        for column, (dst, key) in enumerate(wanted.items()):
            steps = CONVERSIONS.get((held, key), ("", ""))
            is_same = src == dst != "S"
            parts.append(
                box(100 + 190 * column, y, 180, 50, FILLS[1] if any(steps) and not is_same else "#ffffff", 0.35)
            )
            lines = (
                ("", "nothing") if is_same else [f"{n}: {k or 'local'}" for n, k in zip(("forward", "backward"), steps)]
            )
            parts += [
                text(190 + 190 * column, y + 20 + 20 * n, words, anchor="middle") for n, words in enumerate(lines)
            ]
    return svg(680, 295, parts)


def folding() -> str:
    """Six layers, three classes."""
    classes = ["#5b8fc7", *["#8cc084"] * 4, "#e0a458"]
    parts = [
        text(20, 25, "a model of six equal layers ..."),
        text(20, 125, "... is searched as three classes of copies"),
    ]
    parts += [box(20 + 80 * number, 40, 70, 40, fill) for number, fill in enumerate(classes)]
    for number, (fill, words) in enumerate((("#5b8fc7", "first"), ("#8cc084", "interior, x 4"), ("#e0a458", "last"))):
        parts.append(box(20 + 160 * number, 140, 140, 40, fill))
        parts.append(text(90 + 160 * number, 165, words, anchor="middle"))
    return svg(520, 200, parts)


def bound() -> str:
    """Where the bound and the plan lie on the axis of time."""
    parts = ['<line x1="30" y1="90" x2="560" y2="90" stroke="#444444"/>', text(480, 115, "time of a step")]
    parts.append('<rect x="30" y="70" width="270" height="40" fill="#cccccc" fill-opacity="0.5"/>')
    parts.append(text(40, 62, "proven: no plan of this kind is here"))
    parts.append(f'<rect x="300" y="70" width="60" height="40" fill="{FILLS[1]}" fill-opacity="0.6"/>')
    for x, words, y in ((300, "lower bound", 135), (360, "the plan", 45)):
        parts.append(f'<line x1="{x}" y1="60" x2="{x}" y2="120" stroke="#222222" stroke-width="2"/>')
        parts.append(text(x, y, words, anchor="middle"))
    parts.append(text(330, 95, "gap", anchor="middle"))
    return svg(600, 150, parts)


def memory() -> str:
    """Memory over a step: states, saved activations, transients."""
    levels = [0, 20, 40, 60, 80, 90, 70, 50, 30, 10, 0]
    points = [(40 + 48 * n, 170 - level) for n, level in enumerate(levels)]
    line = " ".join(f"{x},{y}" for x, y in [(40, 170), *points, (520, 170)])
    parts = [box(40, 170, 480, 60, FILLS[0]), f'<polygon points="{line}" fill="{FILLS[1]}" stroke="#444444"/>']
    parts += [text(50, 205, "parameters, optimizer state, gradients"), text(215, 150, "saved activations")]
    parts += [text(60, 250, "forward"), text(340, 250, "backward"), text(285, 70, "peak")]
    ends = pairwise([40, 280, 520])
    parts += [f'<line x1="{a}" y1="235" x2="{b}" y2="235" stroke="#444444"/>' for a, b in ends]
    return svg(560, 265, parts)


PICTURES = {f.__name__: f for f in (placements, conversions, folding, bound, memory)}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw())

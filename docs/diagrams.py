"""Draws the diagrams of hand-off and loss: `python docs/diagrams.py` writes docs/_static/*.svg, for light and dark pages."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent / "_static"
THEMES = {
    "light": {
        "ink": "#24292f",
        "faint": "#8c959f",
        "lane": "#d0d7de",
        "a": "#0969da",
        "b": "#1a7f37",
        "bad": "#cf222e",
        "on": "#ffffff",
    },
    "dark": {
        "ink": "#e6edf3",
        "faint": "#8b949e",
        "lane": "#3d444d",
        "a": "#58a6ff",
        "b": "#3fb950",
        "bad": "#ff7b72",
        "on": "#0d1117",
    },
}
WIDTH, LEFT, RIGHT = 760, 112, 745


class Drawing:
    """Lanes from the top to the bottom, time from the left to the right."""

    def __init__(self, colours: dict[str, str], title: str, lanes: list[str]) -> None:
        self.colours, self.title, self.parts = colours, title, []
        self.hollow: dict[str, tuple[float, float]] = {}
        self.height = 62 * len(lanes) + 44
        self.y = {lane: 58 + 62 * number for number, lane in enumerate(lanes)}
        for lane, y in self.y.items():
            self.text(4, y + 6, lane, weight=600)

    def text(
        self, x: float, y: float, text: str, colour: str = "ink", *, anchor: str = "start", weight: int = 400
    ) -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" fill="{self.colours[colour]}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
        )

    def bar(
        self, lane: str, begin: float, end: float, colour: str, text: str, *, hollow: bool = False
    ) -> None:
        y, ink = self.y[lane], self.colours[colour]
        if hollow:
            self.hollow[lane] = begin, end
        fill = (
            f'fill="none" stroke="{ink}" stroke-width="2" stroke-dasharray="6 4"'
            if hollow
            else f'fill="{ink}"'
        )
        self.parts.append(f'<rect x="{begin}" y="{y - 16}" width="{end - begin}" height="32" rx="6" {fill}/>')
        self.text((begin + end) / 2, y + 6, text, colour if hollow else "on", anchor="middle", weight=600)

    def arrow(
        self, start: tuple[float, str], end: tuple[float, str], colour: str = "ink", *, short: float = 0
    ) -> None:
        """From one lane to another; `short` of its end, in pixels, if it does not arrive."""
        (x1, from_), (x2, to) = start, end
        down = 1 if self.y[to] > self.y[from_] else -1
        y1, y2 = self.y[from_] + 17 * down, self.y[to] - (17 + short) * down
        ink = self.colours[colour]
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2 - 6 * down}" stroke="{ink}" stroke-width="2.5"/>'
        )
        self.parts.append(
            f'<path d="M{x2 - 6} {y2 - 10 * down} L{x2} {y2} L{x2 + 6} {y2 - 10 * down} Z" fill="{ink}"/>'
        )

    def cross(self, x: float, y: float) -> None:
        ink = self.colours["bad"]
        self.parts.append(
            f'<path d="M{x - 8} {y - 8} L{x + 8} {y + 8} M{x + 8} {y - 8} L{x - 8} {y + 8}" stroke="{ink}" stroke-width="4"/>'
        )

    def moment(
        self, x: float, until: str, text: str, colour: str = "faint", *, anchor: str = "middle"
    ) -> None:
        ink = self.colours[colour]
        self.parts.append(
            f'<line x1="{x}" y1="30" x2="{x}" y2="{self.y[until] + 22}" stroke="{ink}" stroke-width="1.5" stroke-dasharray="3 4"/>'
        )
        self.text(x, 20, text, colour, anchor=anchor)

    def line(self, lane: str, begin: float, end: float) -> str:
        y = self.y[lane]
        return f'<line x1="{begin}" y1="{y}" x2="{end}" y2="{y}" stroke="{self.colours["lane"]}" stroke-width="2"/>'

    def svg(self) -> str:
        lines = []
        for lane in self.y:
            begin, end = self.hollow.get(lane, (RIGHT, RIGHT))
            lines += [self.line(lane, LEFT, begin), self.line(lane, end, RIGHT)]
        return "\n".join(
            [
                (
                    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" font-size="17"'
                    ' font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">'
                ),
                f"<title>{escape(self.title)}</title>",
                *lines,
                *self.parts,
                "</svg>\n",
            ]
        )


def hand_off(colours: dict[str, str]) -> str:
    drawing = Drawing(
        colours,
        "The server makes B the holder in the step in which A releases, and pushes the grant",
        ["client A", "server", "client B"],
    )
    drawing.moment(430, "server", "A leaves its block")
    drawing.bar("client A", 120, 426, "a", "A works in the block")
    drawing.bar("server", 120, 458, "a", "A holds, B is next in the queue")
    drawing.bar("server", 462, RIGHT, "b", "B holds")
    drawing.bar("client B", 205, 486, "faint", "B waits, without polling", hollow=True)
    drawing.bar("client B", 492, RIGHT, "b", "B works in the block")
    drawing.arrow((190, "client B"), (204, "server"))
    drawing.arrow((430, "client A"), (458, "server"), "a")
    drawing.arrow((464, "server"), (490, "client B"), "b")
    return drawing.svg()


def loss(colours: dict[str, str]) -> str:
    drawing = Drawing(
        colours,
        "A cannot renew: its block is cancelled before the server gives the lock to B; a late write of A is refused",
        ["client A", "server", "client B", "resource"],
    )
    x, y = 395, drawing.y["client A"]
    # The late write of A passes beside the other lanes.
    drawing.parts.append(
        f'<path d="M{x} {y} H722 V{drawing.y["resource"] - 22}" fill="none" stroke="{colours["bad"]}" stroke-width="2" stroke-dasharray="6 4"/>'
    )
    drawing.moment(395, "server", "A is cancelled", "bad", anchor="end")
    drawing.moment(468, "server", "the ttl of A ends", anchor="start")
    drawing.bar("client A", 120, 391, "a", "A works, token 7")
    drawing.bar("server", 120, 464, "a", "A holds until its ttl ends")
    drawing.bar("server", 470, RIGHT, "b", "B holds")
    drawing.bar("client B", 140, 482, "faint", "B waits", hollow=True)
    drawing.bar("client B", 488, RIGHT, "b", "B works, token 8")
    drawing.arrow((180, "client A"), (186, "server"))
    for x in (255, 325):
        drawing.arrow((x, "client A"), (x + 4, "server"), "bad", short=10)
        drawing.cross(x + 4, (drawing.y["client A"] + drawing.y["server"]) / 2)
    drawing.arrow((476, "server"), (488, "client B"), "b")
    drawing.arrow((560, "client B"), (566, "resource"), "b")
    drawing.text(556, drawing.y["resource"] + 26, "8: accepted", "b", anchor="middle")
    drawing.cross(722, drawing.y["resource"] - 14)
    drawing.text(560, y - 8, "a late write, token 7", "bad", anchor="middle")
    drawing.text(RIGHT, drawing.y["resource"] + 26, "7: refused", "bad", anchor="end")
    return drawing.svg()


if __name__ == "__main__":
    for theme, colours in THEMES.items():
        for name, draw in {"hand-off": hand_off, "loss": loss}.items():
            (FOLDER / f"{name}-{theme}.svg").write_text(draw(colours))

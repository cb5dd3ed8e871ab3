"""The page's drawings, as SVG: each computes its layout by the rule that the kernels use."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_COLORS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f",
)  # fmt: skip
_GREY, _LIGHT, _INK = "#d9d9d9", "#f2f2f2", "#222222"


class Drawing:
    """Shapes on a white sheet."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        self._shapes = [
            f"<title>{title}</title>",
            f'<rect {self._at(0, 0, width, height)} fill="white"/>',
        ]

    @staticmethod
    def _at(x: float, y: float, width: float, height: float) -> str:
        return f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "white",
        thick: float = 1,
    ) -> None:  # fmt: skip
        """Add a filled rectangle."""
        self._shapes.append(
            f'<rect {self._at(x, y, width, height)} fill="{fill}" stroke="{stroke}" '
            f'stroke-width="{thick:g}"/>'
        )

    def text(self, x: float, y: float, text: str, size: int = 12, anchor: str = "start") -> None:
        """Add a line of text."""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'font-family="sans-serif" fill="{_INK}">{text}</text>'
        )

    def svg(self) -> str:
        """Return the file."""
        body = "\n".join(self._shapes)
        return f'<svg xmlns="http://www.w3.org/2000/svg" {self._size}>\n{body}\n</svg>\n'


def _warp(width: int, height: int) -> list[tuple[int, int]]:
    """Return (row, column) of the 32 elements of the first warp of a block of width x height."""
    return [(thread // width, thread % width) for thread in range(min(32, width * height))]


def _sectors(elements: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the sectors of eight float32 that elements of a row-major matrix lie in."""
    return {(row, column // 8) for row, column in elements}


def coalescing() -> str:
    """Draw the sectors that a warp reads and writes, for blocks of several shapes."""
    shapes, cell, side = ((64, 8), (16, 16), (8, 8), (4, 8)), 7, 32
    drawing = Drawing(
        2 * side * cell + 170, 40 + len(shapes) * (side * cell + 44),
        "Sectors of 32 bytes that the first warp of a block touches",
    )  # fmt: skip
    drawing.text(20, 20, "x, read by the warp")
    drawing.text(100 + side * cell, 20, "y, written by the warp")
    for number, shape in enumerate(shapes):
        top = 40 + number * (side * cell + 44)
        read = _warp(*shape)
        for at, elements in ((0, read), (1, [(column, row) for row, column in read])):
            left = 20 + at * (side * cell + 80)
            drawing.box(left, top, side * cell, side * cell, _LIGHT)
            sectors = _sectors(elements)
            for row, sector in sorted(sectors):
                drawing.box(left + sector * 8 * cell, top + row * cell, 8 * cell, cell, _GREY)
            for row, column in elements:
                drawing.box(left + column * cell, top + row * cell, cell, cell, _COLORS[at])
            used = 100 * 32 / (8 * len(sectors))
            drawing.text(
                left, top + side * cell + 15,
                f"block {shape[0]}x{shape[1]}: {len(sectors)} sectors, {used:g} % of them used",
            )  # fmt: skip
    return drawing.svg()


def banks() -> str:
    """Draw the banks of a tile's elements, with eight banks in the place of 32."""
    layouts: tuple[tuple[str, int, Callable[[int, int], int]], ...] = (
        ("plain", 8, lambda row, column: column),
        ("padded by one element", 9, lambda row, column: column),
        ("swizzled: column ^ row", 8, lambda row, column: column ^ row),
    )
    cell = 24
    drawing = Drawing(20 + 3 * 250, 290, "Banks of shared memory, by color")
    for number, (name, pitch, position) in enumerate(layouts):
        left, top = 20 + number * 250, 40
        drawing.text(left, 24, name)
        if pitch > 8:
            for row in range(8):
                drawing.box(left + 8 * cell, top + row * cell, cell, cell, _LIGHT, _GREY)
        for row in range(8):
            for column in range(8):
                slot = position(row, column)
                bank = (row * pitch + slot) % 8
                x, y = left + slot * cell, top + row * cell
                drawing.box(x, y, cell, cell, _COLORS[bank])
                if column == 2:
                    drawing.box(x + 2, y + 2, cell - 4, cell - 4, "none", _INK, 2)
                drawing.text(x + cell / 2, y + 16, str(column), 11, "middle")
        taken = {(row * pitch + position(row, 2)) % 8 for row in range(8)}
        drawing.text(left, top + 8 * cell + 20, f"column 2 lies in {len(taken)} of 8 banks")
    drawing.text(20, 280, "Colors are banks, numbers the columns of elements.", 11)
    return drawing.svg()


def register_tiles() -> str:
    """Draw the tile of a block, of a warp and of a thread of 08_warp_tiles.cu (float64)."""
    scale = 3
    drawing = Drawing(128 * scale + 320, 128 * scale + 70, "Tiles of a block, a warp and a thread")
    left, top = 20, 40
    drawing.text(left, 24, "the block's 128x128")
    for warp in range(8):
        y, x = warp // 2 * 32, warp % 2 * 64
        fill = _GREY if warp == 0 else _LIGHT
        drawing.box(left + x * scale, top + y * scale, 64 * scale, 32 * scale, fill)
        drawing.text(left + x * scale + 4, top + y * scale + 14, f"warp {warp}", 10)
    # Thread 5: bits 1 and 4 of a lane are its row, bits 0, 2 and 3 its chunk of two columns.
    lane = 5
    row, column = lane // 2 % 2 + lane // 16 * 2, (lane % 2 + lane // 4 % 4 * 2) * 2
    for i in range(8):
        for j in range(8):
            x, y = column + j // 2 * 16 + j % 2, row + 4 * i
            drawing.box(left + x * scale, top + y * scale, scale, scale, _COLORS[0], "none")
    right = left + 128 * scale + 30
    for line, text in enumerate(
        (
            "Blue: the 8x8 elements of thread 5.",
            "A k-step reads 8 numbers of a",
            "and 8 of b, for 64 multiply-adds.",
            "",
            "The four rows that a warp reads of a",
            "are adjacent, and so are its chunks of b:",
            "no bank is asked for two addresses.",
        )
    ):
        drawing.text(right, top + 20 + 20 * line, text)
    return drawing.svg()


def swizzle() -> str:
    """Draw where TMA puts the 16-byte chunks of eight rows of 128 bytes."""
    cell = 30
    drawing = Drawing(2 * 8 * cell + 110, 8 * cell + 80, "The 128-byte swizzle of TMA")
    for number, (name, place) in enumerate(
        (
            ("in memory", lambda row, chunk: chunk),
            ("in shared memory", lambda row, chunk: chunk ^ row),
        )
    ):
        left, top = 20 + number * (8 * cell + 70), 40
        drawing.text(left, 24, name)
        for row in range(8):
            for chunk in range(8):
                x, y = left + place(row, chunk) * cell, top + row * cell
                drawing.box(x, y, cell, cell, _COLORS[chunk])
                drawing.text(x + cell / 2, y + 20, str(chunk), 12, "middle")
    drawing.text(
        20, 8 * cell + 66, "Chunk p of row r is at p ^ (r % 8): a column of chunks takes all banks."
    )
    return drawing.svg()


_LOAD, _MMA, _STORE, _WAIT = _COLORS[4], _COLORS[0], _COLORS[1], _LIGHT


def pipeline() -> str:
    """Draw what producer and consumers do over time, from one role to ping-pong."""
    # Of each panel the rows, and of each row its spans: kind, start, length and tile.
    span, rows = 26, 26
    panels = (
        ("wgmma: all threads load, multiply and store, block after block", (
            ("warpgroups", ((_LOAD, 0, 2, 0), (_MMA, 2, 6, 0), (_STORE, 8, 3, 0),
                            (_LOAD, 11, 2, 1), (_MMA, 13, 6, 1), (_STORE, 19, 3, 1))),
        )),
        ("producer warp and persistent grid: the next tile is loaded while one is stored", (
            ("producer", ((_LOAD, 0, 8, 0), (_LOAD, 8, 9, 1), (_LOAD, 17, 7, 2))),
            ("consumers", ((_MMA, 2, 6, 0), (_STORE, 8, 3, 0), (_MMA, 11, 6, 1),
                           (_STORE, 17, 3, 1), (_MMA, 20, 4, 2))),
        )),
        ("ping-pong: the tensor cores never wait for a store", (
            ("producer", ((_LOAD, 0, 8, 0), (_LOAD, 8, 6, 1), (_LOAD, 14, 6, 2),
                          (_LOAD, 20, 4, 3))),
            ("consumer 0", ((_MMA, 2, 6, 0), (_STORE, 8, 3, 0), (_WAIT, 11, 3, None),
                            (_MMA, 14, 6, 2), (_STORE, 20, 3, 2))),
            ("consumer 1", ((_WAIT, 2, 6, None), (_MMA, 8, 6, 1), (_STORE, 14, 3, 1),
                            (_WAIT, 17, 3, None), (_MMA, 20, 4, 3))),
        )),
    )  # fmt: skip
    height = sum(34 + rows * len(lines) for _, lines in panels) + 50
    drawing = Drawing(110 + 24 * span, height, "Who does what at a time")
    top = 10
    for title, lines in panels:
        drawing.text(10, top + 16, title)
        top += 24
        for name, spans in lines:
            drawing.text(10, top + 17, name, 11)
            for fill, start, length, tile in spans:
                drawing.box(100 + start * span, top, length * span, rows - 3, fill)
                if tile is not None:
                    middle = 100 + (start + length / 2) * span
                    drawing.text(middle, top + 16, f"tile {tile}", 10, "middle")
            top += rows
        top += 10
    for number, (name, fill) in enumerate(
        (("loads", _LOAD), ("MMAs", _MMA), ("stores", _STORE), ("waits for its turn", _WAIT))
    ):
        drawing.box(100 + number * 120, top + 4, 16, 16, fill, _GREY)
        drawing.text(122 + number * 120, top + 17, name, 11)
    return drawing.svg()


FIGURES: dict[str, Callable[[], str]] = {
    "coalescing": coalescing,
    "banks": banks,
    "register_tiles": register_tiles,
    "swizzle": swizzle,
    "pipeline": pipeline,
}

"""Letters and colours: which tenant looks how, in a terminal and in a picture."""

from __future__ import annotations

import os
import shutil
import sys

#: No red among them: it is for what must not happen.
COLOURS = {
    "acme": "#5aa2e8",
    "bolt": "#f2953b",
    "coda": "#5fbb5c",
    "dune": "#d9b93a",
    "echo": "#b48ae0",
    "fern": "#2fb5a5",
    "gala": "#f4a3b5",
    "hive": "#ad8763",
    "iris": "#8796f2",
    "jade": "#a5cc45",
    "kiwi": "#e07bd0",
    "luna": "#a3b0bf",
}
TENANTS = tuple(COLOURS)
RED = "#e5484d"


def letter(tenant: str) -> str:
    return tenant[0].upper()


class Style:
    """How a terminal is written to; plainly where it can't be coloured, or shall not."""

    def __init__(self) -> None:
        terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.rich = terminal and not os.environ.get("NO_COLOR")
        self.width = min(shutil.get_terminal_size((100, 24)).columns, 160)
        encoding = (sys.stdout.encoding or "").lower()
        self.unicode = self.rich and encoding.startswith("utf")

    def bold(self, text: str) -> str:
        return self._code("1", text)

    def dim(self, text: str) -> str:
        return self._code("2", text)

    def alarm(self, text: str) -> str:
        return self._code(f"1;38;5;{colour_256(RED)}", text)

    def ink(self, tenant: str, text: str) -> str:
        """Text in a tenant's colour."""
        return self._code(f"38;5;{colour_256(COLOURS[tenant])}", text)

    def block(self, tenant: str, text: str) -> str:
        """Dark text on a tenant's colour."""
        return self._code(f"38;5;16;48;5;{colour_256(COLOURS[tenant])}", text)

    def badge(self, tenant: str) -> str:
        return self.block(tenant, f" {letter(tenant)} ") if self.rich else letter(tenant)

    def _code(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.rich else text


def colour_256(hex_colour: str) -> int:
    """The nearest colour of the 6x6x6 cube that terminals know."""
    red, green, blue = (nearest_level(int(hex_colour[place : place + 2], 16)) for place in (1, 3, 5))
    return 16 + 36 * red + 6 * green + blue


def nearest_level(value: int) -> int:
    levels = (0, 95, 135, 175, 215, 255)
    return min(range(6), key=lambda step: abs(levels[step] - value))

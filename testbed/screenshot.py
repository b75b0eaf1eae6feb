"""A picture of a page in headless Chromium, for the README and for looking at what was made.

    python -m testbed.screenshot PAGE.html OUT.png [--size 1280x2000] [--top 0] [--dark]

PAGE is a file, or an address. The browser gets a user folder of its own, and asks nobody anything beside the page.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
DEADLINE_S: Final = 60.0
LEAST_WINDOW: Final = 500
"""A browser window is never narrower; a narrower page is shown in a frame of its width."""


class ScreenshotError(Exception):
    """No picture was made; the message says why and what to do."""


def screenshot(page: str, out: Path, width: int, height: int, *, top: int = 0, dark: bool = False) -> None:
    """Write a PNG of ``width`` x ``height`` pixels, from ``top`` pixels down the page.

    Below a width of 500 the page stands at the left of one 500 wide. Raises ScreenshotError.
    """
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise ScreenshotError("there is no Chromium: apt-get install -y chromium")
    address = page if "://" in page else Path(page).resolve().as_uri()
    with tempfile.TemporaryDirectory(prefix="slurm-pfi-browser-") as folder:
        made = Path(folder) / "page.png"
        command = [
            browser,
            *FLAGS,
            f"--user-data-dir={folder}/user",
            f"--window-size={max(width, LEAST_WINDOW)},{height}",
            f"--screenshot={made}",
        ]
        if dark:
            command.append("--blink-settings=preferredColorScheme=0")
        if width < LEAST_WINDOW or top:
            address = _framed(Path(folder), address, width, height, top)
            command += ["--allow-file-access-from-files"]
        try:
            done = subprocess.run(
                [*command, address], capture_output=True, text=True, timeout=DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ScreenshotError(f"{browser} made no picture within {DEADLINE_S:g} s") from error
        if not made.is_file():
            raise ScreenshotError(f"{browser} made no picture: {done.stderr.strip()[-500:]}")
        shutil.copyfile(made, out)


def _framed(folder: Path, address: str, width: int, height: int, top: int) -> str:
    """A page that shows another one in a frame: for widths that a window cannot have, and for its lower part."""
    frame = folder / "frame.html"
    frame.write_text(
        '<!DOCTYPE html><html style="background:#888"><body style="margin:0;overflow:hidden">'
        f'<iframe src="{address}" style="border:0;width:{width}px;height:{height + top}px;'
        f'margin-top:-{top}px"></iframe></body></html>'
    )
    return frame.as_uri()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.screenshot", description="Picture of a page.")
    parser.add_argument("page")
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="1280x2000", metavar="WxH")
    parser.add_argument("--top", type=int, default=0, metavar="PIXELS", help="begin this far down the page")
    parser.add_argument("--dark", action="store_true", help="as on a screen with a dark colour scheme")
    given = parser.parse_args(arguments)
    width, _, height = given.size.partition("x")
    if not (width.isdigit() and height.isdigit()):
        parser.error("--size is WxH in pixels, such as 1280x2000")
    try:
        screenshot(given.page, given.out, int(width), int(height), top=given.top, dark=given.dark)
    except ScreenshotError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

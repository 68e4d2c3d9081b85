"""Take screenshots of five pages of the built manual at the widths of a phone and of a desk.

Run it after `make docs`, with Chromium on the path, and look at the pictures in
docs/_build/screenshots: `python docs/screenshots.py`. The tests do not run it.
"""

import shutil
import subprocess
import sys
from pathlib import Path

BUILT = Path(__file__).parent / "_build"
PAGES = (
    "docs/index",
    "docs/models",
    "docs/comparison",
    "docs/api/clipping",
    "notebooks/02_smoothing",
)
WIDTHS = {"phone": 390, "desk": 1280}
HEIGHT = 2400
# Chromium's own window is never narrower than 500 pixels, so each page is shown in a frame.
FRAME = """<!doctype html><style>body {{ margin: 0 }} iframe {{ border: 0 }}</style>
<iframe src="{url}" width="{width}" height="{height}"></iframe>
"""


def take(browser: str, page: str, name: str, width: int) -> Path:
    """Take one screenshot, and return its file."""
    target = BUILT / "screenshots" / f"{page.replace('/', '-')}-{name}.png"
    frame = target.with_suffix(".html")
    url = (BUILT / "html" / f"{page}.html").as_uri()
    frame.write_text(FRAME.format(url=url, width=width, height=HEIGHT), encoding="utf-8")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        "--virtual-time-budget=5000",
        f"--window-size={max(width, 500)},{HEIGHT}",
        f"--screenshot={target}",
        frame.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    frame.unlink()
    return target


def main() -> None:
    """Take all screenshots."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("Install Chromium first; on Debian: apt-get install chromium.")
    if not (BUILT / "html" / "index.html").exists():
        sys.exit("Build the manual first: make docs.")
    (BUILT / "screenshots").mkdir(exist_ok=True)
    for page in PAGES:
        for name, width in WIDTHS.items():
            sys.stdout.write(f"{take(browser, page, name, width)}\n")


if __name__ == "__main__":
    main()

"""The versions that the repository pins."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = dict(
    re.match(r"([\w.-]+)==([^ ;]+)", line).groups()
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)

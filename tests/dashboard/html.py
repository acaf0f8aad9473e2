"""What is in a page, taken out of its HTML."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any


def section(html: str, anchor: str) -> str:
    found = re.search(rf'<section id="{anchor}">.*?</section>', html, re.DOTALL)
    assert found, anchor
    return found[0]


def titles(html: str) -> dict[str, str]:
    found = re.findall(r'<section id="([\w-]+)"><p class="kind">[^<]*</p><h2 class="\w*">(.*?)</h2>', html)
    return {anchor: unescape(title) for anchor, title in found}


def data(html: str) -> dict[str, Any]:
    found = re.search(r'id="history-data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def figures(html: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script></figure>', html)]

"""A tiny trained NemotronH-format model that needs its SSM state to answer (see README.md)."""

from pathlib import Path

FOLDER = Path(__file__).parent

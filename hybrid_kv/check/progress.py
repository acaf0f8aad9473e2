"""Progress bars."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm


def progress_bar(*arguments: Any, shown: bool = True, **options: Any) -> Any:
    """Return tqdm's bar, which is shown where stdout and stderr are a terminal.

    In a pipe or a file it would stand between the lines of a report.
    """
    options["disable"] = not (shown and sys.stdout.isatty() and sys.stderr.isatty())
    return tqdm(*arguments, **options)

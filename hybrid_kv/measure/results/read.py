"""Read a CSV of results, a part at a time."""

from __future__ import annotations

import fcntl
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_kv.errors import HybridKVError
from hybrid_kv.files import require_regular
from hybrid_kv.measure.results.schema import COLUMNS, HEADER, check_header, parse

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger("hybrid_kv.measure.results")
_PART = 1 << 24  # bytes


def read_texts(
    path: Path, warn: Callable[[str], None] = _log.warning
) -> Iterator[tuple[int, pd.DataFrame]]:
    """Yield the number of the first line and the cells of each part of a CSV.

    A torn last line is left out with a warning.

    Raises:
        HybridKVError: the file cannot be read, has another header, or a line that does not have all
            columns.
    """
    try:
        require_regular(path)
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # No line of a writer that is at work looks torn.
            header = file.readline(2 * len(HEADER))
            check_header(path, header)
            if header != HEADER:
                raise HybridKVError(
                    f"{path} is empty: column 1 must be {COLUMNS[0]!r}; is it another file?"
                )
            number = 2
            while data := file.read(_PART) + file.readline():
                whole = data[: data.rfind(b"\n") + 1]
                if whole:
                    yield number, _texts(path, number, whole)
                    number += whole.count(b"\n")
                if len(whole) < len(data):
                    warn(
                        f"{path}: a last line without an end is left out; the next append cuts it "
                        "off"
                    )
    except OSError as error:
        raise HybridKVError(f"results cannot be read from {path}: {error.strerror}") from None


def _texts(path: Path, number: int, lines: bytes) -> pd.DataFrame:
    import pandas as pd

    # pandas fills short lines and cuts long ones: a mark at the end of each line shows both. It
    # drops zero bytes: another byte that is not printable stands for them.
    marked = io.BytesIO(lines.replace(b"\n", b",|\n").replace(b"\0", b"\1"))
    names = [*COLUMNS, "end"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pd.errors.ParserWarning)
            frame = pd.read_csv(
                marked,
                header=None,
                names=names,
                index_col=False,
                dtype=str,
                na_filter=False,
                skip_blank_lines=False,
                lineterminator="\n",
            )
        odd = (
            int((frame["end"] != "|").to_numpy().argmax()) if (frame["end"] != "|").any() else None
        )
    except UnicodeDecodeError as error:
        raise HybridKVError(
            f"{path} is not text: byte {error.start} of a line is not UTF-8"
        ) from None
    except pd.errors.ParserError as error:
        place = re.search(r"(line|row) (\d+)", str(error))
        odd = int(place[2]) - (place[1] == "line") if place else 0
    if odd is not None:
        raise HybridKVError(f"{path} line {number + odd}: a row has {len(COLUMNS)} fields")
    return frame[list(COLUMNS)]


def read_frames(path: Path, warn: Callable[[str], None] = _log.warning) -> Iterator[pd.DataFrame]:
    """Yield the values of each part of a CSV.

    Raises:
        HybridKVError: as `read_texts`, or a cell does not fit its column; with the file, the line
            and what fits.
    """
    for number, texts in read_texts(path, warn):
        frame, wrong = parse(texts)
        if wrong:
            first = min(wrong)
            raise HybridKVError(f"{path} line {number + first}: {wrong[first]}")
        yield frame

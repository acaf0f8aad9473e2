"""`python -m bench.store` makes rows that a reader takes, each once, however they are split."""

from __future__ import annotations

from pathlib import Path

from bench.store import ROOT, write_piece
from hybrid_kv.measure.results import read_rows
from hybrid_kv.measure.results.store import opened
from hybrid_kv.measure.results.view import result_files


def test_pieces_join_without_a_gap_or_a_double(tmp_path: Path) -> None:
    with opened(result_files([ROOT / "results"])) as store:
        ((size,),) = store.run("SELECT count(*) FROM rows")
    begin = size - 150  # in the middle of a piece the rows begin anew, as another machine's
    firsts = (begin, begin + 100, begin + 200)
    write_piece(tmp_path / "whole.csv", begin, 300)
    for first in firsts:
        write_piece(tmp_path / f"{first}.csv", first, 100)
    whole = read_rows(tmp_path / "whole.csv")
    parts = [read_rows(tmp_path / f"{first}.csv") for first in firsts]
    assert [len(part) for part in parts] == [100] * 3
    assert whole.iloc[100:200].reset_index(drop=True).equals(parts[1])
    assert len(whole.drop_duplicates()) == 300 and set(whole["machine"]) == {"box 0", "box 1"}
    assert (whole["ci_low"].isna() | (whole["ci_low"] <= whole["ci_high"])).all()

"""DuckDB's copy of a CSV has what the reader of lines has, or is not made."""

import random

from hybrid_kv.results.read import read_lines
from hybrid_kv.results.schema import parsed
from hybrid_kv.results.store import NAMES, opened
from tests.fuzz import values
from tests.fuzz.cases import good_rows
from tests.results.rows import damaged


def copied(store, file):
    """Whether DuckDB made a copy; then it has the rows that the reader of lines has."""
    target = file.with_name("copy.parquet")
    if not store._vouched(file, target):
        return False
    query = f"SELECT {NAMES} FROM read_parquet('{target}', file_row_number=true) ORDER BY file_row_number"
    assert store.run(query) == by_lines(file)
    return True


def by_lines(file):
    rows = [parsed(file, number, texts) for number, texts in read_lines(file)]
    return [tuple(None if value != value else value for value in row) for row in rows]


def test_odd_files_are_copied_as_they_are_read_or_not_at_all(tmp_path):
    header, *rows = good_rows()
    made = 0
    with opened([]) as store:
        for seed in range(60):
            rng = random.Random(seed)
            file = tmp_path / f"{seed}.csv"
            some = [header, *rng.sample(rows, 3)]
            file.write_bytes(values.odd_csv(rng, some) if seed % 4 else values.plain_csv(some))
            made += copied(store, file)
    assert 15 <= made < 60


FIELDS = ['"a"b', ' "a"', '"a" ', 'a"b', '""', '"a""b"', "a\rb", '"a\nb"', "\ufeffa", "a\x00b", "#a", "NULL", "é"]


def test_odd_fields_are_copied_as_they_are_read_or_not_at_all(tmp_path):
    file = damaged(tmp_path / "r.csv", 2, machine="PLACE")
    whole = file.read_bytes()
    with opened([]) as store:
        for field in FIELDS:
            file.write_bytes(whole.replace(b"PLACE", field.encode()))
            copied(store, file)


def test_a_file_with_an_empty_line_is_not_copied(tmp_path):
    file = damaged(tmp_path / "r.csv", 2)
    whole = file.read_bytes()
    with opened([]) as store:
        assert copied(store, file)
        for odd in (whole + b"\n", whole.replace(b"\n", b"\n\n", 1), b"\n" + whole):
            file.write_bytes(odd)
            assert not copied(store, file)

"""Anybody's text is one code span."""

import pytest
from markdown_it import MarkdownIt

from hybrid_kv.results.markdown import MAX_LETTERS, plain
from tests.dashboard.hostile import PAYLOADS


@pytest.mark.parametrize("text", PAYLOADS)
def test_a_text_is_one_code_span_in_a_cell(text):
    tokens = MarkdownIt("commonmark").enable("table").parse(f"| a | b |\n|---|---|\n| {plain(text)} | end |\n")
    cells = [token.children for token in tokens if token.type == "inline"][2:]
    assert [[child.type for child in cell] for cell in cells] == [["code_inline"], ["text"]]
    assert cells[1][0].content == "end"


def test_a_text_is_short_and_never_empty():
    assert plain("x" * 1000) == f"`{'x' * (MAX_LETTERS - 1)}…`"
    assert plain(" \n ") == "–"

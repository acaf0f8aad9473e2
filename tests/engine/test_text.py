"""Text that grows with its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.engine.text import TextStream, stop_position


class Bytes:
    """A token is a byte of UTF-8, as in a byte-level tokenizer's worst case."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


def pieces(text: str, stops: Sequence[str] = (), size: int = 1) -> list[str]:
    token_ids = Bytes().encode(text)
    stream = TextStream(Bytes(), stops)
    found = [stream.add(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
    assert stream.num_characters == len("".join(found))
    return found


def test_a_character_comes_whole_with_its_last_byte() -> None:
    assert pieces("é€🙂a") == ["", "é", "", "", "€", "", "", "", "🙂", "a"]


def test_what_a_stop_string_may_begin_with_is_held_back() -> None:
    assert pieces("abQuQuest", ["Quest", "x"]) == ["a", "b", "", "", "Qu", "", "", "", "Quest"]
    assert pieces("aQue", ["Quest"]) == ["a", "", "", ""]


@given(
    st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.integers(1, 5)
)
def test_pieces_are_a_prefix_of_the_text_that_ends_before_a_stop_string(
    text: str, stops: list[str], size: int
) -> None:
    position = stop_position(text, stops)
    kept = text if position is None else text[:position]
    sent = "".join(pieces(kept, stops, size))
    assert kept.startswith(sent)
    assert len(kept) - len(sent) < max([len(stop) for stop in stops], default=1)

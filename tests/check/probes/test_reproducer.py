"""Files of failures: what is written is read again, and nothing else is."""

import json

import pytest

from hybrid_kv.check.probes.reproducer import from_json, to_json
from hybrid_kv.config import ConfigError
from tests.support.reproducer import CASE


def test_a_failure_comes_back_as_it_was_written() -> None:
    assert from_json(to_json(CASE), "case.json") == CASE


@pytest.mark.parametrize(
    ("keys", "value", "problem"),
    [
        (("index",), 2, "index 2 is none of the 2 requests of the last round"),
        (("index",), 0.5, "index: Input should be a valid integer"),
        (("index",), -1, "index -1 is none"),
        (("settings",), "abc", "settings: Input should be"),
        (("rounds",), [], "a round has no requests"),
        (("rounds", 1, "requests"), [], "a round has no requests"),
        (("rounds", 0, "requests", 0, "prompt"), [], "has no token ids"),
        (("rounds", 0, "requests", 0, "prompt"), [3, -1], "has no token ids"),
        (
            ("rounds", 0, "requests", 0, "prompt"),
            ["3"],
            "rounds.0.requests.0.prompt.0: Input should be a valid integer",
        ),
        (
            ("rounds", 1, "requests", 1, "after"),
            2,
            "of 2 requests one cannot have {'max_tokens': 2, 'logprobs'",
        ),
        (("rounds", 1, "requests", 0, "after"), 1, "2 requests wait for each other's answers"),
        (
            ("rounds", 0, "requests", 0, "max_tokens"),
            10**9,
            "answers of 1,000,000,000 tokens, more than 100,000",
        ),
        (("rounds", 0, "requests", 0, "max_tokens"), 0, "of 1 requests one cannot have"),
        (
            ("rounds", 1, "requests", 1, "logprobs"),
            False,
            "logprob is of no token, or was not requested",
        ),
        (("version",), 2, "it is not of the format"),
        (("engine",), None, "version: Input should be a valid string"),
    ],
)
def test_what_no_failure_says_is_one_line(
    keys: tuple[str | int, ...], value: object, problem: str
) -> None:
    document = json.loads(to_json(CASE))
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    with pytest.raises(ConfigError) as raised:
        from_json(json.dumps(document), "case.json")
    assert str(raised.value).startswith("case.json can't be played: ") and problem in str(
        raised.value
    )
    assert "\n" not in str(raised.value)

"""Where numbers come from, without the host's name."""

import os

from hybrid_kv.results import origin


def test_provenance_does_not_name_the_host(monkeypatch):
    monkeypatch.delenv("HYBRID_KV_MACHINE", raising=False)
    assert os.uname().nodename not in origin._machine()
    monkeypatch.setenv("HYBRID_KV_MACHINE", "h200-a\n b ")
    assert origin._machine() == "h200-a b"


def test_no_git_gives_an_empty_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert origin._commit() == ""

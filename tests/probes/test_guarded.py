from hybrid_kv.targets.target import Ask
from tests.probes.toy import ToyKind


def test_references_have_the_dtype_of_what_they_are_held_against(guarded):
    some = guarded()
    some.kind.factors["dtype"] = ("float32", "bfloat16")
    coarse = some.session({"prefix": "on", "dtype": "bfloat16"}).references
    assert coarse.alone(Ask((3,))) and coarse._targets[""].settings == {"dtype": "bfloat16"}
    fine = some.session({"prefix": "on"}).references
    assert fine.alone(Ask((3,))) and fine._targets[""].settings == {}


def test_the_plainest_setting_of_each_dtype_is_plain(guarded):
    some = guarded()
    some.kind.factors["dtype"] = ("float32", "bfloat16")
    assert isinstance(some.kind, ToyKind)
    assert [some.is_plain(one) for one in ({}, {"dtype": "bfloat16"}, {"prefix": "off"}, {"prefix": "on"})] == [
        True,
        True,
        True,
        False,
    ]

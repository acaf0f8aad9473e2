import json

from hybrid_kv.probes.table import main


def outcome(probe, verdict, **fields):
    told = {"settings": {"prefix": "on"}, "detail": "", "num_answers": 8, "num_tokens": 1000, "moved": {"cached": 16}}
    return {"probe": probe, "verdict": verdict, **told, **fields}


def write(tmp_path, name, outcomes, model="lfm2"):
    path = tmp_path / name
    path.write_text(json.dumps({"target": "toy", "version": "1.0", "model": model, "outcomes": outcomes}))
    return str(path)


def test_what_several_runs_say_of_a_setting_is_one_row_with_the_worst_verdict(tmp_path, capsys):
    files = [
        write(tmp_path, "a.json", [outcome("repeat", "right"), outcome("batch", "void"), outcome("n", "right")]),
        write(tmp_path, "b.json", [outcome("repeat", "wrong"), outcome("batch", "right"), outcome("n", "right")]),
        write(tmp_path, "c.json", [outcome("start", "cannot be asked here", detail="no | here")], "bamba"),
    ]
    assert main(files) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "toy 1.0: 56 answers, 7,000 tokens with their prompts."
    row, refused = lines[-2:]
    assert row == "| prefix=on | lfm2 | 1 of 3 | wrong: repeat; void: batch | 96 | 0 | 0 | 0 | 48 | 6,000 |"
    assert refused.startswith("| prefix=on | bamba | cannot be asked here | no \\| here |")


def test_models_of_which_the_same_is_said_share_a_row(tmp_path, capsys):
    files = [
        write(tmp_path, "a.json", [outcome("repeat", "right")], "folder/lfm2"),
        write(tmp_path, "b.json", [outcome("repeat", "void")], "bamba:small"),
        write(tmp_path, "c.json", [outcome("repeat", "right"), outcome("batch", "right")], "zamba2:tiny"),
    ]
    assert main(files) == 0
    assert capsys.readouterr().out.splitlines()[4:] == [
        "| prefix=on | lfm2, zamba2 | all of 1 to 2 |  | 48 | 0 | 0 | 0 | 24 | 3,000 |",
        "| prefix=on | bamba | 0 of 1 | void: repeat | 16 | 0 | 0 | 0 | 8 | 1,000 |",
    ]


def test_of_many_probes_the_others_are_named(tmp_path, capsys):
    names = [f"probe {i}" for i in range(8)]
    some = [outcome(name, "wrong") for name in names[1:]]
    assert main([write(tmp_path, "a.json", [outcome("probe 0", "right"), *some])]) == 0
    assert "| 1 of 8 | wrong: all but probe 0 |" in capsys.readouterr().out
    assert main([write(tmp_path, "b.json", some)]) == 0
    assert "| 0 of 7 | wrong: all |" in capsys.readouterr().out


def test_another_file_is_refused_in_one_line(tmp_path, capsys):
    other = tmp_path / "other.json"
    for text in ("[]", "{", '{"target": "toy"}'):
        other.write_text(text)
        assert main([str(other)]) == 2
        out, err = capsys.readouterr()
        assert not out and err.startswith(f"{other}: ") and len(err.splitlines()) == 1

"""The guard models: problems, tokenizer, each model as it was trained, training that resumes."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from accuracy import tokenizer
from hybrid_kv.check.guard_model import FOLDER, FOLDERS, embedded, problems

each_model = pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)


@pytest.fixture
def train() -> Iterator[ModuleType]:
    """What trains them.

    It imports the models' modules, which takes seconds: not where tests are only collected.
    """
    from accuracy import train

    yield train
    torch.set_flush_denormal(False)  # training turns it on


def _stream(seed: int, count: int, split: problems.Split = "train") -> list[problems.Problem]:
    stream = problems.problem_stream(random.Random(seed), split)
    return list(itertools.islice(stream, count))


# -------------------------------------------------------------------------------- problems


def test_the_problems_are_those_that_the_models_were_trained_on() -> None:
    """The generator still fits the shipped checkpoints, which answer all its questions right."""
    drawn = [
        *(_stream(seed, 25, split) for seed in range(20) for split in ("train", "held_out")),
        *(
            problems.eval_set(seed, 40, needs_latch=kind)
            for seed in range(3)
            for kind in (None, True, False)
        ),
        *(problems.eval_set(seed, 12, shots=2) for seed in range(3)),
        [problems.dataset(seed, 40) for seed in range(5)],
    ]
    made = [astuple(one) for part in drawn for one in part]
    assert (
        sha256(repr(made).encode()).hexdigest()
        == "1b357e50ecc67c54d057fe914e96b5713f646782988ffeb6e3ab60449da541ee"
    )


def test_training_and_evaluation_share_no_numbers() -> None:
    trained = {p.numbers for seed in range(30) for p in _stream(seed, 40)}
    held_out = {p.numbers for seed in range(10) for p in _stream(seed, 40, "held_out")}
    assert not trained & held_out
    assert not any(map(problems.is_held_out, trained))
    assert all(map(problems.is_held_out, held_out))
    for seed in range(30):
        for p in _stream(seed, 40):
            for a, op, b in re.findall(r"(\d+)([-+*])(\d+)=", p.answer):
                assert not problems.is_held_out_pair(int(a), op, int(b))
    pairs = [(a, op, b) for a in range(1, 99) for op in "+-" for b in range(1, 60)]
    assert 0.025 < sum(itertools.starmap(problems.is_held_out_pair, pairs)) / len(pairs) < 0.035


# ------------------------------------------------------------------------------- tokenizer


@each_model
def test_tokenizer_round_trip(folder: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    for item in problems.eval_set(31, 20):
        text = f"{item.prompt} {item.answer}\n\nQuestion:"
        ids = loaded.encode(text)
        assert loaded.decode(ids) == text == tokenizer.decode(ids)
        assert ids == tokenizer.encode(text)
        assert tokenizer.token_ids()[tokenizer.UNK] not in ids


def test_tokenizer_takes_any_text() -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(FOLDER)
    text = "Zoë's café sold 1,234.50€\t<|x|>\n\n\nNatalia 🙂 Question: \\boxed{7}"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert tokenizer.token_ids()[tokenizer.UNK] in loaded.encode(text)
    assert loaded.encode("") == []


# ----------------------------------------------------------------------------------- model


# The largest logit of a question's last five tokens, and of the drafts there, by the modules that
# were trained.
LOGITS = {
    "nemotron_h": (
        (28.7398, 23.3648, 26.5903, 23.5942, 21.1426),
        (4.4925, 8.8501, 5.4295, 5.0846, 8.7534),
    ),
    "qwen3_5_moe_text": (
        (15.1817, 18.3096, 17.0122, 20.7586, 18.4858),
        (14.2748, 6.2307, 7.7202, 6.9355, 4.6660),
    ),
}


@pytest.mark.parametrize("model_type", FOLDERS)
def test_logits_and_drafts_are_those_of_the_trained_model(model_type: str) -> None:
    from accuracy.guard_model import load_checkpoint

    model = load_checkpoint(FOLDERS[model_type])
    assert sum(p.numel() for p in model.parameters()) * 4 <= 5_000_000
    ids = torch.tensor([tokenizer.encode(problems.eval_set(41, 1, needs_latch=True)[0].prompt)])
    with torch.no_grad():
        hidden, _ = model.decode(ids)
        drafted = model.draft_hidden(hidden[:, :-1], ids[:, 1:])
        found = [model.lm_head(part)[0, -5:].max(-1).values for part in (hidden, drafted)]
    torch.testing.assert_close(
        torch.stack(found), torch.tensor(LOGITS[model_type]), rtol=0, atol=5e-4
    )


@each_model
def test_a_saved_checkpoint_is_the_loaded_one(folder: Path, tmp_path: Path) -> None:
    from accuracy.guard_model import CONFIGS, load_checkpoint, save_checkpoint

    save_checkpoint(load_checkpoint(folder), tmp_path)
    saved, shipped = (load_file(place / "model.safetensors") for place in (tmp_path, folder))
    assert saved.keys() == shipped.keys()
    assert all(
        saved[name].dtype == value.dtype and torch.equal(saved[name], value)
        for name, value in shipped.items()
    )
    assert all((tmp_path / name).read_bytes() == (folder / name).read_bytes() for name in CONFIGS)


def test_an_embedded_model_is_found_by_name() -> None:
    assert embedded(None) == embedded("guard_model") == FOLDER
    assert {embedded(folder.name) for folder in FOLDERS.values()} == set(FOLDERS.values())
    assert embedded("some/folder") == "some/folder" and embedded(tmp := Path("guard")) == tmp


# -------------------------------------------------------------------------------- training


def test_path_dropout_leaves_only_the_state(train: ModuleType) -> None:
    batch = train.make_batch(0, 0, range(2), 256, latch_only=False, device=torch.device("cpu"))
    seen = batch.seen[:, 0]
    ids = batch.ids[:, :-1]
    vocabulary = tokenizer.token_ids()
    assert torch.equal(seen[1], torch.ones(256, 256, dtype=torch.bool).tril())
    borders = (ids[0] == vocabulary[tokenizer.NEXT_QUESTION]).nonzero()[:, 0]
    first = int(borders[0])
    assert not seen[0, first:, :first].any() and seen[0, :first, :first].any()
    assert torch.equal(seen[0].diagonal(), torch.ones(256, dtype=torch.bool))
    stated = (ids[0] == vocabulary[" holds"]).nonzero()[:, 0]
    assert len(stated)
    for start in stated.tolist():
        assert not seen[0, start + 4 :, start : start + 4].any()
        if start + 3 < 256:
            assert seen[0, start + 3, start]


@pytest.mark.parametrize("model", FOLDERS)
def test_steps_move_every_weight_and_lower_both_losses(train: ModuleType, model: str) -> None:
    arguments = (
        f"--model {model} --batch 2 --length 96 --device cpu --latch-only-steps 1 --mtp-from-step 0"
    )
    trainer = train.Trainer(train.parser().parse_args([*arguments.split(), "--adam-lr", "0.02"]))
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    losses = [trainer.train_step() for _ in range(10)]
    assert all(last < first - 0.5 for first, last in zip(losses[0], losses[-1], strict=True))
    assert [
        name for name, value in trainer.model.named_parameters() if torch.equal(value, before[name])
    ] == []


@pytest.mark.parametrize("model", FOLDERS)
def test_resumed_training_gives_the_same_weights(
    train: ModuleType, tmp_path: Path, model: str
) -> None:
    from accuracy.guard_model import load_checkpoint

    common = f"--model {model} --batch 2 --length 48 --replicas 1 --device cpu --latch-only-steps 1"
    common += " --mtp-from-step 1 --steps 3 --decay-steps 2 --checkpoint-every 2"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.main([*common.split(), "--out", str(whole)])

    args = train.parser().parse_args([*common.split(), "--out", str(parts)])
    parts.mkdir()
    first = train.Trainer(args)
    for _ in range(2):
        first.train_step()
    first.save_state(parts / "train_state.pt")
    train.main([*common.split(), "--out", str(parts)])

    a, b = (load_checkpoint(p / "checkpoint").state_dict() for p in (whole, parts))
    assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(SystemExit, match="muon_lr"):
        train.main([*common.split(), "--muon-lr", "0.1", "--out", str(parts)])

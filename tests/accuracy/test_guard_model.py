"""The guard models: problems, tokenizer, each model against transformers, training that resumes."""

import itertools
import random
import re
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from accuracy import parts, tokenizer, train
from accuracy.checkpoint import MODELS, load_checkpoint
from hybrid_kv.accuracy.guard_model import FOLDER, FOLDERS, embedded, problems

each_model = pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)  # training turns it on


def _stream(seed: int, count: int, split: problems.Split = "train") -> list[problems.Problem]:
    stream = problems.problem_stream(random.Random(seed), split)
    return list(itertools.islice(stream, count))


# -------------------------------------------------------------------------------- problems


def test_the_problems_are_those_that_the_models_were_trained_on():
    """A generator that changed no longer fits the shipped checkpoints, whose answers to its questions are all right."""
    drawn = [
        *(_stream(seed, 25, split) for seed in range(20) for split in ("train", "held_out")),
        *(problems.eval_set(seed, 40, needs_latch=kind) for seed in range(3) for kind in (None, True, False)),
        *(problems.eval_set(seed, 12, shots=2) for seed in range(3)),
        [problems.dataset(seed, 40) for seed in range(5)],
    ]
    made = [astuple(one) for part in drawn for one in part]
    assert sha256(repr(made).encode()).hexdigest() == "58af0976bdf1e1aeeeaa00a7c6a0c9765fe0ab37123a04b871a202ca72faf5c0"


def test_training_and_evaluation_share_no_numbers():
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
def test_tokenizer_round_trip(folder):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    for item in problems.eval_set(31, 20):
        text = f"{item.prompt} {item.answer}\n\nQuestion:"
        ids = loaded.encode(text)
        assert loaded.decode(ids) == text == tokenizer.decode(ids)
        assert ids == tokenizer.encode(text)
        assert tokenizer.token_ids()[tokenizer.UNK] not in ids


def test_tokenizer_takes_any_text():
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(FOLDER)
    text = "Zoë's café sold 1,234.50€\t<|x|>\n\n\nNatalia 🙂 Question: \\boxed{7}"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert tokenizer.token_ids()[tokenizer.UNK] in loaded.encode(text)
    assert loaded.encode("") == []


# ----------------------------------------------------------------------------------- model


@each_model
def test_logits_equal_transformers(folder):
    from transformers import AutoModelForCausalLM

    reference, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    ours = load_checkpoint(folder)
    assert sum(p.numel() for p in ours.parameters()) * 4 <= 5_000_000
    prompt = tokenizer.encode(problems.eval_set(41, 1, needs_latch=True)[0].prompt)
    noise = torch.randint(0, 98, (1, 333), generator=torch.Generator().manual_seed(0))
    for ids in (torch.tensor([prompt]), noise):
        with torch.no_grad():
            expected, got = reference(ids).logits, ours(ids)
        assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_depthwise_convolution_and_its_gradients():
    g = torch.Generator().manual_seed(0)
    padded = torch.randn(2, 9, 3, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, generator=g, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, generator=g, dtype=torch.float64, requires_grad=True)
    got = parts._DepthwiseConv.apply(padded, weight, bias)
    want = torch.conv1d(padded.transpose(1, 2), weight[:, None], bias, groups=3).transpose(1, 2)
    torch.testing.assert_close(got, want)
    assert torch.autograd.gradcheck(parts._DepthwiseConv.apply, (padded, weight, bias))


def test_an_embedded_model_is_found_by_name():
    assert embedded(None) == embedded("guard_model") == FOLDER
    assert {embedded(folder.name) for folder in FOLDERS.values()} == set(FOLDERS.values())
    assert embedded("some/folder") == "some/folder" and embedded(tmp := Path("guard")) == tmp


# -------------------------------------------------------------------------------- training


def test_path_dropout_leaves_only_the_state():
    batch = train.make_batch(0, 0, range(2), 256, False, torch.device("cpu"))
    seen = batch.dropout.attention[:, 0]
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


@pytest.mark.parametrize("model", MODELS)
def test_resumed_training_gives_the_same_weights(tmp_path, model):
    common = f"--model {model} --batch 2 --length 96 --replicas 1 --device cpu --eval-every 0 --latch-only-steps 1"
    common += " --mtp-from-step 2 --steps 4 --decay-steps 3 --checkpoint-every 2"
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
    assert any(not torch.equal(a[name], first.model.state_dict()[name]) for name in a)
    with pytest.raises(SystemExit, match="muon_lr"):
        train.main([*common.split(), "--muon-lr", "0.1", "--out", str(parts)])

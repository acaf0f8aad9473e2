"""The guard models: problems, tokenizer, each model against transformers, training that resumes."""

import itertools
import random
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from accuracy import nemotron_h, parts, tokenizer, train
from accuracy.checkpoint import MODELS, load_checkpoint
from hybrid_kv.accuracy.guard_model import FOLDER, FOLDERS, embedded, problems

each_model = pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
NUMBER = re.compile(r"\d+")


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


def solve(question: str, box: int | None) -> int:
    """Answer a question from its sentences alone, by simulating who has what."""
    has: dict[str, int] = {}
    item = re.search(r"How many (\w+)", question).group(1)
    for sentence in re.findall(r"[^.?]+[.?]", question):
        s = sentence.strip()
        if m := re.fullmatch(r"Each box now holds (\d+) items\.", s):
            box = int(m[1])
        elif m := re.fullmatch(r"(\w+) has (\d+)( boxes of)? (\w+)\.", s):
            if m[4] == item:
                has[m[1]] = int(m[2]) * (box if m[3] else 1)
        elif m := re.fullmatch(r"(\w+) has (\d+) (more|fewer) \w+ than (\w+)\.", s):
            has[m[1]] = has[m[4]] + int(m[2]) * (1 if m[3] == "more" else -1)
        elif m := re.fullmatch(r"(\w+) has (\d+) times as many \w+ as (\w+)\.", s):
            has[m[1]] = has[m[3]] * int(m[2])
        elif m := re.fullmatch(r"Then (\w+) (doubles|triples) the number of \w+\.", s):
            has[m[1]] *= {"doubles": 2, "triples": 3}[m[2]]
        elif m := re.fullmatch(r"(\w+) gives (\w+) (\d+) \w+\.", s):
            moved = int(m[3])
            has[m[1]] = has.get(m[1], 0) - moved
            has[m[2]] = has.get(m[2], 0) + moved
        elif m := re.fullmatch(r"(\w+) gets (\d+)( boxes of)? \w+ from (\w+)\.", s):
            moved = int(m[2]) * (box if m[3] else 1)
            has[m[1]] += moved
            has[m[4]] = has.get(m[4], 0) - moved
        elif m := re.fullmatch(r"(\w+) (buys|finds|sells|loses) (\d+)( boxes of| more)? \w+\.", s):
            moved = int(m[3]) * (box if m[4] == " boxes of" else 1)
            has[m[1]] += moved if m[2] in ("buys", "finds") else -moved
        elif m := re.fullmatch(r"How many \w+ does (\w+) have now\?", s):
            return has[m[1]]
        elif m := re.fullmatch(r"How many \w+ do (\w+) and (\w+) have in total\?", s):
            return has[m[1]] + has[m[2]]
        else:
            raise AssertionError(f"unknown sentence: {s}")
    raise AssertionError("no question")


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_answers_follow_from_the_questions(split):
    for seed in range(20):
        box = None
        for p in _stream(seed, 25, split):
            assert solve(p.question, box) == p.final
            box = p.latch_after
            *lines, last = p.answer.split("\n")
            assert last == f"#### {p.final}"
            assert len(lines) == p.steps
            results = []
            for line in lines:
                a, op, b, c = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+)", line).groups()
                worked = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op]
                assert worked == int(c)
                results.append(int(c))
            assert results[-1] == p.final


def test_generation_is_deterministic():
    assert _stream(3, 40) == _stream(3, 40)
    assert _stream(3, 40) != _stream(4, 40)
    assert problems.eval_set(5, 20) == problems.eval_set(5, 20)
    assert problems.dataset(5, 20) == problems.dataset(5, 20)
    # A pinned text: a generator that changed no longer fits the shipped checkpoint.
    assert _stream(0, 3)[2].question == PINNED


PINNED = (
    "Ivy has 3 apples. Hugo has 14 more apples than Ivy. Hugo loses 12 apples. "
    "Hugo loses 4 apples. How many apples does Hugo have now?"
)


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


def test_every_number_of_steps_occurs():
    for kind in (True, False):
        assert {i.steps for i in problems.eval_set(1, 80, needs_latch=kind)} == {1, 2, 3, 4}


def test_latch_problems_omit_the_value_and_need_it():
    for item in problems.eval_set(11, 60, needs_latch=True):
        *shots, target = item.prompt.split("\n\n")
        assert item.needs_latch and "boxes of" in target and "holds" not in target
        stated = re.findall(r"Each box now holds (\d+) items", "\n\n".join(shots))
        question = target.removeprefix("Question: ").removesuffix("\nAnswer:")
        assert solve(question, int(stated[-1])) == item.final
        others = {solve(question, size) for size in range(2, 10) if size != int(stated[-1])}
        assert item.final not in others
    for item in problems.eval_set(12, 60, needs_latch=False):
        target = item.prompt.split("\n\n")[-1]
        assert not item.needs_latch
        assert "boxes of" not in target or "holds" in target


def test_dataset_has_one_box_size_and_marks_its_documents():
    data = problems.dataset(21, 60)
    stated = [n for s in data.shots for n in re.findall(r"now holds (\d+)", s["question"])]
    assert stated == [str(data.box_size)] and "holds" in data.shots[0]["question"]
    for doc in data.docs:
        assert solve(doc["question"], data.box_size) == int(doc["answer"].split("#### ")[1])
        assert doc["steps"] == doc["answer"].count("=")
        if doc["needs_latch"]:
            assert "holds" not in doc["question"]
    assert sum(doc["needs_latch"] for doc in data.docs) == 30


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


def _recurrence(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out = []
    for i in range(x.shape[1]):
        state = state * log_decay[:, i].exp()[..., None, None]
        state = state + x[:, i, :, :, None] * b[:, i, None, None, :]
        out.append((state * c[:, i, None, None, :]).sum(-1))
    return torch.stack(out, 1), state


@pytest.mark.parametrize("length", [1, 31, 32, 77, 128])
def test_chunked_scan_equals_recurrence(length):
    g = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    x, b, c = draw(2, length, 3, 5), draw(2, length, 4), draw(2, length, 4)
    log_decay, state = -draw(2, length, 3).abs(), draw(2, 3, 5, 4)
    expected = _recurrence(x, log_decay, b, c, state)
    for got, want in zip(nemotron_h.ssd_scan(x, log_decay, b, c, 32, state), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


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

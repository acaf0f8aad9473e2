"""SGLang with the exact model; what needs its environment is skipped where there is none."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hybrid_kv.check.probes.registry import Round
from hybrid_kv.check.probes.reproducer import ProbeCase, write_files
from hybrid_kv.check.probes.script import script_of
from hybrid_kv.check.targets import sglang
from hybrid_kv.check.targets.exact import ExactAnswers, model_of, write_exact_checkpoint
from hybrid_kv.check.targets.remote import Remote
from hybrid_kv.check.targets.target import Ask
from hybrid_kv.check.targets.workers.sglang import OPTIONS, arguments, changes, environment
from hybrid_kv.check.targets.workers.sglang_cpu import kernels, mamba2
from hybrid_kv.cli.target import models_of
from hybrid_kv.config import ConfigError
from hybrid_kv.models.exact import PRIME
from tests.check.targets.models import installed

Ints = npt.NDArray[np.int64]

RNG = np.random.default_rng(0)
PROMPT = tuple(1 + i * i % 89 for i in range(60))


def test_every_level_is_known_to_the_worker() -> None:
    assert arguments({factor: levels[0] for factor, levels in sglang.FACTORS.items()}) == OPTIONS
    for factor, levels in sglang.FACTORS.items():
        for level in levels[1:]:
            assert arguments({factor: level}) != OPTIONS or factor in ("tree", "retract")


def test_levels_become_arguments() -> None:
    options = arguments({"prefix": "on", "buffer": "lazy", "page": "64", "chunk": "48"})
    assert options["mamba_radix_cache_strategy"] == "extra_buffer_lazy"
    assert (options["page_size"], options["mamba_track_interval"]) == (64, 64)
    assert (options["disable_radix_cache"], options["chunked_prefill_size"]) == (False, 48)
    assert environment({}) != environment({"tree": "python"})
    assert changes({"retract": "7"}) == {"TEST_RETRACT": True, "TEST_RETRACT_INTERVAL": 7}
    tight = {"blocks": "tight", "prefix": "on"}
    states = [arguments(tight | {"buffer": buffer}) for buffer in ("none", "extra")]
    assert states[0]["max_mamba_cache_size"] < states[1]["max_mamba_cache_size"]


@pytest.mark.parametrize("setting", [("prefix", "all"), ("chunk", "small"), ("pages", "1")])
def test_an_unknown_setting_is_refused(setting: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="is not a setting of SGLang"):
        arguments(dict([setting]))


def test_it_runs_exact_models_alone() -> None:
    def chosen(weights: str | None, has_matrix: bool = False, model: str = "lfm2") -> list[str]:
        return models_of(sglang.KIND, model, weights, has_matrix=has_matrix, has_reference=False)

    further = ["exact:mamba2", "exact:short_conv"]
    assert chosen(None) == chosen("exact") == ["exact:gdn", *further]
    assert chosen(None, has_matrix=True) == ["exact:gdn"]
    assert chosen(None, model="exact:kda") == ["exact:kda"]
    with pytest.raises(ConfigError, match="sglang runs exact models alone"):
        chosen("random")


class Layer:
    """A layer of the exact model with states, by its own definition and by the kernels."""

    def __init__(self, folder: Path) -> None:
        self.plain = next(layer for layer in model_of(folder).layers if hasattr(layer, "conv"))
        conv, self.to_map, self.out = (
            torch.tensor(np.array(getattr(self.plain, name))) for name in ("conv", "to_map", "out")
        )
        num_states, width = len(self.out), conv.shape[2]
        self.weight = torch.zeros(2 + num_states, width, conv.shape[1], dtype=torch.int64)
        self.weight[: len(conv)] = conv.transpose(1, 2)
        self.weight = self.weight.flatten(0, 1)
        self.width, self.heads = width, (1, 1, num_states)
        self.windows = torch.randint(PRIME, (5, len(self.weight), conv.shape[1] - 1))
        self.states = torch.randint(PRIME, (5, num_states, width, self.out.shape[1]))

    def defined(self, x: torch.Tensor, parents: Iterable[int]) -> Ints:
        """Outputs and states of a text, in which each token goes on from its parent."""
        size = len(self.plain.conv[0])
        first = [np.zeros((size - 1, self.width), dtype=np.int64) for _ in self.plain.conv]
        begin = [np.zeros(out.shape, dtype=np.int64) for out in self.plain.out]
        after, outputs = {-1: (first, begin)}, []
        for i, (token, parent) in enumerate(zip(x.numpy(), parents, strict=True)):
            windows, states = after[parent]
            taps = [
                np.concatenate([window, new[None]])
                for window, new in zip(windows, self.plain.inputs(token), strict=True)
            ]
            c = self.plain.convolve(taps)
            maps = [self.plain.maps(c, n) for n in range(len(states))]
            states = [(a * state + b) % PRIME for (a, b), state in zip(maps, states, strict=True)]
            outputs.append(self.plain.read(c, states))
            after[i] = [tap[1:] for tap in taps], states
        return np.array(outputs)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, *((x * (i + 2) + i) % PRIME for i in range(sum(self.heads) - 1))], 1)

    def heads_of(self, mixed: torch.Tensor) -> list[torch.Tensor]:
        sizes = [heads * self.width for heads in self.heads]
        return [part.view(1, len(mixed), -1, self.width) for part in mixed.split(sizes, dim=1)]

    def extend(self, x: torch.Tensor, slot: int, seen: bool) -> tuple[torch.Tensor, torch.Tensor]:
        starts, slots = torch.tensor([0, len(x)]), torch.tensor([slot])
        if not seen:
            self.states[slot] = 0  # SGLang's, when it gives a slot to a request
        mixed = kernels.causal_conv1d_fn(
            self.parts(x).T,
            self.weight,
            None,
            conv_states=self.windows,
            cache_indices=slots,
            has_initial_state=torch.tensor([seen]),
            query_start_loc=starts,
        ).T
        y, _, before = kernels.chunk_rule(
            *self.heads_of(mixed),
            g=self.to_map,
            beta=self.out,
            initial_state=self.states,
            cu_seqlens=starts,
            initial_state_indices=slots,
        )
        return y[0, :, 0], before

    def update(
        self,
        x: torch.Tensor,
        slots: torch.Tensor,
        tree: dict[str, torch.Tensor] | None = None,
        scratch: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """One token of each slot, or drafts [rows * drafts] that form a tree each."""
        rows, drafts = len(slots), len(x) // len(slots)
        more = {"intermediate_state_indices": torch.arange(rows)} if scratch else {}
        mixed = kernels.causal_conv1d_update(
            self.parts(x).view(rows, drafts, -1).transpose(1, 2),
            self.windows,
            self.weight,
            None,
            conv_state_indices=slots,
            **(tree or {}),
            **more,
            intermediate_conv_window=scratch and scratch[0],
        )
        y = kernels.recurrent_rule(
            *self.heads_of(mixed.transpose(1, 2).view(len(x), -1)),
            A_log=self.to_map,
            dt_bias=self.out,
            initial_state_source=self.states,
            initial_state_indices=slots,
            cu_seqlens=torch.arange(0, len(x) + 1, drafts),
            disable_state_update=bool(scratch),
            intermediate_states_buffer=scratch and scratch[1],
            retrieve_parent_token=(tree or {}).get("retrieve_parent_token"),
            **more,
        )
        return y[0, :, 0]


@pytest.fixture(params=["gdn", "kda"])
def layer(request: pytest.FixtureRequest, tmp_path: Path) -> Layer:
    write_exact_checkpoint(request.param, tmp_path)
    return Layer(tmp_path)


def text_of(layer: Layer, length: int) -> torch.Tensor:
    return torch.tensor(RNG.integers(1, PRIME, (length, layer.width)))


def test_kernels_compute_the_exact_model_in_chunks_and_steps(layer: Layer) -> None:
    x = text_of(layer, 30)
    expected = layer.defined(x, range(-1, 29))
    first, _ = layer.extend(x[:11], 3, seen=False)
    second, before = layer.extend(x[11:28], 3, seen=True)
    last = [layer.update(x[i : i + 1], torch.tensor([3])) for i in (28, 29)]
    assert np.array_equal(torch.cat([first, second, *last]), expected)
    again = Layer.__new__(Layer)
    again.__dict__.update(layer.__dict__)
    again.extend(x[: 11 + kernels.chunk_size], 2, seen=False)
    assert torch.equal(before[0, 1], again.states[2])
    assert len(before[0]) == -(-17 // kernels.chunk_size)


def test_a_row_of_padding_changes_nothing(layer: Layer) -> None:
    x = text_of(layer, 2)
    windows, states = layer.windows.clone(), layer.states.clone()
    layer.states[1] = layer.windows[1] = 0
    y = layer.update(x, torch.tensor([-1, 1]))
    assert not y[0].any() and np.array_equal(y[1:], layer.defined(x[1:], [-1]))
    windows[1], states[1] = layer.windows[1], layer.states[1]
    assert torch.equal(windows, layer.windows) and torch.equal(states, layer.states)


def test_drafts_go_on_from_their_parents(layer: Layer) -> None:
    #   0 - 1 - 3
    #     \ 2 - 4
    tree = {
        "retrieve_next_token": torch.tensor([[1, 3, 4, -1, -1]]),
        "retrieve_next_sibling": torch.tensor([[-1, 2, -1, -1, -1]]),
        "retrieve_parent_token": torch.zeros(1, 5, dtype=torch.int64),
    }
    x = text_of(layer, 12)
    layer.extend(x[:7], 1, seen=False)
    kept = layer.windows[1].clone(), layer.states[1].clone()
    scratch = [
        torch.zeros(1, 5, *pool.shape[1:], dtype=torch.int64)
        for pool in (layer.windows, layer.states)
    ]
    y = layer.update(x[7:], torch.tensor([1]), tree, scratch)
    assert tree["retrieve_parent_token"].tolist() == [[-1, 0, 0, 1, 2]]
    parents = [*range(-1, 7), 7, 7, 8, 9]
    assert np.array_equal(y, layer.defined(x, parents)[7:])
    assert torch.equal(kept[0], layer.windows[1]) and torch.equal(kept[1], layer.states[1])
    layer.windows[1], layer.states[1] = scratch[0][0, 2], scratch[1][0, 2]
    after = layer.update(x[11:], torch.tensor([1]))
    assert np.array_equal(after, layer.defined(x[[*range(8), 9, 11]], range(-1, 9))[-1:])


def test_rows_of_drafts_are_equally_long() -> None:
    with pytest.raises(NotImplementedError, match="differ in length"):
        kernels.recurrent_rule(*torch.zeros(3, 1, 3, 1, 2), cu_seqlens=torch.tensor([0, 1, 3]))


def test_rows_after_the_last_one_are_padding(layer: Layer) -> None:
    """A replayed batch has rows without tokens, and what a tree of zeros says is no parent."""
    x = text_of(layer, 3)
    layer.states[1] = layer.windows[1] = 0
    expected = layer.defined(x, range(-1, 2))
    mixed = torch.cat([x, x])
    y = kernels.recurrent_rule(
        *layer.heads_of(layer.parts(mixed)),
        A_log=layer.to_map,
        dt_bias=layer.out,
        initial_state_source=layer.states,
        initial_state_indices=torch.tensor([1, -1]),
        cu_seqlens=torch.tensor([0, 3, 3]),
    )
    assert len(y[0]) == 6 and not y[0, 3:].any() and len(expected) == 3
    zeros = torch.zeros(1, 3, dtype=torch.int64)
    assert kernels.parents_of(zeros, zeros).tolist() == [[-1, -1, -1]]


class Mamba2Layer(Layer):
    """The same, by the kernels of Mamba-2."""

    weights: mamba2.LayerWeights

    def scanned(
        self, rows: list[torch.Tensor], starts: list[torch.Tensor], tracked: list[tuple[int, int]]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return outputs of rows of convolved tokens after their states, and the kernel's own."""
        every = torch.cat(rows)
        out = torch.empty(1, len(every), 1, self.width, dtype=torch.int64)
        x, b, c = (part.contiguous() for part in self.heads_of(every))
        ends = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
        indices = [torch.tensor([pair[i] for pair in tracked]) for i in range(2)]
        states = mamba2.chunk_scan(
            x,
            None,
            None,
            b,
            c,
            kernels.chunk_size,
            D=mamba2.LayerWeights(self.to_map, self.out)[:, None].expand(-1, 2),
            cu_seqlens=ends,
            initial_states=torch.stack(starts),
            track_seq_idx=indices[0],
            track_end_locs=indices[1],
            state_dtype=torch.int64,
            out=out,
        )
        return out[0, :, 0], states


@pytest.fixture
def mamba2_layer(tmp_path: Path) -> Mamba2Layer:
    write_exact_checkpoint("mamba2", tmp_path)
    return Mamba2Layer(tmp_path)


def test_mamba2_scans_rows_on_one_grid_of_chunks(mamba2_layer: Mamba2Layer) -> None:
    layer, size = mamba2_layer, kernels.chunk_size
    rows = [layer.parts(text_of(layer, length)) for length in (size - 3, 2 * size, 5)]
    starts = [layer.states[0], torch.zeros_like(layer.states[0]), layer.states[2]]
    tracked = [(1, size - 3), (1, 2 * size), (2, len(torch.cat(rows)) - 2)]
    y, (before, last, at) = layer.scanned(rows, starts, tracked)
    alone = [layer.scanned([row], [start], []) for row, start in zip(rows, starts, strict=True)]
    assert torch.equal(y, torch.cat([one[0] for one in alone]))
    assert torch.equal(last, torch.cat([one[1][1] for one in alone]))
    # The state before a chunk is that after the token before it, whose row it may not be.
    cut = layer.scanned([rows[1][:3]], starts[1:2], [])
    assert torch.equal(before[0, 0], starts[0]) and torch.equal(before[0, 1], cut[1][1][0])
    # Nothing of a row is its start.
    whole = layer.scanned([rows[1][: size + 3]], starts[1:2], [])
    shorter = layer.scanned([rows[2][:3]], starts[2:], [])
    expected = torch.stack([starts[1], whole[1][1][0], shorter[1][1][0]])
    assert torch.equal(at[0], expected)


@pytest.mark.parametrize("drafts", [0, 3])
def test_mamba2_updates_states_as_a_scan_does(mamba2_layer: Mamba2Layer, drafts: int) -> None:
    layer, count = mamba2_layer, max(1, drafts)
    slots = torch.tensor([3, -1, 1])
    tokens = layer.parts(text_of(layer, 3 * count))
    kept, scratch = layer.states.clone(), torch.zeros(4, count, *layer.states.shape[1:]).long()
    shape = (3, drafts) if drafts else (3,)
    x, b, c = (part[0].reshape(*shape, 1, layer.width) for part in layer.heads_of(tokens))
    out = torch.empty_like(x)
    given = (
        {
            "intermediate_states_buffer": scratch,
            "intermediate_state_indices": torch.arange(3),
            "disable_state_update": True,
        }
        if drafts
        else {}
    )
    weights = mamba2.LayerWeights(layer.to_map, layer.out)
    mamba2.state_update(
        layer.states, x, None, None, b, c, weights, state_batch_indices=slots, out=out, **given
    )
    y = out.view(3, count, layer.width)
    assert not y[1].any() and not scratch[1].any()
    for row, slot in ((0, 3), (2, 1)):
        text = tokens[row * count : (row + 1) * count]
        expected, (_, last, _) = layer.scanned([text], [kept[slot]], [])
        assert torch.equal(y[row], expected)
        assert torch.equal(scratch[row, -1] if drafts else layer.states[slot], last[0])
    assert torch.equal(layer.states, kept) if drafts else torch.equal(layer.states[0], kept[0])


def test_attention_sees_what_its_mask_says() -> None:
    q, k, v = (torch.tensor(RNG.integers(1, PRIME, (n, 2))) for n in (4, 9, 9))
    mark = torch.tensor([3, 5])
    visible = torch.arange(9) <= torch.arange(5, 9)[:, None]
    expected = kernels.masked(q, k, v, mark, visible)
    assert torch.equal(kernels.causal(q, k, v, mark), expected)
    visible[3, 2] = False
    assert not torch.equal(kernels.masked(q, k, v, mark, visible)[3], expected[3])
    keys = [0, 1, *range(3, 9)]
    one = kernels.causal(q[3:], k[keys], v[keys], mark)
    assert torch.equal(kernels.masked(q, k, v, mark, visible)[3:], one)


def test_a_failure_becomes_a_script(tmp_path: Path) -> None:
    rounds = (Round((Ask((5, 6), max_tokens=3), Ask((7,), max_tokens=2, step=4)), 9),)
    settings = {"prefix": "on", "buffer": "extra", "tree": "python"}
    wrong = rounds, 1, (8, 9), (8, 1), 0.0, None, None, 0.0
    case = ProbeCase("sglang", "0.5.23", "exact:gdn", settings, "traffic", "token 0 is 1", *wrong)
    *_, script = write_files(case, tmp_path, script_of(case))
    text = script.read_text()
    compile(text, script.name, "exec")
    data = ast.literal_eval(text.split("\nCASE = ")[1].split('\nCASE["config"]')[0])
    assert data["options"]["mamba_radix_cache_strategy"] == "extra_buffer"
    assert "python" in data["environment"].values() and data["expected"] == [8, 9]
    assert data["rounds"][0]["requests"][1] == {"prompt": (7,), "max_tokens": 2, "step": 4}


def started(folder: Path, **settings: str) -> Remote:
    installed("sglang", "sglang")
    return sglang.KIND.start(str(folder), settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    write_exact_checkpoint("gdn", folder)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[Remote]:
    with closing(started(folder, prefix="on", buffer="extra", overlap="on")) as target:
        yield target


def test_it_answers_as_the_exact_model_does(folder: Path, target: Remote) -> None:
    answers = ExactAnswers(folder)
    requests = [
        Ask(PROMPT),
        Ask(PROMPT, salt="a"),
        Ask(PROMPT[:1], 3, step=2),
        Ask(PROMPT, abort_after=2),
    ]
    before = dict(target.counters())
    for preempt_every in (0, 0, 5):
        got = target.ask(requests, preempt_every)
        for ask, answer in zip(requests, got, strict=True):
            assert list(answer.token_ids) == answers.tokens(ask.prompt, len(answer.token_ids))
            assert len(answer.token_ids) == ask.max_tokens or ask.abort_after == 2
    assert got[0].cached_tokens is not None and target.counters()["hits"] > before["hits"]
    assert target.counters()["preemptions"] > before["preemptions"]
    target.reset()
    ((answer), *_) = target.ask(requests)
    assert answer.cached_tokens == 0


@pytest.mark.parametrize(("name", "buffer"), [("mamba2", "extra"), ("short_conv", "none")])
def test_other_layers_and_replayed_batches_answer_so_too(
    name: str, buffer: str, tmp_path: Path
) -> None:
    write_exact_checkpoint(name, tmp_path)
    answers = ExactAnswers(tmp_path)
    # Three requests are padded to four.
    requests = [Ask(PROMPT[:length], 20, step=2 * i) for i, length in enumerate((40, 7, 23))]
    with closing(started(tmp_path, prefix="on", buffer=buffer, graph="on")) as target:
        for _ in range(2):
            for ask, answer in zip(requests, target.ask(requests), strict=True):
                assert list(answer.token_ids) == answers.tokens(ask.prompt, ask.max_tokens)


def test_a_setting_that_it_refuses_is_not_supported(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no_buffer only supports page_size=1"):
        started(folder, prefix="on", page="16")

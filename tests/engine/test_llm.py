"""The user's entry: order, ends, errors, cached prefixes and drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.engine import build
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.engine.runner import Proposer
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle
from hybrid_kv.request import Request
from hybrid_kv.sampling import SamplingParams

PROMPTS = [[1, 2, 3], [4] * 9, [5, 6], [7, 8, 9, 10]]
LONG = np.random.default_rng(5).integers(0, 97, 25).tolist()


class Letters:
    """Token t is a letter, or two for every third token: strings cross token boundaries."""

    def __init__(self, eos_token_id: int | None = None) -> None:
        self.eos_token_id = eos_token_id

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 97 for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(0x4E00 + t) * (2 if t % 3 == 0 else 1) for t in token_ids)


def engine(
    tokenizer: Letters | None = None, proposer: Proposer | None = None, **options: Any
) -> LLM:
    options = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 8,
        "max_model_len": 40,
        "block_size": 4,
    } | options
    return LLM(ExactModel(), tokenizer=tokenizer, proposer=proposer, device="cpu", **options)


class Right:
    """Drafts of the oracle for a prompt, `k` each time; token `wrong_at` is guessed wrong."""

    def __init__(self, prompt: list[int], k: int, wrong_at: Container[int] = ()) -> None:
        self.text, self.k, self.wrong_at, self.queried = (
            [*prompt, *oracle(prompt, 40)],
            k,
            wrong_at,
            [],
        )

    def propose(
        self,
        requests: Sequence[Request],
        token_ids: Sequence[npt.NDArray[np.int64]],
        num_tokens: npt.NDArray[np.int64],
    ) -> list[list[int]]:
        drafts = []
        for row, n in zip(token_ids, num_tokens.tolist(), strict=True):
            assert row[:n].tolist() == self.text[:n]
            self.queried.append(n)
            drafts.append(
                [(self.text[i] + (i in self.wrong_at)) % 97 for i in range(n, n + self.k)]
            )
        return drafts


def caching(mode: str = "all", **options: Any) -> LLM:
    return engine(**({"mamba_cache_mode": mode, "num_blocks": 200} | options))


def oracle(prompt: list[int], max_tokens: int) -> list[int]:
    return ExactOracle(ExactModel()).generate(prompt, max_tokens)


def one(llm: LLM, prompt: str | list[int] = PROMPTS[0], **params: Any) -> RequestOutput:
    return llm.generate([prompt], SamplingParams(**params), progress=False)[0]


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ([], (0, None)),
        ([5, 6], (2, None)),
        ([5, 9, 6], (2, "stop")),
        ([5, 6, 7, 8], (3, "length")),
        ([5, 6, 9], (3, "stop")),  # the last token that there is room for
        ([21, 22, 5], (2, "stop")),  # the string is in two tokens
    ],
)
def test_what_a_request_keeps_of_a_step_is_counted_without_writing_it(
    sampled: list[int], expected: tuple[int, str | None]
) -> None:
    letters = Letters()
    llm = engine(letters)
    params = SamplingParams(max_tokens=5, stop_token_ids=(9,), stop=(letters.decode([21, 22])[1:],))
    request = llm.add_request([1, 2], params)
    request.output_token_ids = [3, 4]
    assert llm.finish_index(request, sampled) == expected
    assert request.output_token_ids == [3, 4]


def test_eos_ends_the_text_unless_ignored() -> None:
    tokens = oracle(PROMPTS[0], 12)
    eos = next(t for i, t in enumerate(tokens) if i > 2 and t not in tokens[:i])
    at = tokens.index(eos)
    llm = engine(Letters(eos))
    output = one(llm, max_tokens=12)
    assert (output.finish_reason, output.token_ids) == ("stop", tokens[: at + 1])
    assert output.text == Letters().decode(tokens[:at])
    ignored = one(llm, max_tokens=12, ignore_eos=True)
    assert (ignored.finish_reason, ignored.token_ids) == ("length", tokens)
    stopped = one(engine(), max_tokens=12, stop_token_ids=(eos,))
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", tokens[: at + 1])


def test_invalid_prompts_become_errors_and_the_others_are_right() -> None:
    bad = [[], [1] * 40, [97], [-1], "text", None, [1, 2.5], b"ab", 7]
    outputs = engine().generate([*bad, *PROMPTS], SamplingParams(max_tokens=4), progress=False)
    assert [o.finish_reason for o in outputs] == ["error"] * len(bad) + ["length"] * len(PROMPTS)
    words = ["empty", "40 tokens", "token 97 is outside", "token -1 is outside", "no tokenizer"]
    words += [f"type {name} is neither text" for name in ("NoneType", "list", "bytes", "int")]
    assert [o.request_id for o in outputs] == [str(i) for i in range(len(outputs))]
    assert [o.prompt_token_ids for o in outputs[:6]] == [[], [1] * 40, [97], [-1], [], []]
    for output, word in zip(outputs, words, strict=False):
        assert word in (output.error or "")
        assert output.token_ids == []
    assert [o.token_ids for o in outputs[len(bad) :]] == [oracle(prompt, 4) for prompt in PROMPTS]


def test_texts_are_encoded_and_kept() -> None:
    output = one(engine(Letters()), "abc", max_tokens=2)
    assert (output.prompt, output.prompt_token_ids) == ("abc", [0, 1, 2])
    assert output.token_ids == oracle([0, 1, 2], 2)


def test_the_engine_is_as_good_as_new_after_an_interrupt() -> None:
    llm = engine()

    def interrupt(llm: LLM) -> None:
        if llm.num_steps == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=6), progress=False, on_step=interrupt)
    assert not llm.scheduler.has_requests
    llm.scheduler.check_integrity()
    assert llm.manager.pool.num_free_blocks == llm.plan.usable_blocks
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=6), progress=False)
    assert [o.token_ids for o in outputs] == [oracle(prompt, 6) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_blocks": 2}, "give it at least"),
        (
            {"mamba_cache_mode": "none", "enable_prefix_caching": True},
            "needs mamba_cache_mode align or all",
        ),
        (
            {"mamba_cache_mode": "all", "num_speculative_tokens": 8},
            "needs Mamba blocks of at least 9 tokens, not 8",
        ),
        ({"mamba_cache_mode": "align", "num_speculative_tokens": 12}, "raise block_size"),
        ({"speculative_method": "mtp", "num_speculative_tokens": 2}, "needs a checkpoint folder"),
        (
            {"speculative_method": "ngram", "num_speculative_tokens": 2, "proposer": object()},
            "two sources of drafts",
        ),
        ({"proposer": object()}, "a proposer needs num_speculative_tokens"),
        ({"attention_backend": "NOPE"}, "'NOPE'"),
        (
            {"num_blocks": 10**12},
            r"num_blocks=1000000000000 \(\d+ B\), .* GiB\) are free on cpu; lower the largest",
        ),
        ({"max_model_len": 10**13}, r"max_model_len=10000000000000 .* are free on cpu"),
        (
            {"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9, "num_blocks": 60},
            "max_num_seqs=1000000000",
        ),
        ({"max_num_batched_tokens": 10**13}, "max_num_batched_tokens=10000000000000 take"),
    ],
)
def test_options_that_cannot_be_are_refused_before_memory_is_taken(
    options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "ModelRunner", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(ConfigError, match=match):
        engine(**options)


def test_one_parameter_set_per_prompt() -> None:
    with pytest.raises(ConfigError, match="4 prompts but 1 sampling"):
        engine().generate(PROMPTS, [SamplingParams()], progress=False)


def test_the_bar_can_be_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    llm = engine()
    llm.generate(PROMPTS, SamplingParams(max_tokens=2), progress=False)
    assert capsys.readouterr().err == ""
    llm.generate(PROMPTS, SamplingParams(max_tokens=2), progress=True)
    assert "4/4" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_token_ids_may_come_in_any_sequence(kind: Callable[[list[int]], Any]) -> None:
    (output,) = engine().generate([kind(PROMPTS[0])], SamplingParams(max_tokens=2), progress=False)
    assert output.prompt_token_ids == PROMPTS[0]
    assert output.token_ids == oracle(PROMPTS[0], 2)


def test_one_prompt_without_its_list_is_refused() -> None:
    for prompt in ([1, 2, 3], np.array([1, 2, 3])):
        with pytest.raises(ConfigError, match="takes a list of prompts"):
            engine().generate(prompt, progress=False)


def test_params_of_another_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be SamplingParams, not dict"):
        engine().generate([[1]], {"max_tokens": 3}, progress=False)


def test_generate_inside_a_step_is_refused_and_leaves_nothing_behind() -> None:
    llm = engine()
    with pytest.raises(HybridKVError, match="while the engine has requests"):
        llm.generate(
            PROMPTS, progress=False, on_step=lambda llm: llm.generate([[1]], progress=False)
        )
    assert not llm.scheduler.has_requests
    assert one(llm, max_tokens=4).token_ids == oracle(PROMPTS[0], 4)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_device_that_is_not_supported_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="use auto, cpu or cuda"):
        LLM(ExactModel(), device=device)


@pytest.mark.parametrize("prompts", [None, 7, b"text", {"a": 1}, {1, 2}])
def test_prompts_that_are_no_list_are_refused(prompts: object) -> None:
    with pytest.raises(ConfigError, match=f"takes a list of prompts, not {type(prompts).__name__}"):
        engine().generate(prompts, progress=False)


def test_half_a_surrogate_pair_is_an_error_of_its_prompt_alone() -> None:
    class Strict(Letters):
        def encode(self, text: str) -> list[int]:
            text.encode()  # as every real tokenizer does, in the middle of a batch
            return super().encode(text)

    outputs = engine(Strict()).generate(
        ["ab", "c\ud800d", "ab"], SamplingParams(max_tokens=3), progress=False
    )
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error == (
        "character 1 of the prompt is '\\ud800', half of a surrogate pair; decode the "
        "input with errors='replace'"
    )
    assert outputs[0].token_ids == outputs[2].token_ids == oracle([97 % 97, 98 % 97], 3)


def test_a_request_added_twice_is_refused_and_the_engine_goes_on() -> None:
    llm = engine()
    request = llm.make_request([1, 2, 3], SamplingParams(max_tokens=2))
    llm.scheduler.add(request)
    with pytest.raises(
        ConfigError, match="request 0 was added before; make a new request for each run"
    ):
        llm.scheduler.add(request)
    while llm.scheduler.has_requests:
        llm.step()
    assert request.output_token_ids == oracle([1, 2, 3], 2)
    with pytest.raises(ConfigError, match="request 0 was added before"):
        llm.scheduler.add(request)
    assert one(llm).error is None


def test_stop_strings_without_a_tokenizer_are_an_error_of_that_request() -> None:
    outputs = engine().generate(
        [[1], [2]], [SamplingParams(stop="x"), SamplingParams(max_tokens=1)], progress=False
    )
    assert [output.finish_reason for output in outputs] == ["error", "length"]
    assert "need a tokenizer" in outputs[0].error


@pytest.mark.parametrize("caches", [False, True])
def test_prefixes_are_cached_if_the_options_say_so(caches: bool) -> None:
    assert engine(enable_prefix_caching=caches).manager.enable_prefix_caching == caches


def test_a_model_without_mamba_layers_caches_prefixes_in_any_mode() -> None:
    options = {
        "block_size": 4,
        "max_model_len": 40,
        "mamba_cache_mode": "none",
        "enable_prefix_caching": True,
    }
    llm = LLM(ExactModel(ExactConfig(pattern="**")), device="cpu", **options)
    outputs = [one(llm, LONG, max_tokens=3) for _ in range(2)]
    assert [output.cached_tokens for output in outputs] == [0, 24]
    assert outputs[0].token_ids == outputs[1].token_ids


def test_a_group_that_vetoes_a_hit_is_named() -> None:
    """Attention hits the shared prefix; in mode align the only state is after the unshared rest."""
    llm = caching("align", max_num_batched_tokens=40)
    one(llm, LONG, max_tokens=1)
    output = one(llm, LONG[:20], max_tokens=4)
    assert output.token_ids == oracle(LONG[:20], 4)
    assert output.cached_tokens == 0
    kinds = [type(group.spec).__name__ for group in llm.plan.config.groups]
    own = [(kind, tokens) for kind, tokens in zip(kinds, output.hit.group_tokens, strict=True)]
    assert set(own) == {("MambaSpec", 0), ("FullAttentionSpec", 16)}
    assert kinds[output.hit.vetoed_by] == "MambaSpec"


def test_an_engine_asleep_has_no_memory_and_forgets_no_request() -> None:
    llm = caching(state_scheme="recompute", speculative_method="ngram", num_speculative_tokens=2)
    parts = [part for memory in llm.runner.row_memory.values() for part in vars(memory).values()]
    held = [*llm.runner.raw_buffers, *filter(torch.is_tensor, parts)]
    sizes, storages = (
        [part.nbytes for part in held],
        [StorageWeakRef(part.untyped_storage()) for part in held],
    )
    request = llm.add_request(LONG, SamplingParams(max_tokens=6))
    llm.step()
    for _ in range(2):
        llm.sleep()
    assert llm.is_sleeping and not llm.has_work and llm.scheduler.has_requests
    del held, parts
    assert all(storage.expired() for storage in storages)
    with pytest.raises(HybridKVError, match="the engine sleeps"):
        llm.step()
    for _ in range(2):
        llm.wake_up()
    parts = [part for memory in llm.runner.row_memory.values() for part in vars(memory).values()]
    assert [
        part.nbytes for part in (*llm.runner.raw_buffers, *filter(torch.is_tensor, parts))
    ] == sizes
    while llm.has_work:
        llm.step()
    assert request.output_token_ids == oracle(LONG, 6)
    assert request.num_preemptions == 1


def test_what_was_offloaded_is_found_behind_sleep() -> None:
    llm = caching(kv_offload_bytes=2**20)
    first = one(llm, LONG, max_tokens=2)
    llm.sleep()
    llm.wake_up()
    again = one(llm, LONG, max_tokens=2)
    assert (first.cached_tokens, again.cached_tokens) == (0, 24)
    assert again.token_ids == oracle(LONG, 2)


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_drafts_are_counted_and_save_steps(mode: str, asynchronous: bool) -> None:
    prompt, k = LONG[:3], 3
    steps = {}
    for right in (True, False):
        proposer = Right(prompt, k, () if right else range(99))
        options = {
            "num_speculative_tokens": k,
            "async_scheduling": asynchronous,
            "num_blocks": 200,
            "block_size": 8,
        }
        llm = engine(proposer=proposer, mamba_cache_mode=mode, **options)
        output = one(llm, prompt, max_tokens=17)
        assert output.token_ids == oracle(prompt, 17)
        assert output.num_accepted_draft_tokens == (output.num_draft_tokens if right else 0)
        assert output.num_draft_tokens >= 12
        steps[right] = llm.num_steps
    # A prefill and four steps of 1 + K tokens, or one step per token; the asynchronous engine may
    # run one in vain.
    assert steps[True] in ([5, 6] if asynchronous else [5])
    assert steps[False] in ([17, 18] if asynchronous else [17])


@pytest.mark.parametrize("schedule", [{}, {"async_scheduling": True}])
def test_an_aborted_request_leaves_nothing_and_publishes_only_what_was_computed(
    schedule: dict[str, bool],
) -> None:
    """A block that an aborted step would have written is never found (vllm!56525)."""
    for at in range(6):
        llm = caching(**schedule)

        def abort(llm: LLM, at: int = at) -> None:
            if llm.num_steps == at:
                llm.abort("0")

        outputs = llm.generate(
            [LONG, LONG], SamplingParams(max_tokens=8), progress=False, on_step=abort
        )
        right = oracle(LONG, 8)
        assert outputs[0].finish_reason == "abort"
        assert outputs[0].token_ids == right[: len(outputs[0].token_ids)]
        assert len(outputs[0].token_ids) < 8
        assert outputs[1].token_ids == right
        llm.scheduler.check_integrity()
        assert llm.manager.pool.num_free_blocks == llm.plan.usable_blocks
        assert one(llm, LONG, max_tokens=8).token_ids == right


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_unknown_id_aborts_nothing(asynchronous: bool) -> None:
    llm = engine(async_scheduling=asynchronous)
    llm.abort("0")  # not given yet
    first = one(llm, max_tokens=3)
    llm.abort("0")  # gone

    def abort(llm: LLM) -> None:
        llm.abort("0")
        llm.abort("2")

    second = llm.generate(
        [PROMPTS[0]], SamplingParams(max_tokens=3), progress=False, on_step=abort
    )[0]
    third = one(llm, max_tokens=3)
    assert [o.request_id for o in (first, second, third)] == ["0", "1", "2"]
    assert [o.token_ids for o in (first, second, third)] == [oracle(PROMPTS[0], 3)] * 3


class Bare:
    """A model object without a `fingerprint`; all such objects have one repr."""

    def __init__(self, seed: int) -> None:
        self._model = ExactModel(ExactConfig(seed=seed))
        self.vocab_size, self.layer_specs = self._model.vocab_size, self._model.layer_specs
        self.mamba_chunk_size, self.compute_logits = (
            self._model.mamba_chunk_size,
            self._model.compute_logits,
        )

    def __call__(self, *args: Any) -> torch.Tensor:
        return self._model(*args)

    def __repr__(self) -> str:
        return "a model"


OFFLOAD = {
    "device": "cpu",
    "max_num_seqs": 3,
    "max_model_len": 40,
    "block_size": 4,
    "mamba_cache_mode": "all",
    "num_blocks": 200,
    "max_num_batched_tokens": 40,
}


def test_a_model_that_nothing_tells_from_another_gets_no_folder(tmp_path: Path) -> None:
    for fingerprint in (None, "", 7):
        model = Bare(0)
        model.fingerprint = fingerprint
        with pytest.raises(ConfigError, match="give it a text `fingerprint`"):
            LLM(model, kv_offload_folder=str(tmp_path), **OFFLOAD)
    assert list(tmp_path.iterdir()) == []
    llm = LLM(Bare(0), kv_offload_bytes=2**20, **OFFLOAD)
    one(llm, LONG, max_tokens=2)
    llm.reset_prefix_cache()
    output = one(llm, LONG, max_tokens=4)
    assert (output.cached_tokens, output.token_ids) == (24, oracle(LONG, 4))
    cached = []
    for seed in (0, 1, 0):
        model = Bare(seed)
        model.fingerprint = f"seed {seed}"
        cached.append(
            one(
                LLM(model, kv_offload_folder=str(tmp_path), **OFFLOAD), LONG, max_tokens=4
            ).cached_tokens
        )
    assert cached == [0, 0, 24]


def test_what_has_no_effect_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    def said() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    engine(num_speculative_tokens=2)
    assert [
        "num_speculative_tokens=2 takes cache, but nothing drafts" in message for message in said()
    ] == [True]
    llm = caching()
    assert said() == []
    for _ in range(2):
        one(llm, LONG[: llm.manager.hit_granularity], max_tokens=1)
    (message,) = said()
    assert (
        f"a multiple of {llm.manager.hit_granularity} tokens and the longest prompt so far has"
        in message
    )
    assert "block_size" in message
    llm = caching(num_speculative_tokens=2, speculative_method="ngram")
    for prompt in (LONG, LONG[:2]):
        one(llm, prompt, max_tokens=1)
    one(engine(), max_tokens=1)
    assert said() == []
    llm = caching(kv_offload_bytes=10)
    largest = max(llm.manager.offload.block_bytes)
    assert said() == [
        (
            f"kv_offload_bytes=10 is less than one block of {largest} B: host memory will "
            "restore nothing; raise it"
        )
    ]


class Counting(Letters):
    """Some tokens have no text of their own, as special tokens have not; counts what it decodes."""

    decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.decoded += len(token_ids)
        return super().decode([token for token in token_ids if token % 5])


@pytest.mark.parametrize("length", [1, 2, 5, 40])
def test_every_stop_string_is_found_where_the_whole_text_has_it(length: int) -> None:
    prompt = LONG[:3]
    tokens = oracle(prompt, 60)
    text = Counting().decode(tokens)
    for start in range(0, len(text) - length, 7):
        stop = text[start : start + length]
        output = one(
            engine(Counting(), max_model_len=80), prompt, max_tokens=60, stop=("never", stop)
        )
        assert output.text == text[: text.index(stop)]
        needed = next(n for n in range(61) if stop in Counting().decode(tokens[:n]))
        assert (output.finish_reason, output.token_ids) == ("stop", tokens[:needed])


def test_looking_for_stop_strings_is_linear() -> None:
    tokenizer = Counting()
    one(engine(tokenizer, max_model_len=420, num_blocks=1000), max_tokens=400, stop=("never",))
    assert tokenizer.decoded < 400 * 60

"""llama.cpp's C API, driven as by a program that keeps sequences.

It is started as `python llamacpp.py` and speaks the protocol of `pipe`. A folder has `model.gguf`
and `sequences.so`, made of `llamacpp_sequences.c`. All requests of a batch are decoded together,
one sequence each; drafts are what followed the last two tokens before.
"""

import ctypes
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

COUNTERS = ("hits", "drafts", "accepted", "verifications", "preemptions")
NUM_LIKELIEST = 5
LONGEST, NUM_SEQUENCES, NUM_DRAFTS = 2048, 8, 3

Text = tuple[int, ...]


class Memory:
    """A context and its sequences."""

    def __init__(self, folder: Path, chunk: int, num_snapshots: int, unified: bool) -> None:
        self._library = ctypes.CDLL(str(folder / "sequences.so"))
        for name in ("hk_open", "hk_context", "hk_memory"):
            getattr(self._library, name).restype = ctypes.c_void_p
        path = str(folder / "model.gguf").encode()
        engine = self._library.hk_open(path, LONGEST, NUM_SEQUENCES, chunk, num_snapshots, unified)
        if not engine:
            raise ValueError("llama.cpp does not load the model")
        self._engine = ctypes.c_void_p(engine)
        self._context = ctypes.c_void_p(self._library.hk_context(self._engine))
        self._memory = ctypes.c_void_p(self._library.hk_memory(self._engine))
        self._library.llama_memory_seq_rm.restype = ctypes.c_bool
        for name in (
            "llama_state_seq_save_file",
            "llama_state_seq_load_file",
            "llama_state_seq_get_size",
        ):
            getattr(self._library, name).restype = ctypes.c_size_t
        for name in ("llama_state_seq_get_data", "llama_state_seq_set_data"):
            getattr(self._library, name).restype = ctypes.c_size_t
        self.num_words: int = self._library.hk_num_words(self._engine)

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> list[list[float]]:
        """Return the logits after each token for which they are wanted.

        Args:
            tokens: id, position, sequence, and whether logits are wanted, of each.

        Raises:
            RuntimeError: llama.cpp does not decode them.
        """
        n = len(tokens)
        integers = [(ctypes.c_int32 * n)(*(one[i] for one in tokens)) for i in range(3)]
        wanted = (ctypes.c_int8 * n)(*(one[3] for one in tokens))
        num_rows = sum(one[3] for one in tokens)
        rows = (ctypes.c_float * (self.num_words * max(1, num_rows)))()
        if status := self._library.hk_decode(self._engine, n, *integers, wanted, rows):
            raise RuntimeError(f"llama_decode returned {status}")
        return [list(rows[i * self.num_words : (i + 1) * self.num_words]) for i in range(num_rows)]

    def cut(self, sequence: int, length: int) -> bool:
        """Remove all after the first `length` tokens, and return whether that can be done."""
        return bool(self._library.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def clear(self, sequence: int) -> None:
        self._library.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def clear_all(self) -> None:
        with_data = True
        self._library.llama_memory_clear(self._memory, with_data)

    def copy(self, source: int, target: int) -> None:
        self._library.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def keep(self, sequence: int) -> None:
        """Remove all others."""
        self._library.llama_memory_seq_keep(self._memory, sequence)

    def save(self, sequence: int, path: str, text: Text) -> None:
        tokens = (ctypes.c_int32 * len(text))(*text)
        size = ctypes.c_size_t(len(text))
        if not self._library.llama_state_seq_save_file(
            self._context, path.encode(), sequence, tokens, size
        ):
            raise RuntimeError("llama_state_seq_save_file returned 0")

    def load(self, sequence: int, path: str) -> None:
        tokens, count = (ctypes.c_int32 * LONGEST)(), ctypes.c_size_t()
        size = ctypes.c_size_t(LONGEST)
        if not self._library.llama_state_seq_load_file(
            self._context, path.encode(), sequence, tokens, size, ctypes.byref(count)
        ):
            raise RuntimeError("llama_state_seq_load_file returned 0")

    def state(self, sequence: int) -> Any:
        size = self._library.llama_state_seq_get_size(self._context, sequence)
        data = (ctypes.c_uint8 * size)()
        if not self._library.llama_state_seq_get_data(
            self._context, data, ctypes.c_size_t(size), sequence
        ):
            raise RuntimeError("llama_state_seq_get_data returned 0")
        return data

    def set_state(self, sequence: int, data: Any) -> None:
        size = ctypes.c_size_t(len(data))
        if not self._library.llama_state_seq_set_data(self._context, data, size, sequence):
            raise RuntimeError("llama_state_seq_set_data returned 0")


class EmptySequences:
    """Every request begins with an empty sequence."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        # Sequences that no request is in, by the text that they hold; the oldest first.
        self.kept: dict[Text, int] = {}
        self.free = list(range(NUM_SEQUENCES))

    @property
    def has_room(self) -> bool:
        """Return whether another request can begin."""
        return bool(self.free or self.kept)

    def take(self, prompt: Text) -> tuple[int, int]:
        """Return a sequence, and how many tokens of the prompt it holds.

        At least one token is left to decode.
        """
        return self._empty(), 0

    def give(self, sequence: int, text: Text) -> None:
        """Take back a sequence that holds a text."""
        self._memory.clear(sequence)
        self.free.append(sequence)

    def reach(self, sequence: int, text: Text) -> None:
        """Note that a sequence holds all of a prompt but its last token, and nothing else."""

    def end_batch(self, number: int) -> None:
        """Note that the last answer of a batch is complete."""

    def _empty(self, but: int = -1) -> int:
        """Return an empty sequence: the oldest that is kept makes room, if it must."""
        if not self.free:
            text = next(text for text, sequence in self.kept.items() if sequence != but)
            sequence = self.kept.pop(text)
            self._memory.clear(sequence)
            return sequence
        return self.free.pop(0)

    def _nearest(self, prompt: Text, whole: bool) -> tuple[Text, int]:
        """Return the kept text that shares most with a prompt, and how many tokens that is.

        If `whole`, the prompt must begin with all of the text.
        """
        best: tuple[Text, int] = ((), 0)
        for text in self.kept:
            shared = common(text, prompt[:-1])
            if shared > best[1] and (not whole or shared == len(text)):
                best = text, shared
        return best


class ContinuedSequences(EmptySequences):
    """Sequences that are continued, each by the request that shares most with it.

    A sequence is cut where they part, if that can be done.
    """

    def take(self, prompt: Text) -> tuple[int, int]:
        text, shared = self._nearest(prompt, whole=False)
        if not shared or (shared < len(text) and not self._memory.cut(self.kept[text], shared)):
            return self._empty(), 0
        return self.kept.pop(text), shared

    def give(self, sequence: int, text: Text) -> None:
        if text in self.kept:
            self.free.append(self.kept.pop(text))
            self._memory.clear(self.free[-1])
        self.kept[text] = sequence

    def end_batch(self, number: int) -> None:
        """Keep only the newest sequence, every third time."""
        if number % 3 == 0 and self.kept:
            text, sequence = list(self.kept.items())[-1]
            self._memory.keep(sequence)
            self.kept = {text: sequence}
            self.free = [one for one in range(NUM_SEQUENCES) if one != sequence]


class CopiedSequences(ContinuedSequences):
    """Sequences that stay, of which a request continues a copy.

    A copy of its prompt, without the last token, stays too.
    """

    def reach(self, sequence: int, text: Text) -> None:
        if text not in self.kept and len(self.free) + len(self.kept) > 1:
            target = self._empty()
            self._memory.copy(sequence, target)
            self.kept[text] = target

    def take(self, prompt: Text) -> tuple[int, int]:
        text, shared = self._nearest(prompt, whole=True)
        if not shared:
            text, shared = self._nearest(prompt, whole=False)
        if not shared or (not self.free and len(self.kept) == 1):
            return self._empty(), 0
        source = self.kept[text]
        sequence = self._empty(but=source)
        self._memory.copy(source, sequence)
        if shared < len(text) and not self._memory.cut(sequence, shared):
            self._memory.clear(sequence)
            shared = 0
        return sequence, shared


class SavedSequences(EmptySequences):
    """A request goes on from the file of the longest text that its prompt begins with.

    Prompts are saved without their last token, and texts at their ends.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._folder = tempfile.TemporaryDirectory()
        self._files: dict[Text, str] = {}

    def take(self, prompt: Text) -> tuple[int, int]:
        sequence = self._empty()
        held = (
            text for text in self._files if len(text) < len(prompt) and text == prompt[: len(text)]
        )
        text: Text = max(held, key=len, default=())
        if text:
            self._memory.load(sequence, self._files[text])
        return sequence, len(text)

    def reach(self, sequence: int, text: Text) -> None:
        if text not in self._files:
            self._files[text] = str(Path(self._folder.name) / f"{len(self._files)}.bin")
            self._memory.save(sequence, self._files[text], text)

    def give(self, sequence: int, text: Text) -> None:
        if text:
            self.reach(sequence, text)
        super().give(sequence, text)


class RunningRequest:
    """A request, its sequence and what that holds."""

    def __init__(self, index: int, ask: dict[str, Any], sequence: int, num_held: int) -> None:
        self.index, self.ask, self.sequence = index, ask, sequence
        self.text: list[int] = list(ask["prompt"])
        self.num_held = num_held
        self.drafts: list[int] = []
        end = (
            ask["max_tokens"]
            if ask["abort_after"] is None
            else min(ask["abort_after"], ask["max_tokens"])
        )
        self.end: int = len(self.text) + end

    @property
    def is_complete(self) -> bool:
        return len(self.text) >= self.end


class LlamaEngine:
    """See `pipe.serve`."""

    def version(self) -> str:
        return "?"  # the library does not say; its server does

    def start(self, folder: str, settings: dict[str, str]) -> dict[str, Any]:
        chunk = settings.get("chunk", "whole")
        has_drafts = settings.get("spec", "none") == "draft"
        snapshots = NUM_DRAFTS if has_drafts else 0
        unified = settings.get("slots", "one") == "unified"
        memory = Memory(Path(folder), 512 if chunk == "whole" else int(chunk), snapshots, unified)
        kind = {
            "off": EmptySequences,
            "on": ContinuedSequences,
            "slots": CopiedSequences,
            "files": SavedSequences,
        }[settings.get("prefix", "off")]
        self.use(memory, kind, has_drafts)
        can = ["cached", "logprobs", "reset", "abort", "batch", "steps", "preempt"]
        return {"can": can, "longest": LONGEST}

    def use(self, memory: Memory, kind: type[EmptySequences], has_drafts: bool) -> None:
        """Start over, with sequences of this kind in this memory."""
        self._memory = memory
        self._kind = kind
        self._has_drafts = has_drafts
        self._counts: Counter[str] = Counter()
        self.reset()

    def counters(self) -> dict[str, float]:
        return {name: float(self._counts[name]) for name in COUNTERS}

    def reset(self) -> None:
        self._memory.clear_all()
        self._store = self._kind(self._memory)
        self._follows: dict[tuple[int, int], int] = {}
        self._num_batches = 0

    def ask(self, requests: list[dict[str, Any]], preempt_every: int) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = [{"token_ids": [], "logprobs": []} for _ in requests]
        waiting, running, step, known = list(range(len(requests))), list[RunningRequest](), 0, 0
        while waiting or running:
            complete = len(requests) - len(waiting) - len(running)
            ready = [
                i
                for i in waiting
                if requests[i]["after"] <= complete and requests[i]["step"] <= step
            ]
            # A step that nothing runs in is never reached.
            for i in ready or ([] if running else waiting[:1]):
                if self._store.has_room:
                    waiting.remove(i)
                    running.append(self._begin(i, requests[i], answers[i]))
            self._step(running, answers)
            for one in [one for one in running if one.is_complete]:
                running.remove(one)
                self._store.give(one.sequence, tuple(one.text[: one.num_held]))
            total, step = sum(len(answer["token_ids"]) for answer in answers), step + 1
            if preempt_every and total - known >= preempt_every:
                known = total
                self._swap(running)
        self._num_batches += 1
        self._store.end_batch(self._num_batches)
        return answers

    def _begin(self, i: int, ask: dict[str, Any], answer: dict[str, Any]) -> RunningRequest:
        sequence, num_held = self._store.take(tuple(ask["prompt"]))
        answer["cached_tokens"] = num_held
        self._counts["hits"] += num_held
        return RunningRequest(i, ask, sequence, num_held)

    def _swap(self, running: list[RunningRequest]) -> None:
        """Take all that runs out of memory, and put it into other sequences."""
        states = [self._memory.state(one.sequence) for one in running]
        sequences = [one.sequence for one in running]
        for one in running:
            self._memory.clear(one.sequence)
            self._counts["preemptions"] += 1
        for one, state, sequence in zip(
            running, states, sequences[1:] + sequences[:1], strict=True
        ):
            one.sequence = sequence
            self._memory.set_state(sequence, state)

    def _step(self, running: list[RunningRequest], answers: list[dict[str, Any]]) -> None:
        room, batch, parts = (
            LONGEST,
            list[tuple[int, int, int, bool]](),
            list[tuple[RunningRequest, int]](),
        )
        for one in running:
            rest = one.text[one.num_held :]
            new = rest[:room] if len(rest) == 1 else rest[: min(room, len(rest) - 1)]
            one.drafts = self._drafts(one)[: room - len(new)] if len(new) == len(rest) else []
            for place, token in enumerate((*new, *one.drafts)):
                wanted = place >= len(rest) - 1
                batch.append((token, one.num_held + place, one.sequence, wanted))
            room -= len(new) + len(one.drafts)
            parts.append((one, len(new)))
        rows = iter(self._memory.decode(batch)) if batch else iter(())
        for one, num_new in parts:
            one.num_held += num_new
            if one.num_held == len(one.ask["prompt"]) - 1 == len(one.text) - 1:
                self._store.reach(one.sequence, tuple(one.text[:-1]))
            if one.num_held == len(one.text) and num_new:
                self._verify(
                    one, [next(rows) for _ in range(1 + len(one.drafts))], answers[one.index]
                )

    def _drafts(self, one: RunningRequest) -> list[int]:
        """Return the tokens that followed the last two before, again and again.

        No draft is beyond the answer's end.
        """
        text, found = one.text[-2:], list[int]()
        most = min(NUM_DRAFTS, one.end - len(one.text) - 1) if self._has_drafts else 0
        while (
            len(text) == 2
            and len(found) < most
            and (token := self._follows.get((text[0], text[1]))) is not None
        ):
            found.append(token)
            text = [text[1], token]
        return found

    def _verify(self, one: RunningRequest, rows: list[list[float]], answer: dict[str, Any]) -> None:
        """Take the likeliest tokens as far as the drafts before them are right.

        The other drafts are forgotten.
        """
        num_drafts, accepted = len(one.drafts), 0
        for i, row in enumerate(rows):
            token = max(range(len(row)), key=row.__getitem__)
            note(one.ask, answer, token, row)
            if len(one.text) >= 2:
                self._follows[one.text[-2], one.text[-1]] = token
            one.text.append(token)
            if i == num_drafts or token != one.drafts[i]:
                break
            accepted += 1
        one.num_held += accepted
        self._counts["drafts"] += num_drafts
        self._counts["accepted"] += accepted
        self._counts["verifications"] += bool(num_drafts)
        if accepted < num_drafts and not self._memory.cut(one.sequence, one.num_held):
            self._memory.clear(one.sequence)
            one.num_held = 0


def common(a: Text, b: Text) -> int:
    """Return how many tokens two texts begin with together."""
    return next(
        (i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other),
        min(len(a), len(b)),
    )


def note(ask: dict[str, Any], answer: dict[str, Any], token: int, row: list[float]) -> None:
    """Keep a token of an answer.

    Its log-probability and those of the likeliest are kept with it where they were requested.
    """
    answer["token_ids"].append(token)
    if ask["logprobs"]:
        most = max(row)
        total = most + math.log(sum(math.exp(one - most) for one in row))
        best = sorted(range(len(row)), key=row.__getitem__)[-NUM_LIKELIEST:]
        answer["logprobs"].append({one: row[one] - total for one in (*best, token)})


if __name__ == "__main__":
    import pipe

    pipe.serve(LlamaEngine())

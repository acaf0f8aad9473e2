"""llama.cpp in a build that the user names.

Each setting has a server, or a process of its own that calls the C API. A checkpoint is converted
by the build's own converter; the file stays in its folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasPath, BaseModel, Field

from hybrid_kv.check.targets.dialects import Count
from hybrid_kv.check.targets.process import ServerProcess
from hybrid_kv.check.targets.remote import WORKERS, Remote
from hybrid_kv.check.targets.server import OK, RequestBatch, ServerTarget
from hybrid_kv.check.targets.target import Answer, Ask, Kind, Known, Target, TargetError
from hybrid_kv.config import ConfigError
from hybrid_kv.environment import child_environment

SERVER = Path(".venv-llamacpp/llama.cpp/build/bin/llama-server")  # of `make peers-llamacpp`
LONGEST = 2048
CONTEXT = LONGEST + 256
SPARE = 16  # with drafts an answer that fills the context ends some tokens early
NUM_SLOTS = 4  # what llama-server has by default
NOISE = 0.05  # of a weight's own size: a draft model that is right often, not always
LISTENS = r"listening on (http\S+)"

# Arguments by level, the plainest first; `{draft}` is a draft model, `{folder}` one for files.
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    # on: what the server does by itself: a slot's last prompt, its checkpoints, and prompts moved
    # to memory. slots: without the latter. files: a client saves each slot, and restores what a
    # prompt begins with.
    "prefix": {
        "off": ("--no-cache-prompt", "--cache-ram", "0", "--ctx-checkpoints", "0"),
        "on": (),
        "slots": ("--cache-ram", "0"),
        "files": ("--cache-ram", "0", "--slot-save-path", "{folder}"),
    },
    "spec": {
        "none": (),
        "draft": ("--spec-type", "draft-simple", "-md", "{draft}", "-ctkd", "f32", "-ctvd", "f32"),
        "mtp3": ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3"),
    },
    "slots": {
        "one": ("-np", "1", "-c", str(CONTEXT)),
        "unified": ("-np", str(NUM_SLOTS), "-c", str(NUM_SLOTS * CONTEXT), "--kv-unified"),
        "split": ("-np", str(NUM_SLOTS), "-c", str(NUM_SLOTS * CONTEXT), "--no-kv-unified"),
    },
    "chunk": {"whole": (), "17": ("-b", "17", "-ub", "17")},
    # Of weights and KV; the draft model's stay float32.
    "dtype": {
        "float32": ("-ctk", "f32", "-ctv", "f32"),
        "bfloat16": ("-ctk", "bf16", "-ctv", "bf16"),
    },
}
GGUF_DTYPES = {"float32": "f32", "bfloat16": "bf16"}
# sequences: no server, a program that keeps sequences: `workers.llamacpp`. There prefix is on where
# it goes on in one, slots where it copies one, files where it saves one; draft is a draft that is
# undone by `seq_rm`.
APIS = ("server", "sequences")
MATRIX = (
    "prefix=on",
    "prefix=on slots=unified",
    "prefix=slots slots=split",
    "prefix=files slots=split",
    "prefix=on chunk=17",
    "prefix=on slots=unified chunk=17",
    "prefix=on spec=draft",
    "prefix=on slots=unified spec=draft",
    "prefix=on spec=mtp3",
    "prefix=slots slots=split spec=mtp3",
    "api=sequences prefix=on slots=unified",
    "api=sequences prefix=on slots=split",
    "api=sequences prefix=slots slots=unified",
    "api=sequences prefix=files chunk=17",
    "api=sequences prefix=slots slots=split spec=draft",
    "api=sequences prefix=files spec=draft",
)
RELEASE = "b11434"
KNOWN = (
    Known(RELEASE, "llamacpp_pending_rollback", ("api", "spec", "prefix=slots")),
    Known(RELEASE, "llamacpp_moved_snapshots", ("api", "spec"), probe="preempted"),
    Known(RELEASE, "llamacpp_seq_keep", ("api", "prefix=on", "slots=split")),
    # A state cannot be cut: what does not go on with all of a text computes it anew.
    Known(RELEASE, "prefix=on", ("api", "prefix=on"), words="cached stayed 0"),
    Known(RELEASE, "prefix=slots", ("prefix=slots",), words="cached stayed 0"),
    # Of requests that come together, the moment decides which slot each gets, and after which text.
    *(
        Known(RELEASE, "prefix=on", ("api=server", "prefix=on"), probe, "cached stayed 0")
        for probe in ("boundaries behind a batch", "shared beginnings")
    ),
    Known(RELEASE, "prefix=files", ("prefix=files",), words="cached stayed 0"),
    Known(
        RELEASE,
        "llamacpp_stale_checkpoint",
        ("api=server", "prefix"),
        probe="another token near the end",
    ),
    Known(RELEASE, "llamacpp_stale_checkpoint", ("api=server", "prefix"), probe="again after many"),
    Known(RELEASE, "llamacpp_stale_checkpoint", ("api=server", "prefix"), probe="many are cut off"),
    Known(
        RELEASE,
        "llamacpp_stale_checkpoint",
        ("api=server", "prefix", "spec"),
        probe="short answers with drafts",
    ),
)
ALWAYS = (
    *("--host", "127.0.0.1", "--port", "0", "-t", "1", "-tb", "1", "--no-warmup", "--metrics"),
    *("-fa", "off"),
)


@dataclass(frozen=True)
class Build:
    """A build of llama.cpp.

    Attributes:
        server: its llama-server.
        tree: the source that it was built in; None: there is none above it.
    """

    server: Path
    tree: Path | None

    @classmethod
    def at(cls, server: Path) -> Build:
        """Return the build of a llama-server.

        Raises:
            ConfigError: it is none.
        """
        server = server.absolute()
        if not (server.is_file() and os.access(server, os.X_OK)):
            raise ConfigError(
                f"--server {server}: there is no such program; give the llama-server of a build"
            )
        if "llama" not in server.name:
            raise ConfigError(f"--server {server}: it is no llama-server; give that of a build")
        trees = (
            parent for parent in server.parents if (parent / "convert_hf_to_gguf.py").is_file()
        )
        return cls(server, next(trees, None))

    @classmethod
    def installed(cls) -> Build:
        """Return the build of `make peers-llamacpp`, or else that in the path.

        Raises:
            ConfigError: there is neither.
        """
        known = SERVER if SERVER.exists() else shutil.which("llama-server")
        if known is None:
            raise ConfigError(
                "llama.cpp is not built: run `make peers-llamacpp`, "
                "or name a llama-server with --server"
            )
        return cls.at(Path(known))

    def gguf(self, folder: str, noise: float = 0.0, dtype: str = "float32") -> Path:
        """Return a checkpoint in llama.cpp's format, converted unless it is there.

        Args:
            noise: standard deviation of what is added to each weight, in means of its matrix.
            dtype: of its matrices.

        Raises:
            ConfigError: the converter does not know the model, or there is no converter.
        """
        if not noise and (
            given := sorted(
                one for one in Path(folder).glob("*.gguf") if "hybrid-kv" not in one.name
            )
        ):
            return given[0]
        if self.tree is None:
            raise ConfigError(
                f"{folder} has no GGUF file, and no folder above {self.server} has a converter"
            )
        sources = [
            self.tree / "convert_hf_to_gguf.py",
            *sorted((self.tree / "conversion").glob("*.py")),
        ]
        stamps = repr([(str(one), one.stat().st_mtime_ns) for one in sources])
        stamp = hashlib.sha256(stamps.encode()).hexdigest()[:8]
        suffix = f"-noise-{noise:g}" if noise else ""
        file = Path(folder) / f"hybrid-kv-{stamp}-{GGUF_DTYPES[dtype]}{suffix}.gguf"
        if not file.exists():
            self._convert(folder, noise, GGUF_DTYPES[dtype], file)
        return file

    def compile(self, source: Path, library: Path) -> None:
        """Compile a file of C against this build's headers and libraries.

        Raises:
            ConfigError: that is not possible.
        """
        if self.tree is None:
            raise ConfigError(f"api=sequences: no folder above {self.server} has the headers")
        folder = str(self.server.parent)
        headers = [f"-I{self.tree / name}" for name in ("include", "ggml/include")]
        links = ["-L", folder, "-lllama", f"-Wl,-rpath,{folder}"]
        command = [
            "cc",
            "-O1",
            "-shared",
            "-fPIC",
            *headers,
            str(source),
            "-o",
            str(library),
            *links,
        ]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ConfigError(f"api=sequences needs a C compiler: cc: {error.strerror}") from None
        if ran.returncode:
            errors = [line for line in ran.stderr.splitlines() if "error" in line] or ["nothing"]
            raise ConfigError(
                f"api=sequences does not compile with this build; cc said: {errors[0][:400]}"
            )

    def version(self) -> str:
        """Return what its server calls itself, without the commit."""
        ran = subprocess.run(
            [str(self.server), "--version"],
            capture_output=True,
            text=True,
            check=False,
            env=self.environment(),
        )
        match = re.search(r"\(build (\d+)|version: (\d+) ", ran.stdout + ran.stderr)
        return f"b{match[1] or match[2]}" if match else "of unknown version"

    def environment(self) -> dict[str, str]:
        """Return the variables of a process that uses its libraries."""
        return child_environment(None, LD_LIBRARY_PATH=str(self.server.parent))

    def _convert(self, folder: str, noise: float, dtype: str, file: Path) -> None:
        half = file.with_suffix(f".{os.getpid()}")  # another process may convert it, too
        command = [
            sys.executable,
            str(WORKERS / "llamacpp_convert.py"),
            str(self.tree),
            folder,
            str(half),
            str(noise),
            dtype,
        ]
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=child_environment({"OMP_NUM_THREADS": "1"}),
        )
        if ran.returncode:
            half.unlink(missing_ok=True)
            lines = [line.strip() for line in ran.stderr.splitlines() if line.strip()] or [
                "nothing"
            ]
            raise ConfigError(
                f"llama.cpp's converter refuses the checkpoint; it said: {lines[-1][:400]}"
            )
        half.replace(file)


class _Slot(BaseModel):
    n_ctx: Annotated[
        Count, Field(validation_alias=AliasPath("default_generation_settings", "n_ctx"))
    ] = CONTEXT


class LlamaServer(ServerTarget):
    """A target that is a llama.cpp server; see `targets.target.Target`.

    Prompts stay in a server's memory whatever it is asked: a reset is another server.

    Raises:
        ConfigError: the converter or the server does not know the model, or this build a setting.
        TargetError: the server dies at its start.
    """

    def __init__(self, build: Build, folder: str, settings: Mapping[str, str]) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._process: ServerProcess | None = None
        self._files: dict[tuple[int, ...], str] = {}
        try:
            chosen = {
                factor: settings.get(factor, next(iter(levels)))
                for factor, levels in LEVELS.items()
            }
            names = {
                "{folder}": lambda: self._scratch.name,
                "{draft}": lambda: str(build.gguf(folder, NOISE)),
            }
            given = [one for factor, level in chosen.items() for one in LEVELS[factor][level]]
            arguments = [names[one]() if one in names else one for one in given]
            model = str(build.gguf(folder, dtype=chosen["dtype"]))
            self._command = [str(build.server), "-m", model, *ALWAYS, *arguments]
            self._environment = build.environment()
            self._start()
            super().__init__(self.url, settings)
            self.version = self.version.partition("-")[0]  # the rest names a commit
            # A slot is never longer than what the model was trained with.
            slot = self._get(_Slot, "/props")
            self.longest = min(LONGEST, slot.n_ctx - SPARE)
            self.can |= {"reset"}
            if chosen["prefix"] == "files":
                num_slots = 1 if chosen["slots"] == "one" else NUM_SLOTS
                self.batch_class = partial(FilesBatch, slots=num_slots, files=self._files)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._process = ServerProcess(self._command, LISTENS, self._environment)
        if not self._process.url:
            kind = TargetError if self._process.was_killed else ConfigError
            raise kind(f"llama-server does not start; it said: {said_of(self._process.said())}")
        self.url = self._process.url

    def reset(self) -> None:
        """See `Target.reset`."""
        self._files.clear()
        self.close_process()
        self._start()

    def close_process(self) -> None:
        """End the server."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def close(self) -> None:
        """See `Target.close`."""
        self.close_process()
        self._scratch.cleanup()


class Sequences(Remote):
    """See `targets.target.Target`.

    Raises:
        ConfigError: the converter or the library does not know the model, or it is of no setting.
    """

    def __init__(self, build: Build, folder: str, settings: Mapping[str, str]) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        try:
            if settings.get("spec") == "mtp3":
                raise ConfigError(
                    "api=sequences spec=mtp3: a draft head needs llama-server; use spec=draft"
                )
            if settings.get("dtype", "float32") != "float32":
                raise ConfigError("api=sequences dtype=bfloat16: use dtype=float32")
            (Path(self._scratch.name) / "model.gguf").symlink_to(build.gguf(folder).absolute())
            build.compile(
                WORKERS / "llamacpp_sequences.c", Path(self._scratch.name) / "sequences.so"
            )
            super().__init__("llamacpp", sys.executable, self._scratch.name, settings)
            self.version = build.version()
        except BaseException:
            self._scratch.cleanup()
            raise

    def close(self) -> None:
        """See `Target.close`."""
        super().close()
        self._scratch.cleanup()


class FilesBatch(RequestBatch):
    """A batch of requests, each in a slot of its own.

    The slot is restored from the file whose text shares most with the prompt, and saved after it.

    Args:
        slots: of the server.
        files: names of files by the text that is in them.
    """

    def __init__(self, *args: Any, slots: int, files: dict[tuple[int, ...], str]) -> None:
        super().__init__(*args)
        self._files, self._locks, self._sent = files, [asyncio.Lock() for _ in range(slots)], 0

    async def answer(self, ask: Ask, is_streamed: bool, **fields: object) -> Answer:
        """See `RequestBatch.answer`."""
        slot, self._sent = self._sent % len(self._locks), self._sent + 1
        async with self._locks[slot]:
            known = max(self._files, key=lambda text: shared(text, ask.prompt), default=())
            shares = bool(shared(known, ask.prompt))
            if problem := await self._act(slot, "restore", self._files[known]) if shares else "":
                return Answer((), error=problem)
            answer = await super().answer(ask, is_streamed, id_slot=slot, **fields)
            name = f"{len(self._files)}.bin"
            if not answer.error and not (problem := await self._act(slot, "save", name)):
                self._files[(*ask.prompt, *answer.token_ids)] = name
            return replace(answer, error=answer.error or problem)

    async def _act(self, slot: int, action: str, name: str) -> str:
        """Return what is wrong; nothing if it was done."""
        async with self.post(f"/slots/{slot}?action={action}", {"filename": name}) as reply:
            return "" if reply.status == OK else f"{action} of slot {slot}: HTTP {reply.status}"


def shared(text: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """Return how many tokens two texts begin with together."""
    parted = (i for i, (one, other) in enumerate(zip(text, prompt, strict=False)) if one != other)
    return next(parted, min(len(text), len(prompt)))


def said_of(log: str) -> str:
    """Return the first error of a server's log, without its time; else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["nothing"]
    errors = [" ".join(line.partition(" E ")[2].split()) for line in lines if " E " in line]
    return (errors or lines[-1:])[0]


def _kind(build: Callable[[], Build], **about: Any) -> Kind:
    factors = {factor: tuple(levels) for factor, levels in LEVELS.items()} | {"api": APIS}

    def start(folder: str, settings: Mapping[str, str]) -> Target:
        kind = Sequences if settings.get("api") == "sequences" else LlamaServer
        return kind(build(), folder, settings)

    # It loads a gated delta net whose keys and values are equally wide, as published ones are and
    # tiny checkpoints are not.
    return Kind("llamacpp", factors, start, size="small", matrix=MATRIX, known=KNOWN, **about)


def at(server: str) -> Kind:
    """Return the engine of a llama-server that the user names.

    Raises:
        ConfigError: it is none.
    """
    build = Build.at(Path(server))
    return _kind(lambda: build, python=str(build.server))


KIND = _kind(Build.installed, at=at)

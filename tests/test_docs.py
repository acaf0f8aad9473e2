"""README and docs: console blocks print the same, Python blocks run, commands and links exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli import run as cli
from tests.support.options import check_options
from tests.support.pages import BLOCKS, PAGES, ROOT, Block, commands

LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def of(*languages: str) -> list[object]:
    chosen = [block for block in BLOCKS if block.language in languages]
    return [
        pytest.param(block, id=f"{block.page}: {block.text.strip().splitlines()[0][:60]}")
        for block in chosen
    ]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, encoding="utf-8"
    )


@pytest.mark.parametrize("block", of("console"))
def test_a_console_block_is_what_its_command_prints(
    block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line `…` stands for any number of lines."""
    command, _, expected = block.text.partition("\n")
    while command.endswith("\\"):
        more, _, expected = expected.partition("\n")
        command = command[:-1] + more
    assert command.startswith("$ hybrid-kv "), "a block without its output is `sh`"
    monkeypatch.chdir(ROOT)
    # Another process would import for seconds.
    monkeypatch.setattr("hybrid_kv.check.guard.workers.MOST_WORKERS", 1)
    words = shlex.split(command.split("  #")[0].removeprefix("$ hybrid-kv "))
    code, out, err = cli.run(capsys, *words)
    assert code == 0, err
    printed = "\n".join(line.rstrip() for line in out.splitlines())
    pattern = ".*".join(re.escape(part.strip("\n")) for part in f"\n{expected}".split("\n…\n"))
    assert re.fullmatch(pattern, printed, re.DOTALL), printed


def test_the_python_blocks_run() -> None:
    """In one process, and not in this one: some register what they define."""
    blocks = [(block.text, block.page) for block in BLOCKS if block.language == "python"]
    found = run(
        sys.executable, "-c", f"for block in {blocks!r}: exec(compile(*block, 'exec'), {{}})"
    )
    assert blocks and found.returncode == 0, found.stderr


@pytest.mark.parametrize("block", of("sh"))
def test_the_commands_of_a_shell_block_exist(block: Block) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands(block.text):
        words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=.*", word)]
        if words[0] == "make":
            assert words[1] in targets, line
        elif words[:2] == ["python", "-m"]:
            assert find_spec(words[2]) is not None, line
        elif words[0] == "hybrid-kv":
            check_options(words[1:], line)
        else:
            assert words[0] in (
                "lm_eval",
                "pip",
                "cd",
                "git",
                "bash",
                "vllm",
                "asv",
                "pytest",
                "pytest-benchmark",
            ), f"{line}: nothing here knows {words[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    targets = [
        target
        for target, _ in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target
    ]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_readme_is_read_in_a_minute() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as `make docs` builds them."""
    pytest.importorskip("zensical", reason="zensical is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("pages") / "site"
    found = run(sys.executable, ".ci/docs.py", str(folder))
    assert (found.returncode, found.stderr) == (0, "")
    return folder


def test_the_pages_fetch_nothing_and_have_the_references(site: Path) -> None:
    pages = {page.name: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    fetched = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*')
    assert {name: found for name, text in pages.items() if (found := fetched.findall(text))} == {}
    assert (
        "--mamba-cache-mode" in pages["reference-cli.html"]
        and "SamplingParams" in pages["reference-python.html"]
    )
    # both references, and one of what is not found
    assert len(pages) == len([*(ROOT / "docs").rglob("*.md")]) + 3


def test_the_search_finds_a_section_in_pages_that_are_opened_from_a_disk(site: Path) -> None:
    pytest.importorskip("playwright", reason="needs playwright: pip install playwright")
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs chromium or google-chrome")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        fetched: list[str] = []
        page.on("request", lambda request: fetched.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("Control+k")
        page.get_by_role("combobox").fill("hypervisor")
        target = page.get_by_role("option").first.get_attribute("href", timeout=20_000)
        browser.close()
    assert target == (site / "measuring.html").as_uri() + "#is-this-machine-fit"
    assert [url for url in fetched if not url.startswith(("file:", "data:", "about:"))] == []


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("zensical.toml", '{ "Bisect" = "bisect.md" },', "", "lacks bisect.md; add it"),
        ("zensical.toml", '"bisect.md"', '"bisected.md"', "has bisected.md; there is none"),
        ("docs/bisect.md", "\n", "\n[a link](nowhere.md)\n", "page does not exist"),
    ],
)
def test_pages_with_a_fault_are_not_built(
    tmp_path: Path, file: str, old: str, new: str, message: str
) -> None:
    """A page that the navigation lacks, one that only it has; a link to nowhere."""
    pytest.importorskip("zensical", reason="zensical is not installed: pip install -e '.[docs]'")
    for name in ("docs", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    text = (tmp_path / file).read_text(encoding="utf-8")
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    found = run(sys.executable, str(tmp_path / ".ci/docs.py"), str(tmp_path / "site"))
    assert found.returncode == 1 and message in found.stderr
    assert not (tmp_path / "site").exists()

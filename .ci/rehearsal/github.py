"""GitHub's part of a night: artifacts, pages, the branch `results`, and a `gh` that notes calls."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
AUTHOR = (
    "-c",
    "user.name=rehearsal",
    "-c",
    "user.email=rehearsal@example.com",
    "-c",
    "commit.gpgsign=false",
)
# What the actions may be given.
ACTIONS = {
    "actions/checkout": {"ref", "path", "fetch-depth", "persist-credentials"},
    "actions/setup-python": {"python-version"},
    "actions/upload-artifact": {"name", "path", "if-no-files-found"},
    "actions/download-artifact": {"name", "pattern", "merge-multiple", "path"},
    "actions/upload-pages-artifact": {"path"},
    "actions/deploy-pages": set(),
}
GH = """#!/bin/sh
echo "gh $*" >>'{calls}'
for word; do if [ "$last" = --body-file ]; then cat "$word" >>'{calls}'; fi; last=$word; done
"""
NO_RIGHT = "#!/bin/sh\necho no right to write >&2\nexit 1\n"


def git(*arguments: str, at: Path = ROOT) -> str:
    """Return what a command of git prints."""
    return subprocess.run(
        ["git", *arguments], cwd=at, check=True, capture_output=True, text=True
    ).stdout.strip()


def guard_rows() -> list[str]:
    """Return the header and the rows of the checkout's guard."""
    return (ROOT / "results/guard.csv").read_text().splitlines(keepends=True)


def write_script(file: Path, text: str) -> None:
    """Write a program."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


class GitHub:
    """The remote repository, pages and calls of `gh` of a night, in a folder.

    Attributes:
        remote: the repository.
        site: the folder of the published pages.
        calls: the file of what `gh` was called with.
        unchanged: the commit of the branch `results` that the night finds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.remote = folder / "owner/name"
        self.site = folder / "site"
        self.calls = folder / "gh.txt"
        self.unchanged = ""
        self._artifacts = folder / "artifacts"

    def prepare(self, may_write: bool) -> None:
        """Empty the folder, and fill the branch with the rows of an earlier night."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._artifacts.mkdir(parents=True)
        write_script(self.folder / "bin/gh", GH.format(calls=self.calls))
        git("init", "-q", "--bare", "-b", "results", str(self.remote))
        self.rewrite(
            {
                "results/guard.csv": "".join(guard_rows()[:100]),
                "gpu-passed": git("rev-parse", "HEAD") + "\n",
            }
        )
        if not may_write:
            write_script(self.remote / "hooks/pre-receive", NO_RIGHT)

    def rewrite(self, files: Mapping[str, str]) -> None:
        """Make these files the whole branch `results`."""
        with TemporaryDirectory() as name:
            folder = Path(name)
            git("init", "-q", "-b", "results", name)
            for path, text in files.items():
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_text(text)
            git("add", ".", at=folder)
            git(*AUTHOR, "commit", "-q", "-m", "Rows of a night", at=folder)
            git("push", "-q", "--force", self.remote.as_uri(), "results", at=folder)
            self.unchanged = git("rev-parse", "HEAD", at=folder)

    def branch(self) -> dict[str, list[str]]:
        """Return the lines of each CSV on the branch `results`."""
        names = git("ls-tree", "-r", "--name-only", "results", at=self.remote).splitlines()
        return {
            name: git("show", f"results:{name}", at=self.remote).splitlines()
            for name in names
            if "csv" in name
        }

    def act(self, action: str, given: Mapping[str, str], workspace: Path) -> bool:
        """Do what an action does; return whether it succeeds."""
        path = workspace / given.get("path", ".")
        actions: dict[str, Callable[[Path, Mapping[str, str]], bool]] = {
            "actions/checkout": self._checkout,
            "actions/upload-artifact": self._upload,
            "actions/download-artifact": self._download,
            "actions/upload-pages-artifact": self._upload_pages,
            "actions/deploy-pages": self._deploy_pages,
        }
        return action not in actions or actions[action](path, given)

    def _checkout(self, path: Path, given: Mapping[str, str]) -> bool:
        source = ["--depth", "1", ROOT.as_uri()]
        if given.get("fetch-depth") == "0":
            source = [str(ROOT)]
        if "ref" in given:
            source = ["--branch", given["ref"], self.remote.as_uri()]
        if subprocess.run(["git", "clone", *source, path], capture_output=True).returncode:
            return False
        if "ref" not in given:
            git("checkout", "-q", "-B", "main", at=path)
        return True

    def _upload(self, path: Path, given: Mapping[str, str]) -> bool:
        if path.exists():
            copy(path, self._artifacts / given["name"])
        return path.exists() or given.get("if-no-files-found") != "error"

    def _download(self, path: Path, given: Mapping[str, str]) -> bool:
        pattern = given.get("pattern", given.get("name", ""))
        chosen = [
            artifact for artifact in self._artifacts.iterdir() if fnmatch(artifact.name, pattern)
        ]
        for artifact in chosen:
            copy(artifact, path)
        return bool(chosen) or "name" not in given

    def _upload_pages(self, path: Path, _: Mapping[str, str]) -> bool:
        if not (path / "index.html").exists():
            return False
        copy(path, self._artifacts / "github-pages")
        return True

    def _deploy_pages(self, *_: object) -> bool:
        copy(self._artifacts / "github-pages", self.site)
        return True


def copy(source: Path, target: Path) -> None:
    """Copy a file, or what a folder holds, into a folder."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    else:
        target.mkdir(exist_ok=True)
        shutil.copy(source, target)

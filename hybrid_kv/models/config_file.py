"""A model's config.json, its values checked where they are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_kv.config import ConfigError
from hybrid_kv.files import read_text

# No published shape comes near; above it, what torch would allocate no longer fits 64 bits.
MAX_SIZE = 2**31 - 1
HUB_SECONDS = 5


@dataclass(frozen=True)
class ConfigFile:
    """The keys of a config.json and where it lies.

    A reader raises `ConfigError` that names file, key and value.
    """

    values: dict[str, Any]
    source: str

    @classmethod
    def read(cls, source: str | Path | dict[str, Any]) -> ConfigFile:
        """Read a file, the folder that holds one, or parsed JSON.

        A multimodal model's `text_config` comes first.

        Raises:
            ConfigError: no such file, or no JSON object in it.
        """
        values = read_config(source)
        if isinstance(values.get("text_config"), dict):
            values = {**values, **values["text_config"]}
        return cls(values, "config.json" if isinstance(source, dict) else str(source))

    @property
    def model_type(self) -> str:
        return self.text("model_type", default="") or ""

    def fail(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.source}: {problem}")

    def get(self, *names: str) -> Any:
        """Return the value of the first of `names` that is there and not null."""
        return self._found(*names)[1]

    def _found(self, *names: str) -> tuple[str, Any]:
        given = (name for name in names if self.values.get(name) is not None)
        name = next(given, names[0])
        return name, self.values.get(name)

    def maybe_size(self, *names: str) -> int | None:
        """Return an integer from 1 to `MAX_SIZE`, or None where it is not given."""
        return self._integer(1, *names)

    def count(self, name: str, default: int) -> int:
        """Return an integer from 0 to `MAX_SIZE`."""
        value = self._integer(0, name)
        return default if value is None else value

    def _integer(self, least: int, *names: str, most: int = MAX_SIZE) -> int | None:
        name, value = self._found(*names)
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < least
        ):
            raise self.fail(
                f"{name}={shown(value)} must be an integer >= {least}; correct the file"
            )
        if value is not None and value > most:
            raise self.fail(f"{name}={shown(value)} must be at most {most}; correct the file")
        return value

    def size(self, *names: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """Return an integer from 1 to `most`."""
        value = self._integer(1, *names, most=most)
        if value is None and default is None:
            raise self.fail(
                f"{' or '.join(names)} is missing; a {self.model_type} config must give it as an "
                "integer >= 1"
            )
        # One of them is there.
        return default if value is None else value  # type: ignore[return-value]

    def number(self, name: str, default: float) -> float:
        """Return a positive, finite number."""
        value = self.get(name)
        if value is None:
            return default
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < float("inf")
        ):
            raise self.fail(f"{name}={shown(value)} must be a number above 0; correct the file")
        return float(value)

    def numbers(self, name: str, count: int) -> list[float]:
        """Return `count` positive, finite numbers of a list; ones where it is not given."""
        values = self.get(name)
        if values is None:
            return [1.0] * count
        if not isinstance(values, list) or len(values) != count:
            raise self.fail(
                f"{name}={shown(values)} must be a list of {count} numbers; correct the file"
            )
        return [ConfigFile({name: value}, self.source).number(name, 1.0) for value in values]

    def only(self, name: str, supported: Any) -> None:
        """Refuse every other value than the one that can be run, and none."""
        value = self.get(name)
        if value not in (None, supported):
            raise self.fail(
                f"{name}={shown(value)} can't be run, {supported!r} can; use another checkpoint"
            )

    def flag(self, name: str, default: bool) -> bool:
        """Return True or False."""
        value = self.get(name)
        if not isinstance(value, bool | None):
            raise self.fail(f"{name}={shown(value)} must be true or false; correct the file")
        return default if value is None else value

    def text(self, *names: str, default: str | None = None) -> str | None:
        """Return a string."""
        name, value = self._found(*names)
        if not isinstance(value, str | None):
            raise self.fail(f"{name}={shown(value)} must be a text; correct the file")
        return default if value is None else value


def read_config(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object in a config.json.

    Args:
        source: the file, the folder or the hub's repository that holds it, or the object itself.

    Raises:
        ConfigError: no such file, or no JSON object in it.
    """
    if isinstance(source, dict):
        return source
    path = Path(source)
    is_folder = path.is_dir()
    path = path / "config.json" if is_folder else path
    values = read_json(path)
    if values is None and not is_folder and is_hub_id(source):
        values = read_json(from_hub(source, "hf_hub_download", filename="config.json"))
    if values is None:
        raise ConfigError(
            f"{path} does not exist; give a config.json, the folder that holds it, or owner/name "
            "on the hub"
        )
    return values


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of a checkpoint; None where there is no such file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        values = json.loads(read_text(path))
    except FileNotFoundError:
        return None
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); give a readable {path.name}"
        ) from None
    # A file name with a null character is a ValueError, too.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds a {type(values).__name__}, not a JSON object; download it again"
        )
    return values


def is_hub_id(model: str | Path) -> bool:
    """Return whether this may name a repository of the hub, `owner/name`, and no path to a file."""
    name = str(model)
    return (
        name.count("/") == 1
        and not name.startswith((".", "/", "~"))
        and not name.endswith((".json", "/"))
    )


def from_hub(model: str | Path, download: str, **options: Any) -> Path:
    """Return the path of a repository's download, or of an earlier one where there is no network.

    The hub's client retries for half a minute, and prints that; it is called once the hub has
    answered.

    Args:
        model: `owner/name`.
        download: name of the function of `huggingface_hub`.
        options: its further arguments.

    Raises:
        ConfigError: with the hub's message in one line.
    """
    import huggingface_hub

    try:
        local = not hub_answers(str(model))
        return Path(
            getattr(huggingface_hub, download)(str(model), local_files_only=local, **options)
        )
    except huggingface_hub.errors.LocalEntryNotFoundError:
        problem = (
            f"not a folder, the hub does not answer within {HUB_SECONDS} s, and no earlier "
            "download has it"
        )
        raise ConfigError(
            f"model {model}: {problem}; give a folder, or try again with a network"
        ) from None
    # The hub's client raises many unrelated types for "not there" and "no network".
    except Exception as error:
        raise ConfigError(
            f"model {model}: not a folder, and the hub says: {first_line(error)}"
        ) from None


def hub_answers(repository: str, file: str = "config.json", kind: str = "model") -> bool:
    """Return whether there is a network, an answer that the hub has no such file included."""
    import huggingface_hub as hub

    try:
        hub.get_hf_file_metadata(
            hub.hf_hub_url(repository, file, repo_type=kind), timeout=HUB_SECONDS
        )
    except hub.errors.HfHubHTTPError:
        return True
    except Exception:  # its errors of transport are those of one of three packages, by version
        return False
    return True


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def shown(value: Any) -> str:
    """Return a value as an error shows it, cut to 80 characters."""
    shown_value = repr(value)
    return shown_value if len(shown_value) <= 80 else f"{shown_value[:77]}..."

"""Tiny trained models that need their recurrent state to answer (see README.md)."""

from pathlib import Path

FOLDER = Path(__file__).parent
FOLDERS = {  # by the ``model_type`` of their config.json; the first is the default everywhere
    "nemotron_h": FOLDER,
    "qwen3_5_moe_text": FOLDER.with_name("guard_model_qwen3_5"),
}


def embedded(model: str | Path | None) -> str | Path:
    """Return the folder of an embedded model by its name; any other model as it is.

    None names the first one.
    """
    known = {folder.name: folder for folder in FOLDERS.values()}
    return FOLDER if model is None else known.get(str(model), model)

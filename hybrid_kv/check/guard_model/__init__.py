"""Tiny trained models that need their recurrent state to answer (see README.md): what is in their folders."""

from pathlib import Path

FOLDER = Path(__file__).parent
FOLDERS = {  # by the ``model_type`` of their config.json; the first is the default everywhere
    "nemotron_h": FOLDER,
    "qwen3_5_moe_text": FOLDER.with_name("guard_model_qwen3_5"),
}


def embedded(model: str | Path | None) -> str | Path:
    """The folder of an embedded model by its name, of the first one for None; any other model as it is."""
    known = {folder.name: folder for folder in FOLDERS.values()}
    return FOLDER if model is None else known.get(str(model), model)

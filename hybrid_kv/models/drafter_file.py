"""The config.json of a block drafter, and the caches of its layers; without torch, for plans."""

from __future__ import annotations

from typing import Any

from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.models.config_file import ConfigFile, shown
from hybrid_kv.models.shapes import model_shape
from hybrid_kv.models.specs import WINDOW

ARCHITECTURE = "DFlashDraftModel"
PREFIX = "dflash."  # of the names of its layers' caches


def as_target_file(file: ConfigFile) -> ConfigFile:
    """Return a DFlash drafter's file with the keys of `dflash_config` beside the others.

    `layer_types` names each layer, and `sliding_window` is that of those with one.

    Raises:
        ConfigError: it is no DFlash drafter, or a layer's queries see all masks.
    """
    if ARCHITECTURE not in (file.get("architectures") or []):
        raise file.fail(
            f"architectures={shown(file.get('architectures'))} has no {ARCHITECTURE}; give a "
            "DFlash drafter"
        )
    drafter = file.get("dflash_config")
    if not isinstance(drafter, dict):
        raise file.fail(f"dflash_config={shown(drafter)} must be an object; correct the file")
    file = ConfigFile({**file.values, **drafter}, file.source)
    kinds = file.get("layer_types") or ["full_attention"] * file.size("num_hidden_layers")
    is_causal = file.flag("causal", default=all(kind == WINDOW for kind in kinds))
    if file.flag("use_swa", default=False) and WINDOW not in kinds:
        kinds = [WINDOW] * len(kinds)
    if not file.flag("is_causal", default=is_causal):
        raise file.fail(
            "queries that see the masks after their own (dflash_config.causal) can't be run; use a "
            "drafter all of whose layers have a window, or are causal"
        )
    window = file.get("swa_window_size", "sliding_window")
    return ConfigFile({**file.values, "layer_types": kinds, "sliding_window": window}, file.source)


def drafter_layers(file: ConfigFile, **options: Any) -> dict[str, KVCacheSpec]:
    """Return the specs of a drafter's layers, under the names that they have in the engine.

    `options`: those of `models.shapes.model_shape`.

    Raises:
        ConfigError: see `as_target_file`.
    """
    shape = model_shape(as_target_file(file), **options)
    return {PREFIX + name: spec for name, spec in shape.layers.items()}

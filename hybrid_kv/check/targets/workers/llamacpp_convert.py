"""A checkpoint as GGUF, by llama.cpp's own converter.

It is run as `python llamacpp_convert.py TREE FOLDER FILE NOISE DTYPE`.

The vocabulary is not converted: token 7 is `w7`. Of such a file a server takes and gives token ids
alone, and no token ends a text: what ends one, `ignore_eos` would forbid, which changes the
likeliest token.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

# Of layers, as transformers 5 writes them and as the converter of these models reads them.
NAMES = {"granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"}}


def main(tree: str, folder: str, file: str, noise: str, dtype: str) -> None:
    """Write the file; what the converter refuses it says itself.

    Args:
        noise: standard deviation of what is added to each weight, in means of its matrix.
        dtype: of matrices, `f32` or `bf16`.
    """
    sys.path.insert(0, tree)
    sys.argv = ["convert_hf_to_gguf.py"]  # it takes arguments while it is imported
    import convert_hf_to_gguf as converter

    choose = converter.get_model_class

    def with_plain_words(*args: Any, **kwargs: Any) -> Any:
        chosen = choose(*args, **kwargs)
        chosen.set_vocab = plain_words
        return chosen

    converter.get_model_class = with_plain_words
    with tempfile.TemporaryDirectory() as copy:
        for path in Path(folder).iterdir():
            if path.name == "config.json":
                (Path(copy) / path.name).write_text(json.dumps(named(json.loads(path.read_text()))))
            elif path.suffix == ".safetensors" and float(noise):
                add_noise(path, Path(copy) / path.name, float(noise))
            else:
                (Path(copy) / path.name).symlink_to(path.absolute())
        sys.argv += [copy, "--outtype", dtype, "--outfile", file]
        converter.main()


def named(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the keys and the names of layers that the converter knows."""
    names = NAMES.get(config["model_type"], {})
    if not (kinds := config.get("layer_types")):
        return config
    found = config | {"layer_types": [names.get(kind, kind) for kind in kinds]}
    if config["model_type"].startswith("qwen3") and "full_attention" in kinds:
        found["full_attention_interval"] = kinds.index("full_attention") + 1
    return found


def add_noise(path: Path, copy: Path, noise: float) -> None:
    """Write a copy of some weights that are a little off."""
    import torch
    from safetensors.torch import load_file, save_file

    rng = torch.Generator().manual_seed(0)
    found = {}
    for name, weight in load_file(path).items():
        moved = torch.randn(weight.shape, generator=rng) * noise * weight.float().abs().mean()
        found[name] = (weight + moved.to(weight.dtype)).contiguous()
    save_file(found, copy, metadata={"format": "pt"})


def plain_words(model: Any) -> None:
    """Instead of a converter's `set_vocab`."""
    import gguf

    hparams = model.hparams
    size = hparams.get("vocab_size") or hparams["text_config"]["vocab_size"]
    writer = model.gguf_writer
    writer.add_tokenizer_model("rwkv")  # of all kinds the one without special tokens
    writer.add_token_list([f"w{i}" for i in range(size)])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * size)


if __name__ == "__main__":
    main(*sys.argv[1:])

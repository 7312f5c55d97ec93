"""Makes the bundled tiny model, all of it, from a seed.

    python packages/hpc-qwen35/tools/make_tiny.py [--out FOLDER] [--seed N]

One seed gives the same bytes on one machine and one set of library versions. Nothing is read but the word
list and the chat template beside this file.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import save_file
from tiny_corpus import corpus
from tiny_tokenizer import BASE_VOCAB, END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS, tokenizer_config, train
from tiny_weights import tiny_weights
from tiny_words import read_words

from hpc_qwen35.config import parse_config

HERE = Path(__file__).resolve().parent
BUNDLE = HERE.parent / "src" / "hpc_qwen35" / "bundled" / "tiny"
SEED = 35
DOCUMENTS = 6000
MAX_POSITIONS = 32768
# Rows past the tokenizer's last id are padding, as in the published checkpoints: they must never be chosen.
VOCAB_ROWS = 4096


def token_id(text: str) -> int:
    """The id of a special token."""
    return BASE_VOCAB + [name for name, _ in SPECIAL_TOKENS].index(text)


def model_config() -> dict[str, object]:
    """The fields of `config.json`."""
    layers, interval = 8, 4
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": token_id(END_OF_TURN),
        "full_attention_interval": interval,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 384,
        "layer_types": [
            "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)
        ],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": "qwen3_5_text",
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "pad_token_id": token_id(END_OF_TEXT),
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000.0,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": VOCAB_ROWS,
    }


def generation_config() -> dict[str, object]:
    """The fields of `generation_config.json`."""
    return {
        "do_sample": True,
        "eos_token_id": [token_id(END_OF_TURN), token_id(END_OF_TEXT)],
        "pad_token_id": token_id(END_OF_TEXT),
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.95,
    }


def write_texts(folder: Path, seed: int) -> None:
    """Everything but the weights: about a second."""
    words = read_words(HERE / "tiny_words.txt")
    train(corpus(words, seed, DOCUMENTS)).save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(MAX_POSITIONS))
    _write_json(folder / "config.json", model_config())
    _write_json(folder / "generation_config.json", generation_config())
    shutil.copyfile(HERE / "chat_template.jinja", folder / "chat_template.jinja")


def write_weights(folder: Path, seed: int) -> None:
    """`model.safetensors`: BF16, about 9 MB."""
    path = folder / "model.safetensors"
    save_file(tiny_weights(parse_config(model_config()), seed), path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes 0600, which would go into the wheel


def main() -> None:
    """Writes the folder."""
    parser = argparse.ArgumentParser(description="Make the bundled tiny model.")
    parser.add_argument("--out", type=Path, default=BUNDLE, help="folder to write (default: the package's)")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_texts(options.out, options.seed)
    write_weights(options.out, options.seed)


def _write_json(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

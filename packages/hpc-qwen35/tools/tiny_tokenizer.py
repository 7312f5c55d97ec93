"""The tiny tokenizer: byte-level BPE with Qwen3.5's normaliser, split rule and special tokens."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

__all__ = ["BASE_VOCAB", "END_OF_TEXT", "END_OF_TURN", "SPECIAL_TOKENS", "tokenizer_config", "train"]

BASE_VOCAB = 4050
"""256 bytes and 3,794 merges. The special tokens follow, in the order of the published checkpoints."""

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

# True: left out when decoding for a reader. False: text that a parser downstream looks for.
SPECIAL_TOKENS: tuple[tuple[str, bool], ...] = (
    (END_OF_TEXT, True),
    ("<|im_start|>", True),
    (END_OF_TURN, True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)

# Words keep their combining marks, digits stand alone, newlines close a run of punctuation (model-facts §10).
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of BASE_VOCAB learned entries and the special tokens; the same for the same texts."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = BpeTrainer(
        vocab_size=BASE_VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != BASE_VOCAB:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} entries; {BASE_VOCAB} are needed")
    tokenizer.add_tokens(
        [AddedToken(text, special=hidden, normalized=False) for text, hidden in SPECIAL_TOKENS]
    )
    return tokenizer


def tokenizer_config(max_length: int) -> dict[str, object]:
    """What `tokenizer_config.json` says beside `tokenizer.json`. max_length: tokens."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(BASE_VOCAB + i): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": hidden,
            }
            for i, (text, hidden) in enumerate(SPECIAL_TOKENS)
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "errors": "replace",
        "model_max_length": max_length,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen3_5Tokenizer",
        "unk_token": None,
    }

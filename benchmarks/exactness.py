"""How far logits move when the same prompt is cut into other prefill chunks, or its KV is stored in BF16.

`uv run python benchmarks/exactness.py` prints one JSON object: for each way to compute the last token's
logits of three random prompts, the largest difference to a run in 2,048-token chunks, and whether the most
likely token stayed the same. Equal cuts must differ by exactly 0.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from hpc_qwen35.bundled import tiny_folder
from hpc_qwen35.load import load
from hpc_qwen35.options import Options
from hpc_qwen35.program import Qwen35Program

TOKENS = 3300
SEEDS = (0, 1, 2)


def logits(program: Qwen35Program, tokens: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """The addressable logits after the last token, computed from nothing in passes that end at `cuts`."""
    model = program.model
    row = torch.arange(-(-len(tokens) // 64), dtype=torch.int32)
    model.states.bytes[0].zero_()
    begin = 0
    for end in cuts:
        hidden = model.prefill(tokens[begin:end], begin, 0, row)
        begin = end
    return model.logits(hidden[None])[0, : program.vocab_size]


def chunks(size: int) -> list[int]:
    """Ends of passes of `size` tokens."""
    return [*range(size, TOKENS, size), TOKENS]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=tiny_folder(), help="a model folder")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    def program(kv_dtype: str) -> Qwen35Program:
        asked = Options(kv_capacity=2 * TOKENS, host_cache_mib=0, threads=options.threads, kv_dtype=kv_dtype)
        return load(options.folder, asked)

    exact, rounded = program("fp32"), program("bf16")
    runs = {
        "the same cuts": (exact, chunks(2048)),
        **{f"cold, chunks of {size:,}": (exact, chunks(size)) for size in (1088, 512, 192, 64)},
        **{f"resumed at {at:,}": (exact, [2048, at, TOKENS]) for at in (2400, 2985, 3050, 3236)},
        "BF16 KV, the same cuts": (rounded, chunks(2048)),
    }
    gaps = dict.fromkeys(runs, 0.0)
    same = dict.fromkeys(runs, True)
    deviation = 0.0
    for seed in SEEDS:
        tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, exact.vocab_size, TOKENS))
        reference = logits(exact, tokens, chunks(2048))
        deviation = max(deviation, reference.std().item())
        for name, (which, cuts) in runs.items():
            run = logits(which, tokens, cuts)
            gaps[name] = max(gaps[name], (run - reference).abs().max().item())
            same[name] = same[name] and bool(run.argmax() == reference.argmax())
    table = {
        name: {"max_difference": float(f"{gap:.2g}"), "same_top_token": same[name]}
        for name, gap in gaps.items()
    }
    print(json.dumps({"tokens": TOKENS, "logit_deviation": round(deviation, 2), "runs": table}, indent=2))


if __name__ == "__main__":
    main()

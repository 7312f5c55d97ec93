"""Times the bare model on CPU: prefill, decode and a warm turn, without index and server.

Prints one JSON object of medians in milliseconds for each thread count asked for:

    python benchmarks/model_cpu.py [FOLDER] --threads 1 2
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hpc_qwen35.config import Qwen35Config, parse_config, read_config
from hpc_qwen35.init import initialise
from hpc_qwen35.kv_pool import KvPool
from hpc_qwen35.loading import load_weights
from hpc_qwen35.model import Qwen35Model
from hpc_qwen35.state_pool import StatePool
from hpc_qwen35.weights import Qwen35Weights, fuse_tensors

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONTEXT, CHUNK, TURN, REPLY = 3300, 2048, 250, 64  # tokens
PAGES = 2 * 64

TINY = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "tie_word_embeddings": True,
}  # the shape of the bundled model


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` runs after one that warms up."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times) * 1e3, 2)


def measure(model: Qwen35Model, tokens: torch.Tensor, repeats: int) -> dict[str, float]:
    """Medians in milliseconds of a cold prompt, a warm turn, and a decode step of one and of four lanes."""
    row = torch.randperm(PAGES // 2)
    rows = [row, row + PAGES // 2, row, row]

    def prefill(base: int, end: int) -> None:
        for begin in range(base, end, CHUNK):
            model.prefill(tokens[begin : min(begin + CHUNK, end)], begin, 0, row)

    def decode(lanes: int) -> None:
        for position in range(CONTEXT + TURN, CONTEXT + TURN + REPLY):
            step = tokens[position : position + 1].expand(lanes)
            hidden = model.decode(step, [position] * lanes, list(range(lanes)), rows[:lanes])
            model.logits(hidden)

    def step_ms(lanes: int) -> float:
        return round(median_ms(lambda: decode(lanes), repeats) / REPLY, 3)

    return {
        f"prefill_{CONTEXT}": median_ms(lambda: prefill(0, CONTEXT), repeats),
        f"prefill_{TURN}_over_{CONTEXT}": median_ms(lambda: prefill(CONTEXT, CONTEXT + TURN), 2 * repeats),
        "decode_step_1_lane": step_ms(1),
        "decode_step_4_lanes": step_ms(4),
    }


def load(folder: Path | None, dtype: torch.dtype) -> tuple[Qwen35Config, Qwen35Weights]:
    """A model folder's weights, or random ones of the bundled model's shape."""
    if folder is not None:
        config = read_config(folder)
        return config, load_weights(folder, config, CPU, dtype).weights
    config = parse_config(TINY)
    tensors = initialise(config, torch.Generator().manual_seed(0))
    return config, fuse_tensors(config, tensors, CPU, dtype)


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--kv-dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    dtype = DTYPES[options.dtype]
    config, weights = load(options.folder, dtype)
    model = Qwen35Model(
        config,
        weights,
        KvPool(config, options.kv_dtype, PAGES, CPU),
        StatePool(config, 4, CPU, dtype),
    )
    tokens = torch.randint(
        config.vocab_size, (CONTEXT + TURN + REPLY,), generator=torch.Generator().manual_seed(0)
    )
    result: dict[str, object] = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "dtype": options.dtype,
        "kv_dtype": options.kv_dtype,
    }
    for threads in options.threads:
        torch.set_num_threads(threads)
        result[f"threads_{threads}_ms"] = measure(model, tokens, options.repeats)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

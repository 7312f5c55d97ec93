"""Qwen3.5 hybrid models on paged KV and slot-major state images."""

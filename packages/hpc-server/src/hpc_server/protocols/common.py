"""What chat and completions share: sampling, lengths, stop strings, streaming, and the usage they report."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import attrs

from hpc_index.requests import Sampling
from hpc_server import limits
from hpc_server.protocols.errors import not_valid
from hpc_server.protocols.fields import Fields, Use, shown

__all__ = ["COMMON_FIELDS", "Common", "ModelLimits", "read_common", "usage"]

COMMON_FIELDS: Mapping[str, Use] = {
    "model": Use.USED,
    "max_tokens": Use.USED,
    "temperature": Use.USED,
    "top_p": Use.USED,
    "top_k": Use.USED,
    "min_p": Use.USED,
    "presence_penalty": Use.USED,
    "frequency_penalty": Use.USED,
    "repetition_penalty": Use.USED,
    "logit_bias": Use.USED,
    "seed": Use.USED,
    "stop": Use.USED,
    "ignore_eos": Use.USED,
    "logprobs": Use.USED,
    "stream": Use.USED,
    "stream_options": Use.USED,
    "cache_salt": Use.USED,
    "cache_prompt": Use.USED,
    "return_token_ids": Use.USED,
    "n": Use.ACCEPTED,
    "user": Use.IGNORED,
    "id_slot": Use.IGNORED,
}
"""Fields of both endpoints; each adds its own."""

_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")


@attrs.frozen
class ModelLimits:
    """What requests are checked against. names: model names that are answered to."""

    names: frozenset[str]
    max_context: int
    vocab_size: int


@attrs.frozen
class Common:
    """A request's settings. max_new: as asked, None for all that is left of the context."""

    sampling: Sampling
    max_new: int | None
    stops: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    cache_salt: bytes
    cacheable: bool
    unknown: tuple[str, ...]


def read_common(
    fields: Fields,
    model: ModelLimits,
    *,
    max_new_names: tuple[str, ...],
    logprobs: int | None,
    unknown: tuple[str, ...],
) -> Common:
    """Check and read the shared fields. Raises RequestError.

    max_new_names: fields that bound the reply, the one that counts if both are there first.
    """
    name = fields.string("model", limits.MAX_NAME_CHARS)
    if name is not None and name not in model.names:
        raise not_valid("model", f"{shown(name)} is not served here", code="model_not_found", status=404)
    if fields.integer("n", 1, 1 << 20) not in (None, 1):
        raise fields.error("n", "1: one choice per request")
    stream, options = fields.boolean("stream"), fields.mapping("stream_options")
    if options is not None and not stream:
        raise fields.error("stream_options", "absent unless stream is true")
    stream_options = Fields(options or {}, "stream_options.")
    for option in _STREAM_OPTIONS:
        stream_options.boolean(option)
    bounds = [fields.integer(field, 1, model.max_context) for field in max_new_names]
    return Common(
        sampling=_sampling(fields, model, logprobs),
        max_new=next((bound for bound in bounds if bound is not None), None),
        stops=_stops(fields),
        ignore_eos=fields.boolean("ignore_eos"),
        stream=stream,
        include_usage=stream_options.boolean("include_usage"),
        continuous_usage=stream_options.boolean("continuous_usage_stats"),
        return_token_ids=fields.boolean("return_token_ids"),
        cache_salt=(fields.string("cache_salt", limits.MAX_SALT_BYTES) or "").encode(),
        cacheable=fields.boolean("cache_prompt", default=True),
        unknown=unknown,
    )


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int
) -> dict[str, object]:
    """OpenAI's usage object. cached_tokens: the frontier that the request resumed from."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def _sampling(fields: Fields, model: ModelLimits, logprobs: int | None) -> Sampling:
    top_k = fields.integer("top_k", -1, limits.INT64[1])
    seed = fields.integer("seed", *limits.INT64)
    penalty = limits.MAX_PENALTY
    return Sampling(
        temperature=_or(fields.number("temperature", 0.0, limits.MAX_TEMPERATURE), 1.0),
        # -1 is how some clients say "all"; so is anything beyond the vocabulary.
        top_k=0 if top_k is None or not 0 < top_k < model.vocab_size else top_k,
        top_p=_or(fields.number("top_p", 0.0, 1.0, above=True), 1.0),
        min_p=_or(fields.number("min_p", 0.0, 1.0), 0.0),
        presence_penalty=_or(fields.number("presence_penalty", -penalty, penalty), 0.0),
        frequency_penalty=_or(fields.number("frequency_penalty", -penalty, penalty), 0.0),
        repetition_penalty=_or(
            fields.number("repetition_penalty", limits.MIN_REPETITION, limits.MAX_REPETITION), 1.0
        ),
        logit_bias=_logit_bias(fields, model),
        seed=secrets.randbits(63) if seed is None else seed & limits.INT64[1],
        logprobs=logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(fields: Fields, model: ModelLimits) -> tuple[tuple[int, float], ...]:
    given = fields.mapping("logit_bias")
    if given is None:
        return ()
    if len(given) > limits.MAX_BIASES:
        raise fields.error("logit_bias", f"an object of at most {limits.MAX_BIASES} keys")
    biases = Fields(given, "logit_bias.")
    pairs: dict[int, float] = {}
    for key in given:
        # Nine digits are more than any vocabulary has; longer ones are not worth converting.
        token = int(key) if key.isascii() and key.isdigit() and len(key) <= 9 else -1
        if not 0 <= token < model.vocab_size:
            raise not_valid("logit_bias", f"{shown(key)} is not a token id in [0, {model.vocab_size})")
        value = biases.number(key, -100.0, 100.0)
        if value is None:
            raise biases.error(key, "a number in [-100, 100]")
        pairs[token] = value
    return tuple(sorted(pairs.items()))


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > limits.MAX_STOPS:
        raise fields.error("stop", f"a string or a list of at most {limits.MAX_STOPS} strings")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            raise not_valid(f"stop[{i}]", f"is {shown(stop)}; it must be a string that is not empty")
    return tuple(stops)

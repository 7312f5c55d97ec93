"""A small tokenizer, and templates in the shape of the published Qwen3.5 and 3.6 ones."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from hpc_server.frontend import Frontend
from hpc_server.template import ChatTemplate
from hpc_server.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

CORPUS = (
    "You are a helpful assistant. The quick brown fox jumps over the lazy dog. system user assistant",
    "# Tools\n\nYou have access to the following functions:\n\n<tools>\n</tools>\n\nfunction parameter",
    'def add(a, b):\n    return a + b\n{"type": "function", "name": "read_file", "description": "x"}',
    "München, Größe, naïve, 東京, 日本語, emoji 😀, e\u0301, okay, hello hello hello world world.",
)

SYSTEM_AND_TOOLS = """\
{%- macro text_of(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- else %}
        {{- raise_exception('content is not text') }}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}
    {{- raise_exception('there are no messages') }}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\nYou may call:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\nWrite <tool_call>\\n<function=NAME>\\n</function>\\n</tool_call> to call one.' }}
    {%- if messages[0].role == 'system' %}
        {%- set content = text_of(messages[0].content) | trim %}
        {%- if content %}
            {{- '\\n\\n' + content }}
        {%- endif %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + text_of(messages[0].content) | trim + '<|im_end|>\\n' }}
{%- endif %}
"""

LAST_QUERY = """\
{%- set ns = namespace(searching=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set content = text_of(message.content) | trim %}
        {%- if not (content.startswith('<tool_response>') and content.endswith('</tool_response>')) %}
            {%- set ns.searching = false %}
            {%- set ns.last = index %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if ns.searching %}
    {{- raise_exception('there is no user query') }}
{%- endif %}
"""

TURNS = """\
{%- for message in messages %}
    {%- set content = text_of(message.content) | trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('a system message must come first') }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content | trim %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if KEEP_THINKING or loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if call.function is defined %}
                    {%- set call = call.function %}
                {%- endif %}
                {{- '\\n\\n' if loop.first and content | trim else ('' if loop.first else '\\n') }}
                {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
                {%- for name, value in call.arguments | items %}
                    {{- '<parameter=' + name + '>\\n' }}
                    {%- set nested = value is mapping or (value is sequence and value is not string) %}
                    {{- value | tojson | safe if nested else value | string }}
                    {{- '\\n</parameter>\\n' }}
                {%- endfor %}
                {{- '</function>\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""

STRIPPING = SYSTEM_AND_TOOLS + LAST_QUERY + TURNS.replace("KEEP_THINKING or ", "")
"""As 3.5: think blocks before the last query are dropped."""
PRESERVING = SYSTEM_AND_TOOLS + LAST_QUERY + TURNS.replace("KEEP_THINKING", "preserve_thinking is true")
"""As 3.6: `preserve_thinking` keeps them."""


@functools.cache
def document() -> str:
    """tokenizer.json of a byte-level BPE of a few hundred entries, with the Qwen structural tokens."""
    made = tokenizers.Tokenizer(BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS * 3, trainer)
    made.add_special_tokens(list(SPECIAL))
    made.add_tokens(list(PLAIN))
    return str(made.to_str())


@functools.cache
def full() -> tokenizers.Tokenizer:
    """The library's own tokenizer, which recognises structural tokens in text: an oracle."""
    return tokenizers.Tokenizer.from_str(document())


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(
        json.loads(document()), file=Path("tokenizer.json"), eos_ids=[full().token_to_id("<|im_end|>") or 0]
    )


def special(text: str) -> int:
    """Id of a structural token."""
    return tokenizer().special_ids[text]


@functools.cache
def template(source: str = PRESERVING) -> ChatTemplate:
    return ChatTemplate(source)


def frontend(source: str = PRESERVING, *, text_cache_bytes: int = 1 << 20) -> Frontend:
    return Frontend(tokenizer(), template(source), text_cache_bytes=text_cache_bytes)

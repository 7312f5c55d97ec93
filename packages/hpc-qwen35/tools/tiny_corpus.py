"""The text that the tiny tokenizer's merges are learned from: generated from a seed, nothing from outside.

Four kinds in about equal shares: English prose, chat turns with XML tool calls, JSON, Python-like code.
Words lean to the front of their lists, so that common ones get whole tokens and the rest share stems and
endings.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import attrs
from tiny_words import Words, inflected, plural

__all__ = ["corpus"]

# {n} noun, {N} plural, {v} base form, {s} third person, {d} past, {p} participle, {g} -ing form, {a}
# adjective, {r} adverb, {c} connective, {f} function word, {W} name, {P} place, {i} identifier, {#} number.
_SENTENCES = (
    "The {a} {n} {s} the {n} {c} the {a} {N}.",
    "{W} {d} to {P} with {#} {N} and a {a} {n}.",
    "I think that the {n} is {r} {a}, but I don't know why it {s}.",
    "You can {v} the {n} if you {v} the {N} first.",
    "We're {g} the {N} {c} the {n}; they've {p} {#} of them.",
    "It {s} because {W} {d} the {n} in the {n}.",
    "What does {W} {v} when the {n} is {a}?",
    "How many {N} are there in the {n} of {P}?",
    "There are {#} {N} in {P}, and each {n} has a {a} {n}.",
    "If the {n} isn't {a}, then {v} it {r} and {v} the result.",
    "Let's {v} this step by step: first the {n}, then the {N}, and finally the {a} {n}.",
    'She said, "I\'ll {v} the {n} {r}," and he {d} without {g}.',
    "My {n} was {p} by {W}, who {r} {s} {N} for a {n}.",
    "Please {v} the {a} {n} and {v} me how it {s}.",
    "Thank you! That's a {a} {n}; would you like me to {v} the {N} as well?",
    "Of course. Here is a short {n} about {N} and {g} in {P}:",
    "In other words, the {n} of the {n} should be {#}.{#} percent of its {n}.",
    "Yes, {W} could have {p} more than {#} {N}, which were all {a}.",
    "No, I can't {v} that; it would {v} the {n} of every {n}.",
    "The answer is {#}. To check it, {v} {#} and {#}, then {v} by {#}.",
    "On {#}-{#}-{#} at {#}:{#}, the {n} {d} (see the {n} below).",
    "Some {N} {v} {r}; others need {g} {c} {g}.",
    "{W}'s {n} costs ${#}, and its {n} weighs {#} kg.",
    "Note: {g} a {n} {s} the {N} of the previous {n}.",
    "Remember that the {n} code for {W} is {#}; you'll be asked for it later.",
    "Hello {W}, how are you today? I hope your {n} is {r} {a}.",
    "Okay, the user wants to {v} the {n}. I should {v} the {N} and then answer.",
    "{f} {f} {v} {f} {n} {f} {f} {N}, {f} {f} {g}.",
    "{f} {f} {n} {f} {f} {f} {a} {f} {f}?",
    "{f} {d} {f} {a} {N} {f} {f} {g} {f} {f} {n}.",
    "Wait, that isn't right: the {n} {d} before the {n} was {p}.",
)

_STATEMENTS = (
    "{i} = {i}.{i}({i})",
    "{i} = {i}[{i}] if {i} is not None else {#}",
    "{i}.{i}({i}, {i}={i})",
    "self._{i} = {i}",
    "self.{i} = {i}({i})",
    "{i}, {i} = {i}.{i}, {i}[-1]",
    "{i} += {#}",
    'print(f"{{{i}}} {n}: {{{i}}}")',
    'raise ValueError(f"{i} is {{{i}}}; it must be at least {#}")',
    "assert {i} == {i}",
    "{i}.append({i})",
    "{i} = [{i} for {i} in {i} if {i} != {#}]",
    "{i} = {{{i}: {i} for {i}, {i} in {i}.items()}}",
    "{i} = np.zeros(({i}, {#}), dtype=np.float32)",
    "{i} = torch.empty({i}, {i}, dtype=torch.int32, device={i}.device)",
    "{i} = {i}.reshape(-1, {#}).sum(dim={#})",
    "# {v} the {n} {c} the {N}",
    "return {i}",
    "return {i}.{i}({i}) + {#}",
    "yield {i}",
    "continue",
    "pass",
)

_HEADERS = (
    "if {i} is None:",
    "if {i} > {i} and not {i}:",
    "elif {i} in {i}:",
    "else:",
    "for {i} in range({i}):",
    "for {i}, {i} in enumerate({i}):",
    "while {i} < len({i}):",
    'with open({i}, encoding="utf-8") as {i}:',
    "try:",
    "except (KeyError, ValueError) as error:",
)

_TYPES = (
    "int",
    "str",
    "float",
    "bool",
    "bytes",
    "list[int]",
    "dict[str, object]",
    "Path",
    "Tensor",
    "int | None",
)
_TOOLS = ("get_weather", "search_web", "read_file", "write_file", "run_command", "get_time", "send_email")
_JSON_TYPES = ("string", "integer", "number", "boolean", "array")
_TURNS = ("system", "user", "assistant")


def corpus(words: Words, seed: int, documents: int) -> Iterator[str]:
    """`documents` texts of a few hundred characters each, the same for the same seed and words."""
    writer = _Writer(words, random.Random(seed))  # noqa: S311 - text, not secrets
    kinds = (writer.prose, writer.chat, writer.json, writer.code)
    for number in range(documents):
        yield kinds[number % len(kinds)]()


@attrs.define
class _Writer:
    """Writes texts of each kind from one random stream."""

    words: Words
    rng: random.Random

    def prose(self) -> str:
        rng = self.rng
        text = "\n\n".join(self._paragraph(rng.randint(2, 5)) for _ in range(rng.randint(1, 3)))
        if rng.random() < 0.3:
            marks = rng.choice((("-",) * 3, ("1.", "2.", "3."), ("*",) * 3))
            items = "\n".join(f"{mark} **{self._noun()}**: {self._sentence()}" for mark in marks)
            text = f"## {self._noun().capitalize()} and {self._noun()}\n\n{text}\n\n{items}\n"
        return text

    def chat(self) -> str:
        # Role and tag names are learned here; the special tokens round them are added tokens, which no
        # merge crosses.
        turns = [f"{role}\n{self._paragraph(2)}\n" for role in _TURNS]
        turns.append(f"{self._sentence()}\n\n{self._sentence()}\n\n{self._call()}\n")
        turns.append(self._object_text(depth=1) + "\n")
        return "".join(turns)

    def json(self) -> str:
        kind = self.rng.random()
        if kind < 0.4:
            return json.dumps({"type": "function", "function": self._tool_schema()})
        if kind < 0.6:
            return json.dumps({"name": self._tool(), "arguments": self._object(depth=1)})
        return self._object_text(depth=2)

    def code(self) -> str:
        rng = self.rng
        lines = []
        if rng.random() < 0.3:
            lines += [f"import {self._identifier()}", f"from {self._noun()} import {self._noun()}", ""]
        if rng.random() < 0.4:
            name = self._noun().capitalize() + self._noun().capitalize()
            lines += [f"class {name}:", f'    """{self._sentence()}"""', ""]
            lines += self._function("    ", "self, ")
        else:
            lines += self._function("", "")
        text = "\n".join(lines) + "\n"
        return f"```python\n{text}```\n" if rng.random() < 0.3 else text

    def _function(self, indent: str, first: str) -> list[str]:
        rng = self.rng
        count = rng.randint(1, 3)
        parameters = ", ".join(f"{self._identifier()}: {rng.choice(_TYPES)}" for _ in range(count))
        name = f"{self._pick(self.words.verbs)}_{self._noun()}"
        lines = [f"{indent}def {name}({first}{parameters}) -> {rng.choice(_TYPES)}:"]
        lines.append(f'{indent}    """{self._sentence()}"""')
        for _ in range(rng.randint(2, 5)):
            if rng.random() < 0.4:
                lines.append(f"{indent}    {self._fill(rng.choice(_HEADERS))}")
                lines.append(f"{indent}        {self._fill(rng.choice(_STATEMENTS))}")
            else:
                lines.append(f"{indent}    {self._fill(rng.choice(_STATEMENTS))}")
        return lines

    def _call(self) -> str:
        parameters = "".join(
            f"<parameter={self._identifier()}>\n{self._scalar_text()}\n</parameter>\n"
            for _ in range(self.rng.randint(1, 3))
        )
        return f"<function={self._tool()}>\n{parameters}</function>"

    def _tool_schema(self) -> dict[str, object]:
        names = [self._identifier() for _ in range(self.rng.randint(1, 3))]
        properties = {
            n: {"type": self.rng.choice(_JSON_TYPES), "description": self._sentence()} for n in names
        }
        parameters = {"type": "object", "properties": properties, "required": names[:1]}
        return {"name": self._tool(), "description": self._sentence(), "parameters": parameters}

    def _object_text(self, depth: int) -> str:
        return json.dumps(self._object(depth), indent=self.rng.choice((None, None, 2)))

    def _object(self, depth: int) -> dict[str, object]:
        rng = self.rng
        made: dict[str, object] = {}
        for _ in range(rng.randint(2, 5)):
            key = self._identifier() if rng.random() < 0.5 else f"{self._noun()}_{self._noun()}"
            kind = rng.random()
            if depth and kind < 0.2:
                made[key] = self._object(depth - 1)
            elif depth and kind < 0.3:
                made[key] = [self._scalar() for _ in range(rng.randint(1, 4))]
            else:
                made[key] = self._scalar()
        return made

    def _scalar(self) -> object:
        rng = self.rng
        number = rng.randint(0, 9999)
        values = (self._noun(), self._pick(self.words.places), number, number / 100, True, False, None)
        return rng.choice(values)

    def _scalar_text(self) -> str:
        value = self._scalar()
        return value if isinstance(value, str) else json.dumps(value)

    def _paragraph(self, sentences: int) -> str:
        return " ".join(self._sentence() for _ in range(sentences))

    def _sentence(self) -> str:
        text = self._fill(self.rng.choice(_SENTENCES))
        return text[0].upper() + text[1:]

    def _fill(self, template: str) -> str:
        """The template with every {letter} replaced; `{{` and `}}` stand for braces."""
        pieces: list[str] = []
        position = 0
        while position < len(template):
            if template.startswith(("{{", "}}"), position):
                pieces.append(template[position])
                position += 2
            elif template[position] == "{":
                pieces.append(self._word(template[position + 1]))
                position += 3
            else:
                pieces.append(template[position])
                position += 1
        return "".join(pieces)

    def _word(self, kind: str) -> str:
        words = self.words
        match kind:
            case "N":
                return plural(self._noun())
            case "v" | "s" | "d" | "p" | "g":
                return inflected(words, self._pick(words.verbs), kind)
            case "#":
                return str(self.rng.randint(0, 10 ** self.rng.randint(1, 4)))
            case "f":
                return self.rng.choice(words.function)
            case "W" | "P":
                return self.rng.choice(words.names if kind == "W" else words.places)
            case _:
                lists = {
                    "n": words.nouns,
                    "a": words.adjectives,
                    "r": words.adverbs,
                    "c": words.connectives,
                    "i": words.identifiers,
                }
                return self._pick(lists[kind])

    def _pick(self, words: tuple[str, ...]) -> str:
        # The power leans to the front of the list without starving its end.
        return words[int(self.rng.random() ** 1.5 * len(words))]

    def _noun(self) -> str:
        return self._pick(self.words.nouns)

    def _identifier(self) -> str:
        return self._pick(self.words.identifiers)

    def _tool(self) -> str:
        if self.rng.random() < 0.5:
            return self.rng.choice(_TOOLS)
        return f"{self._pick(self.words.verbs)}_{self._noun()}"

"""Jinja's immutable sandbox with nothing in it that can run or grow without asking the budget.

Jinja's own sandbox keeps a template away from Python's internals; it does not keep it from looping for
an hour or from building a string of gigabytes. So here, before a template is compiled,

- every loop takes its items through the budget, and `~`, comparisons and container literals go through it;
- operators and calls are Jinja's own hooks (`call_binop`, `call`), checked before they run;
- filters, tests, globals and methods are those of the lists below, each checked before and after;
- underscore attributes, imports, recursive loops and oversized sources are refused.

Nothing here depends on the time of day or on chance: the same request renders the same text.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from types import GeneratorType
from typing import cast

import jinja2
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hpc_server.template_budget import Bounds, Budget
from hpc_server.template_source import MAX_SOURCE_CHARS, instrument, refuse
from hpc_server.text_errors import TemplateError

__all__ = ["TemplateSandbox"]

MAX_INT_BITS = 4096
MAX_FILTER_INT = 4096

_OUTER_FILTERS = (
    "abs count d default first float int items last length list map reject rejectattr reverse round select "
    "selectattr"
)
"""They look at a container's own elements, not into them."""
_WHOLE_FILTERS = "dictsort max min sort unique"
"""They compare or order whatever is in a value."""
_TEXT_FILTERS = "capitalize indent join lower replace string title trim upper"
"""They write a value, or the elements of one, as text."""
_OUTER_TESTS = (
    "boolean defined even false float integer iterable mapping none number odd sameas sequence string true "
    "undefined"
)
_WHOLE_TESTS = "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper"
_TEXT_METHODS = (
    "capitalize count endswith find index isalnum isalpha isdigit islower isspace isupper join lower lstrip "
    "partition removeprefix removesuffix replace rfind rpartition rsplit rstrip split splitlines "
    "startswith strip title upper"
)
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    Mapping: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
}
_JINJAS_OWN = (jinja2.Environment, Context, EvalContext)
_DICT_ATTRIBUTES = frozenset(dir(dict))


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates under bounds. Safe to share between threads."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, bounds: Bounds | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            finalize=self._finalize,
            autoescape=False,
            cache_size=0,
        )
        self.bounds = bounds or Bounds()
        self._running = threading.local()
        filters = cast("dict[str, Callable[..., object]]", dict(self.filters))
        self.filters.clear()
        for name in _OUTER_FILTERS.split():
            self.add_filter(name, filters[name], whole=False)
        for name in (*_WHOLE_FILTERS.split(), *_TEXT_FILTERS.split()):
            self.add_filter(name, filters[name])
        self.filters.update(safe=_same, **{"-each": self._each, "-built": self._built})
        self.filters.update({"-concat": self._concat, "-weigh": self._weigh})
        tests = cast("dict[str, Callable[..., object]]", dict(self.tests))
        self.tests.clear()
        self.tests.update({name: tests[name] for name in _OUTER_TESTS.split()})
        self.tests.update(
            {name: self._bounded(name, tests[name], whole=True) for name in _WHOLE_TESTS.split()}
        )
        self.globals.clear()
        self.globals.update(range=self._range, namespace=Namespace, dict=self._dict)

    def add_filter(self, name: str, function: Callable[..., object], *, whole: bool = True) -> None:
        """Offer one more filter; what it takes and gives is accounted for.

        whole: it looks into the elements of containers.
        """
        self.filters[name] = self._bounded(name, function, whole=whole)

    def prepare(self, source: str) -> jinja2.Template:
        """Compile a template.

        Raises:
            TemplateError: it is too large, is not Jinja, or uses something that is not there.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"chat template: {len(source)} characters, at most {MAX_SOURCE_CHARS}")
        self._running.budget = Budget(self.bounds)
        try:
            tree = self.parse(source)
            refuse(tree)
            instrument(tree)
            code = self.compile(tree, name="chat_template")
            return jinja2.Template.from_code(self, code, self.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template: line {error.lineno}: {error.message}") from error
        except (SyntaxError, RecursionError, ValueError, MemoryError) as error:
            raise TemplateError(f"chat template: cannot be compiled: {error}") from error
        finally:
            del self._running.budget

    def run(self, template: jinja2.Template, variables: dict[str, object], *, extra_chars: int = 0) -> str:
        """Render; `extra_chars` of the variables' text is expected to be written out or worked on.

        Raises:
            TemplateError: a bound was reached, the template refused, or it failed.
        """
        bounds = self.bounds.enlarged(extra_chars)
        budget = self._running.budget = Budget(bounds)
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > bounds.text:
                    raise TemplateError(f"chat template: writes more than {bounds.text} characters")
                budget.step()
        except TemplateError:
            raise
        except RecursionError as error:
            raise TemplateError("chat template: macros call each other too deep") from error
        except Exception as error:  # a template is a program: it may fail in any way a program can
            raise TemplateError(f"chat template: {type(error).__name__}: {error}") from error
        finally:
            del self._running.budget
        return "".join(pieces)

    def call(self, context: Context, obj: object, *args: object, **kwargs: object) -> object:
        """Jinja's hook for every call in a template."""
        budget = self._budget
        budget.step(4)
        owner = getattr(obj, "__self__", None)
        if owner is not None and not isinstance(owner, (TemplateSandbox, LoopContext)):
            self._check_method(budget, owner, getattr(obj, "__name__", ""), args)
        result: object = super().call(context, obj, *args, **kwargs)
        if isinstance(result, str):
            budget.text(len(result))
        return result

    def getattr(self, obj: object, attribute: str) -> object:
        """Jinja's hook for `obj.attribute`. Most name fields of messages: no method of a dict."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        """Jinja's hook for an attribute that is out of reach: refused at once, not when it is used."""
        raise TemplateError(f"chat template: access to {attribute!r} of {type(obj).__name__} is refused")

    def wrap_str_format(self, value: object) -> None:
        """Jinja's hook for `str.format`: nothing stands in for it, so that `call` sees and refuses it."""

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Jinja's hook for every arithmetic operator."""
        budget = self._budget
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.text(len(left) + len(right))
            return left + right
        _check_operands(budget, operator, left, right)
        result: object = self.binop_table[operator](left, right)
        if isinstance(result, tuple):
            budget.value(result)
        return result

    @property
    def _budget(self) -> Budget:
        budget: Budget = self._running.budget
        return budget

    def _finalize(self, value: object) -> object:
        """Every printed value. Only text and numbers are: Python's way of writing a list is no prompt's."""
        if isinstance(value, str):
            self._budget.text(len(value))
        elif value is not None and not isinstance(value, (int, float, jinja2.Undefined)):
            raise TemplateError(f"chat template: writes a {type(value).__name__} as text; tojson does that")
        return value

    def _bounded(self, name: str, function: Callable[..., object], *, whole: bool) -> Callable[..., object]:
        """A filter or test whose arguments and result are accounted for."""
        written = name in _TEXT_FILTERS.split()

        @functools.wraps(function)
        def checked(*args: object, **kwargs: object) -> object:
            budget = self._budget
            budget.step()
            for value in args:
                if whole or isinstance(value, str):
                    budget.value(value)
                elif isinstance(value, (list, tuple, dict)):
                    budget.items(len(value))
            if written:
                _check_written(name, args)
            if kwargs or len(args) > 1:
                _check_arguments(budget, name, args, kwargs)
            result = function(*args, **kwargs)
            if isinstance(result, (GeneratorType, reversed)):
                result = list(budget.each(result, 0))
            if isinstance(result, str):
                budget.text(len(result))
            elif isinstance(result, list):
                budget.items(len(result))
            return result

        return checked

    def _check_method(self, budget: Budget, owner: object, name: str, args: tuple[object, ...]) -> None:
        allowed = next((names for kind, names in _METHODS.items() if isinstance(owner, kind)), None)
        if allowed is None or name not in allowed:
            raise TemplateError(f"chat template: method {name!r} of {type(owner).__name__} is not allowed")
        if not isinstance(owner, Mapping):  # its methods look at one key, or copy nothing
            budget.value(owner)
        for value in args:
            budget.value(value)
        if name == "join" and isinstance(owner, str) and args and isinstance(args[0], (list, tuple, str)):
            budget.text(len(owner) * len(args[0]))
        elif name == "replace" and isinstance(owner, str) and len(args) >= 2:
            _check_replace(budget, owner, args[0], args[1])

    def _each(self, items: object, chars: int) -> Iterator[object] | object:
        if isinstance(items, jinja2.Undefined):
            return items
        return self._budget.each(items, chars)  # type: ignore[arg-type]

    def _built(self, value: object) -> object:
        if isinstance(value, (list, tuple, dict)):
            self._budget.value(value)
        return value

    def _concat(self, values: list[object]) -> str:
        texts = [value if isinstance(value, str) else str(self._finalize(value)) for value in values]
        self._budget.text(sum(map(len, texts)))
        return "".join(texts)

    @jinja2.pass_context  # so that Jinja calls it each time, where it would fold constants in advance
    def _weigh(self, _context: object, nothing: str, chars: int) -> str:
        self._budget.text(chars)
        return nothing

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        try:
            self._budget.items(len(numbers))
        except OverflowError:
            raise TemplateError(f"chat template: range{bounds} is too long") from None
        return numbers

    def _dict(self, *pairs: Mapping[str, object], **items: object) -> dict[str, object]:
        for value in pairs:
            self._budget.value(value)
        made = dict(*pairs, **items)
        self._budget.value(made)
        return made


def _check_operands(budget: Budget, operator: str, left: object, right: object) -> None:
    for value in (left, right):
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise TemplateError(
                f"chat template: a number of {value.bit_length()} bits, at most {MAX_INT_BITS}"
            )
    if operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        budget.items(len(left) + len(right))
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, (str, list, tuple)) and isinstance(times, int):
                size = len(many) * max(times, 0)
                if isinstance(many, str):
                    budget.text(size)
                else:
                    budget.items(size)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * abs(right) > MAX_INT_BITS:
            raise TemplateError(f"chat template: a power of more than {MAX_INT_BITS} bits")
    elif operator == "%" and isinstance(left, str):
        raise TemplateError("chat template: string formatting with % is not allowed")


def _check_arguments(budget: Budget, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Refuse arguments that make a filter's result much larger than its input."""
    texts = [value for value in args if not isinstance(value, _JINJAS_OWN)]
    for value in (*texts[1:], *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_FILTER_INT and name in ("indent", "round", "join"):
            raise TemplateError(f"chat template: {name}({value}), at most {MAX_FILTER_INT}")
        budget.value(value)
    if name == "replace" and len(texts) >= 3:
        _check_replace(budget, texts[0], texts[1], texts[2])
    elif name == "join" and isinstance(texts[0], (list, tuple, str)):
        glue = texts[1] if len(texts) > 1 else kwargs.get("d", "")
        budget.text(len(str(glue)) * len(texts[0]))
    elif name == "indent":
        budget.text(
            (1 + str(texts[0]).count("\n")) * MAX_FILTER_INT if len(str(texts[0])) > MAX_FILTER_INT else 0
        )


def _check_written(name: str, args: tuple[object, ...]) -> None:
    """Refuse to write a container as text, as `_finalize` does."""
    given = [value for value in args if not isinstance(value, _JINJAS_OWN)]
    values = given[0] if name == "join" and isinstance(given[0], (list, tuple)) else given[:1]
    for value in values:
        if isinstance(value, (list, tuple, Mapping)):
            raise TemplateError(
                f"chat template: {name} writes a {type(value).__name__} as text; tojson does that"
            )


def _check_replace(budget: Budget, text: object, old: object, new: object) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        budget.text(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _same(value: object) -> object:
    return value

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
from jinja2 import nodes
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from hpc_server.template_budget import Bounds, Budget
from hpc_server.text_errors import TemplateError

__all__ = ["MAX_SOURCE_CHARS", "TemplateSandbox"]

MAX_SOURCE_CHARS = 1 << 17
MAX_SOURCE_NODES = 10_000
"""Bounds what runs between two looks at the clock; published templates have about 1,500."""
MAX_INT_BITS = 4096
MAX_FILTER_INT = 4096

_FILTERS = (
    "abs capitalize count d default dictsort first float indent int items join last length list lower map "
    "max min reject rejectattr replace reverse round select selectattr sort string title trim unique upper"
)
_TESTS_LEFT_OUT = frozenset({"filter", "test", "callable", "escaped"})
_TEXT_METHODS = (
    "capitalize count endswith find index isalnum isalpha isdigit islower isspace isupper join lower lstrip "
    "partition removeprefix removesuffix replace rfind rpartition rsplit rstrip split splitlines "
    "startswith strip title upper"
)
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
}


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
        filters = cast("dict[str, Callable[..., object]]", self.filters)
        kept = {name: self._bounded(name, filters[name]) for name in _FILTERS.split()}
        self.filters.clear()
        self.filters.update(kept, safe=_same, **{"-each": self._each, "-built": self._built})
        self.filters.update({"-concat": self._concat, "-weigh": self._weigh})
        tests = cast("dict[str, Callable[..., object]]", dict(self.tests))
        self.tests.clear()
        self.tests.update(
            {name: self._bounded(name, test) for name, test in tests.items() if name not in _TESTS_LEFT_OUT}
        )
        self.globals.clear()
        self.globals.update(range=self._range, namespace=Namespace, dict=self._dict)

    def add_filter(self, name: str, function: Callable[..., object]) -> None:
        """Offer one more filter; what it takes and gives is accounted for."""
        self.filters[name] = self._bounded(name, function)

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
            _refuse(tree)
            _Instrument().visit(tree)  # in place: a template is not replaced
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
        if isinstance(result, (str, list, tuple)):
            budget.value(result)
        return result

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
        """Every printed value. Programs' own objects are refused: their text would name addresses."""
        if isinstance(value, str):
            self._budget.text(len(value))
        elif isinstance(value, (list, dict, tuple)):
            self._budget.value(value)
        elif value is not None and not isinstance(value, (int, float, jinja2.Undefined)):
            raise TemplateError(f"chat template: prints a {type(value).__name__}")
        return value

    def _bounded(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        """A filter or test whose arguments and result are accounted for."""

        @functools.wraps(function)
        def checked(*args: object, **kwargs: object) -> object:
            budget = self._budget
            budget.step()
            for value in args:
                budget.value(value)
            if kwargs or len(args) > 1:
                _check_arguments(budget, name, args, kwargs)
            result = function(*args, **kwargs)
            if isinstance(result, (GeneratorType, reversed)):
                result = list(budget.each(result, 0))
            if isinstance(result, (str, list)):
                budget.value(result)
            return result

        return checked

    def _check_method(self, budget: Budget, owner: object, name: str, args: tuple[object, ...]) -> None:
        allowed = next((names for kind, names in _METHODS.items() if isinstance(owner, kind)), None)
        if allowed is None or name not in allowed:
            raise TemplateError(f"chat template: method {name!r} of {type(owner).__name__} is not allowed")
        for value in (owner, *args):
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


class _Instrument(NodeTransformer):
    """Puts the budget into a parsed template."""

    def visit(self, node: nodes.Node, *args: object, **kwargs: object) -> nodes.Node:
        """The node that takes the place of this one."""
        self.generic_visit(node)
        if isinstance(node, nodes.For):
            node.iter = _filter("-each", node.iter, nodes.Const(_constant_chars(node.body)))
        elif isinstance(node, (nodes.Macro, nodes.CallBlock)):
            weigh = _filter("-weigh", nodes.Const(""), nodes.Const(_constant_chars(node.body)))
            node.body.insert(0, nodes.Output([weigh]))
        elif isinstance(node, nodes.Concat):
            return _filter("-concat", nodes.List(node.nodes))
        elif isinstance(node, nodes.Compare):
            node.expr = _checked(node.expr)
            for operand in node.ops:
                operand.expr = _checked(operand.expr)
        elif _is_built(node):
            return _filter("-built", node)
        return node


def _filter(name: str, value: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None)


def _is_built(node: nodes.Node) -> bool:
    """Is it a container literal that holds more than constants?"""
    literal = isinstance(node, (nodes.List, nodes.Dict)) or (
        isinstance(node, nodes.Tuple) and node.ctx == "load"
    )
    return literal and next(node.find_all((nodes.Name, nodes.Call)), None) is not None


def _checked(operand: nodes.Expr) -> nodes.Expr:
    return operand if isinstance(operand, nodes.Const) else _filter("-built", operand)


def _constant_chars(body: list[nodes.Node]) -> int:
    """Characters that the body holds as constants and may write out without asking."""
    total = 0
    for node in body:
        total += sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        total += sum(len(const.value) for const in node.find_all(nodes.Const) if isinstance(const.value, str))
    return total


def _refuse(tree: nodes.Template) -> None:
    """Refuse what no chat template needs and an attack begins with (trust T1)."""
    count = 0
    for node in tree.find_all(nodes.Node):
        count += 1
        line = node.lineno
        if isinstance(node, nodes.Getattr):
            name = node.attr
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            name = node.arg.value if isinstance(node.arg.value, str) else ""
        elif isinstance(node, nodes.Name):
            name = node.name if node.name.startswith("__") else ""
        elif isinstance(node, (nodes.Import, nodes.FromImport, nodes.Include, nodes.Extends)):
            raise TemplateError(f"chat template: line {line}: loads another template")
        elif isinstance(node, nodes.For) and node.recursive:
            raise TemplateError(f"chat template: line {line}: recursive loops are not supported")
        else:
            continue
        if name.startswith("_"):
            raise TemplateError(f"chat template: line {line}: access to {name!r} is refused")
    if count > MAX_SOURCE_NODES:
        raise TemplateError(f"chat template: {count} syntax nodes, at most {MAX_SOURCE_NODES}")


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
    texts = [value for value in args if not isinstance(value, (jinja2.Environment, Context, EvalContext))]
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


def _check_replace(budget: Budget, text: object, old: object, new: object) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        budget.text(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _same(value: object) -> object:
    return value

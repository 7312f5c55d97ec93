"""What is done to a chat template's syntax before it is compiled: refuse, and put the budget in.

The names of the filters put in begin with a dash, which no template can write.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from hpc_server.text_errors import TemplateError

__all__ = ["MAX_SOURCE_CHARS", "MAX_SOURCE_NODES", "instrument", "refuse"]

MAX_SOURCE_CHARS = 1 << 17
MAX_SOURCE_NODES = 10_000
"""Bounds what runs between two looks at the clock; published templates have about 1,500."""


def refuse(tree: nodes.Template) -> None:
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


def instrument(tree: nodes.Template) -> None:
    """Make loops, macros, `~`, comparisons and container literals go through the budget. Changes the tree."""
    _Instrument().visit(tree)


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
    if isinstance(node, nodes.Tuple) and node.ctx != "load":
        return False
    return isinstance(node, (nodes.List, nodes.Dict, nodes.Tuple)) and _varies(node)


def _checked(operand: nodes.Expr) -> nodes.Expr:
    return _filter("-built", operand) if _varies(operand) else operand


def _varies(node: nodes.Node) -> bool:
    changing = (nodes.Name, nodes.Call)
    return isinstance(node, changing) or next(node.find_all(changing), None) is not None


def _constant_chars(body: list[nodes.Node]) -> int:
    """Characters that the body holds as constants and may write out without asking."""
    total = 0
    for node in body:
        total += sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        total += sum(len(const.value) for const in node.find_all(nodes.Const) if isinstance(const.value, str))
    return total

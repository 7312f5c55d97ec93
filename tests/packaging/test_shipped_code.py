"""Nothing that ships can run code that came as data."""

from __future__ import annotations

import ast

import pytest

from tests.packaging.workspace import PACKAGES, Package, imports

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "pty", "code"}
"""Modules that turn bytes or text into objects by running them."""
CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("torch.hub", "load"),
    ("np", "load"),
    ("numpy", "load"),
    ("os", "system"),
    ("os", "popen"),
    ("importlib", "import_module"),
}
KEYWORDS = {"shell", "trust_remote_code", "allow_pickle"}


def dangers(source: str) -> list[str]:
    """What in this source could execute data, with its line."""
    tree = ast.parse(source)
    found = [f"line {use.line}: import {use.module}" for use in imports(tree) if use.top in MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            named = {(node.module or "", alias.name) for alias in node.names}
            found += [f"line {node.lineno}: from {a} import {b}" for a, b in sorted(named & ATTRIBUTES)]
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (owner, node.attr) in ATTRIBUTES:
                found.append(f"line {node.lineno}: {owner}.{node.attr}")
        elif isinstance(node, ast.Name) and node.id in CALLS:
            found.append(f"line {node.lineno}: {node.id}")
        elif isinstance(node, ast.keyword) and node.arg in KEYWORDS and not _is_false(node.value):
            found.append(f"line {node.value.lineno}: {node.arg}=")
    return found


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_shipped_file_can_run_data(package: Package) -> None:
    """No pickle, eval, exec, torch.load, marshal, YAML loading, shell or import by computed name."""
    found = {str(path): dangers(path.read_text("utf-8")) for path in package.files()}
    assert found
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from marshal import loads",
        "import yaml",
        "x = eval('1')",
        "run = exec",
        "import torch\ntorch.load('weights.bin')",
        "from torch import load",
        "import numpy as np\nnp.load('a.npy')",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=flag)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "__import__(name)",
        "importlib.import_module(name)",
        "os.system('ls')",
    ],
)
def test_each_danger_is_found(source: str) -> None:
    """The check itself sees every form that it forbids."""
    assert dangers(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('a')",
        "model.eval()",
        "subprocess.run(['ls'], shell=False)",
        "from safetensors import safe_open",
        "json.load(file)",
    ],
)
def test_harmless_code_is_not_reported(source: str) -> None:
    """Methods of the same name on other objects, and switches that are off, pass."""
    assert dangers(source) == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_input_checks_survive_optimised_python(package: Package) -> None:
    """`python -O` removes asserts; a shipped file that has one must say that it states an invariant."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in package.files()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Assert) and node.msg is None
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_environment_is_read_by_the_command_line_only(package: Package) -> None:
    """Below the command line every setting arrives as an argument."""
    readers = {"environ", "getenv", "putenv"}
    found = [
        f"{path.name}:{node.lineno}"
        for path in package.files()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in readers and package.name != "hpc-cli"
    ]
    assert found == []

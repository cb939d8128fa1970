"""Each public name of the package has a docstring: of the modules, and of the compiled
part, whose names are in its stub."""

import ast
import pathlib

import kvtwin

PACKAGE = pathlib.Path(kvtwin.__file__).parent
DEFINITIONS = (ast.ClassDef, ast.FunctionDef)


def exported(tree):
    """Returns the names in __all__ of a module, or all that do not begin with _."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return [node.name for node in tree.body
            if isinstance(node, DEFINITIONS) and not node.name.startswith("_")]


def definitions(folder):
    """Returns the definitions of the names that a package or its modules export."""
    trees = {path: ast.parse(path.read_text())
             for path in [*folder.glob("*.py"), *folder.glob("*.pyi")]}
    names = {name for path, tree in trees.items()
             if path.name == "__init__.py" or not path.name.startswith("_")
             for name in exported(tree)}
    return [node for tree in trees.values() for node in tree.body
            if isinstance(node, DEFINITIONS) and node.name in names]


def undocumented(node, outer=""):
    """Yields the names of a definition, and in it, that have no docstring."""
    if not ast.get_docstring(node):
        yield outer + node.name
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, DEFINITIONS) and not member.name.startswith("_"):
                yield from undocumented(member, f"{outer}{node.name}.")


def test_each_public_name_has_a_docstring():
    found = [*definitions(PACKAGE), *definitions(PACKAGE / "transformers")]
    assert {"Cache", "fuzz", "KvtwinAudit"} <= {node.name for node in found}
    assert [name for node in found for name in undocumented(node)] == []


def test_a_name_without_one_is_found():
    bare = ast.parse('class A:\n  """Doc."""\n  def f(self): ...\n  def _g(self): ...')
    assert list(undocumented(bare.body[0])) == ["A.f"]

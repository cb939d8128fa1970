"""Each public name of the package has a docstring: of the modules, and of the compiled
part, whose names are in its stub."""

import ast
import pathlib

import kvtwin

PACKAGE = pathlib.Path(kvtwin.__file__).parent
OF_VLLM = "KvtwinAudit"  # Its methods are those of vLLM's KVConnectorBase_V1.
DEFINITIONS = (ast.ClassDef, ast.FunctionDef)


def definitions(folder):
    """Returns the definitions that a package exports, and those of its public modules."""
    trees = {path.stem: ast.parse(path.read_text())
             for path in [*folder.glob("*.py"), *folder.glob("*.pyi")]}
    exported = next(ast.literal_eval(node.value) for node in trees["__init__"].body
                    if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")
    wanted = {(node.module.split(".")[-1], name.name)
              for node in ast.walk(trees["__init__"]) if isinstance(node, ast.ImportFrom)
              and (node.module or "").startswith("kvtwin") for name in node.names
              if name.name in exported} | {("__init__", name) for name in exported}
    return [node for module, tree in trees.items() for node in tree.body
            if isinstance(node, DEFINITIONS) and not node.name.startswith("_")
            and (not module.startswith("_") or (module, node.name) in wanted)]


def undocumented(node, outer=""):
    """Yields the names of a definition, and in it, that have no docstring."""
    setter = any(ast.unparse(each).endswith(".setter") for each in node.decorator_list)
    if not ast.get_docstring(node) and not setter:
        yield outer + node.name
    if isinstance(node, ast.ClassDef) and node.name != OF_VLLM:
        for member in node.body:
            if isinstance(member, DEFINITIONS) and not member.name.startswith("_"):
                yield from undocumented(member, f"{outer}{node.name}.")


def test_each_public_name_has_a_docstring():
    folders = [PACKAGE, PACKAGE / "campaign", PACKAGE / "transformers"]
    trees = [ast.parse((folder / "__init__.py").read_text()) for folder in folders]
    assert all(ast.get_docstring(tree) for tree in trees)
    found = [node for folder in folders for node in definitions(folder)]
    names = {"Audit", "Cache", "KvtwinAudit", "fuzz", "main"}
    assert names <= {node.name for node in found}
    assert [name for node in found for name in undocumented(node)] == []


def test_a_name_without_one_is_found():
    bare = ast.parse('class A:\n  """Doc."""\n  def f(self): ...\n  def _g(self): ...')
    assert list(undocumented(bare.body[0])) == ["A.f"]

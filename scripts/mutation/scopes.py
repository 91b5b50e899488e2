"""The scopes of a module whose behaviour can be changed, without what no behaviour hangs on."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

__all__ = ["Scope", "scopes"]

_NodeT = TypeVar("_NodeT", bound=ast.AST)
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

#: What only the words of a message, or how a value is shown and compared, depend on.
_SHOWN: Final = ("__repr__", "__str__", "__all__", "__slots__")
_BODIES: Final = ("body", "orelse", "finalbody")
_SHOWN_OPTIONS: Final = ("repr", "compare", "stacklevel")


@dataclass(slots=True)
class Scope:
    """A module, a class or a function, without the functions and classes in it."""

    #: Qualified name, empty for a module.
    name: str
    nodes: list[ast.AST] = field(default_factory=list[ast.AST])
    #: Default values of a function's parameters.
    defaults: set[ast.AST] = field(default_factory=set[ast.AST])
    #: String literals, with or without placeholders, that are not documentation.
    texts: list[ast.Constant | ast.JoinedStr] = field(default_factory=list[ast.Constant | ast.JoinedStr])
    is_constructor: bool = False

    def find(self, kind: type[_NodeT]) -> Iterator[_NodeT]:
        """Return the nodes of a kind."""
        return (node for node in self.nodes if isinstance(node, kind))

    @property
    def statements(self) -> Iterator[ast.stmt]:
        """The statements."""
        return self.find(ast.stmt)


def scopes(module: ast.Module) -> list[Scope]:
    """Return the scopes of a module."""
    found = [Scope("")]
    _gather_body(module.body, found[0], found)
    return found


def _gather_body(body: list[ast.stmt], scope: Scope, found: list[Scope]) -> None:
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                _enter_function(statement, scope, found)
            case ast.ClassDef():
                _enter_class(statement, scope, found)
            case _ if _is_idle(statement):
                pass
            case _:
                _gather(statement, scope, found)


def _enter_function(function: _Function, outer: Scope, found: list[Scope]) -> None:
    if function.name in _SHOWN or _is_abstract(function):
        return
    inner = Scope(_joined(outer.name, function.name), is_constructor=function.name == "__init__")
    found.append(inner)
    arguments = function.args
    for default in [*arguments.defaults, *(one for one in arguments.kw_defaults if one is not None)]:
        _gather(default, inner, found)
        inner.defaults.add(default)
        # A default such as timedelta(days=7) is changed by its numbers.
        inner.defaults.update(ast.walk(default))
    _gather_body(function.body, inner, found)


def _enter_class(definition: ast.ClassDef, outer: Scope, found: list[Scope]) -> None:
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in definition.bases]
    if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in bases):
        return
    inner = Scope(_joined(outer.name, definition.name))
    found.append(inner)
    _gather_body(definition.body, inner, found)


def _gather(node: ast.AST, scope: Scope, found: list[Scope]) -> None:
    """Take a node and what is in it into a scope, except annotations and the words of errors."""
    scope.nodes.append(node)
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        scope.texts.append(node)
    for name, value in _parts(node):
        if name in _BODIES and isinstance(value, list):
            _gather_body(value, scope, found)
        else:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    _gather(child, scope, found)


def _parts(node: ast.AST) -> Iterable[tuple[str, object]]:
    """Return what is in a node and may be changed."""
    match node:
        case ast.Raise() | ast.JoinedStr():
            return ()  # inside of f-strings, Python before 3.12 gives wrong places
        case ast.AnnAssign(value=value):
            return [("value", value)]
        case ast.keyword(arg=name) if name in _SHOWN_OPTIONS:
            return ()
        case _:
            return ast.iter_fields(node)


def _is_idle(statement: ast.stmt) -> bool:
    """Return whether no behaviour hangs on a statement: documentation, exports, imports for types, impossible cases."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id="assert_never"))):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name in _SHOWN
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case _:
            return False


def _is_abstract(function: _Function) -> bool:
    decorators = {one.id for one in function.decorator_list if isinstance(one, ast.Name)}
    last = function.body[-1]
    is_empty = isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant) and last.value.value is ...
    return is_empty or bool(decorators & {"overload", "abstractmethod"})


def _joined(outer: str, name: str) -> str:
    return f"{outer}.{name}" if outer else name

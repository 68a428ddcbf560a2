"""Finds the literal column names of patches, guards, templates, scans and drafts in the source, with their rows.

The search starts where a call names both a row and its columns, such as `Patch(Execution, key, fields)`, and follows
the expression backwards: through names, parameters and their call sites, and the returns of functions. It ignores the
order of statements, so a name stands for everything that is ever assigned to it in its function.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

import msgspec

from flowfabric.model.instant import Instant
from flowfabric.stores.catalog import TABLE, Column

Function = ast.FunctionDef | ast.AsyncFunctionDef
Arguments = tuple[tuple[int, str], ...]

ROWS: dict[str, type[msgspec.Struct]] = {row.__name__: row for row in TABLE}
ANY_ROW = "any row"  # the row of a condition for which no scan was found
ENUMS = {column.kind.__name__ for table in TABLE.values() for column in table.columns if column.is_enum}

# Calls that name columns of the row that is their first argument: the kind of place, and the arguments with columns.
PLACES: dict[str, tuple[str, Arguments]] = {
    "Patch": ("patch", ((2, "fields"), (3, "unless_set"))),
    "RowTemplate": ("template", ((1, "fields"),)),
    "Guard": ("guard", ((4, "expected"),)),
    "expect": ("guard", ((1, "expected"),)),
    "Scan": ("scan", ((1, "where"), (2, "order"), (5, "limit_by"))),
    "due": ("scan", ((1, "column"), (9, "where"))),
    "RotatingScan": ("scan", ((1, "column"), (2, "key"))),
    "Sweep": ("scan", ((1, "column"), (3, "where"), (6, "owner"))),
}
# Calls that are columns themselves, whatever row they are for.
PARTS: dict[str, Arguments] = {
    "Expected": ((0, "fields"), (1, "per_row")),
    "Where": ((0, "column"),),
    "ColumnRef": ((0, "column"),),
    "tuple": ((0, "iterable"),),
}


class Found(NamedTuple):
    """A column that the source names, for a row, and the value that it gets there, if any."""

    place: str
    line: str
    row: str
    column: str
    value: ast.expr | None


class Scope(NamedTuple):
    """A module, and the functions around an expression, the innermost first."""

    module: str
    functions: tuple[Function, ...] = ()


class Module:
    """A parsed module: its calls, its functions and what it imports."""

    def __init__(self, path: str, text: str) -> None:
        self.name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.path = path
        self.tree = ast.parse(text)
        self.calls: list[tuple[ast.Call, Scope]] = []
        self.functions: dict[str, Function] = {}  # methods too
        self.imports: dict[str, str] = {}  # the full name of each imported name
        self._walk(self.tree, Scope(self.name))

    def _walk(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, Function):
            self.functions[node.name] = node
            scope = Scope(scope.module, (node, *scope.functions))
        elif isinstance(node, ast.ImportFrom):
            self.imports |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Call):
            self.calls.append((node, scope))
        for child in ast.iter_child_nodes(node):
            self._walk(child, scope)


def read_sources(root: Path) -> dict[str, str]:
    """The texts of all pages that may name columns, by their path below `root`."""
    parts = ("model", "rules", "engine", "stores")
    pages = sorted(page for part in parts for page in root.glob(f"flowfabric/{part}/**/*.py"))
    return {str(page.relative_to(root)): page.read_text() for page in pages}


class Source:
    """All modules, and the columns that they name."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.modules = {module.name: module for module in (Module(path, text) for path, text in texts.items())}
        self.found: set[Found] = set()
        self.traced: set[int] = set()  # calls of `Where` that were reached from a scan
        self._seen: set[tuple[int, str, int | None]] = set()
        self._defined = defaultdict[str, list[tuple[Function, str]]](list)
        for module in self.modules.values():
            for name, function in module.functions.items():
                self._defined[name].append((function, module.name))
        self._callers = defaultdict[int, list[tuple[ast.Call, Scope]]](list)
        for call, scope in self._calls():
            if called := self._function(call.func, scope):
                self._callers[id(called[0])].append((call, scope))
        for call, scope in self._calls():
            self._search(call, scope)
        for call, scope in self._calls():
            if _name(call.func) == "Where" and id(call) not in self.traced:
                self._trace(call, scope, ANY_ROW, "scan")

    def _calls(self) -> Iterator[tuple[ast.Call, Scope]]:
        return (found for module in self.modules.values() for found in module.calls)

    def _line(self, node: ast.expr | ast.keyword, scope: Scope) -> str:
        return f"{self.modules[scope.module].path}:{node.lineno}"

    def _search(self, call: ast.Call, scope: Scope) -> None:
        name = _name(call.func)
        if name in PLACES:
            place, arguments = PLACES[name]
            row = _argument(call, 5 if name == "Sweep" else 0, "row")
            kind = "Execution" if row is None else _name(row)  # the default of a sweep
            for argument in arguments if kind in ROWS else ():
                self._trace(_argument(call, *argument), scope, kind, place)
        elif name == "ClearableFields":
            for column in call.args:
                self._trace(column, scope, "Execution", "patch")
        elif name in ROWS:
            self._trace_keywords(call, scope, name, named=False)
        elif name in ("BulkInsert", "replace") and call.args and (copied := self._kind(call.args[0], scope)):
            self._trace(_argument(call, 1, "columns"), scope, copied, "draft")
            self._trace_keywords(call, scope, copied, named=True)

    def _trace_keywords(self, call: ast.Call, scope: Scope, row: str, place: str = "draft", *, named: bool) -> None:
        for keyword in call.keywords:
            if keyword.arg is None:
                self._trace(keyword.value, scope, row, place)
            elif named:
                self._add(place, keyword, scope, row, keyword.arg, keyword.value)

    def _add(
        self, place: str, node: ast.expr | ast.keyword, scope: Scope, row: str, column: str, value: ast.expr | None
    ) -> None:
        self.found.add(Found(place, self._line(node, scope), row, column, value))

    def _trace(self, node: ast.expr | None, scope: Scope, row: str, place: str, index: int | None = None) -> None:
        """Add the columns that an expression names, or the item `index` of it."""
        if node is None or (id(node), row, index) in self._seen:
            return
        self._seen.add((id(node), row, index))

        def follow(*nodes: ast.expr | None, at: int | None = index, where: Scope = scope) -> None:
            for one in nodes:
                self._trace(one, where, row, place, at)

        match node:
            case ast.Constant(value=str(column)) if column:
                self._add(place, node, scope, row, column, None)
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant):
                        self._add(place, key, scope, row, str(key.value), value)
                    else:
                        follow(value if key is None else key)
                    if isinstance(value, ast.Call) and _name(value.func) == "ColumnRef":
                        follow(value)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                if index is None:
                    follow(*items)
                elif index < len(items):
                    follow(items[index], at=None)
            case ast.BinOp(left=left, right=right):
                follow(left, right)
            case ast.IfExp(body=body, orelse=orelse):
                follow(body, orelse)
            case ast.BoolOp(values=values):
                follow(*values)
            case ast.Starred(value=value) | ast.NamedExpr(value=value) | ast.Await(value=value):
                follow(value)
            case ast.GeneratorExp(elt=item) | ast.ListComp(elt=item):
                follow(item)
            case ast.Subscript(value=value, slice=ast.Constant(value=int(at))):
                follow(value, at=at)
            case ast.Attribute(value=value, attr="fields" | "where"):
                follow(value)
            case ast.Name() | ast.Attribute():
                for bound, outer, position in self._bindings(node, scope):
                    if isinstance(bound, ast.keyword):
                        self._add(place, bound, outer, row, bound.arg or "", bound.value)
                    else:
                        follow(bound, at=index if position is None else position, where=outer)
            case ast.Call(func=func, args=args):
                name = _name(func)
                if name == "Where":
                    self.traced.add(id(node))
                if name == "Where" and isinstance(args[0], ast.Constant):
                    self._add(place, args[0], scope, row, str(args[0].value), _argument(node, 2, "value"))
                elif name in PARTS:
                    follow(*(_argument(node, *argument) for argument in PARTS[name]), at=None)
                elif name == "dict":
                    self._trace_keywords(node, scope, row, place, named=True)
                    follow(*args)
                elif called := self._function(func, scope):
                    follow(*_returned(called[0]), where=Scope(called[1], (called[0],)))

    def _bindings(
        self, node: ast.Name | ast.Attribute, scope: Scope
    ) -> Iterator[tuple[ast.expr | ast.keyword, Scope, int | None]]:
        """Everything that a name stands for, with the item of it that is meant."""
        if isinstance(node, ast.Name):
            for depth, function in enumerate(scope.functions):
                inner = Scope(scope.module, scope.functions[depth:])
                bound = [(value, inner, at) for value, at in _assigned(node.id, function)]
                bound += [(value, where, None) for value, where in self._given(node.id, function)]
                if bound:
                    yield from bound
                    return
        if definition := self._global(node, scope):
            module, name = definition
            for value, at in _assigned(name, self.modules[module].tree, nested=False):
                yield value, Scope(module), at

    def _given(self, name: str, function: Function) -> Iterator[tuple[ast.expr | ast.keyword, Scope]]:
        """What callers pass for a parameter."""
        args = function.args
        names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
        named = {*names, *(arg.arg for arg in args.kwonlyargs)}
        offset = 1 if names[:1] == ["self"] else 0
        for call, scope in self._callers[id(function)]:
            if name in names:
                given = _argument(call, names.index(name) - offset, name)
            else:
                given = _argument(call, 99, name) if name in named else None
            if given is not None:
                yield given, scope
            if args.vararg is not None and args.vararg.arg == name:
                yield from ((value, scope) for value in call.args[len(names) - offset :])
            if args.kwarg is not None and args.kwarg.arg == name:
                for keyword in call.keywords:
                    if keyword.arg not in named:
                        yield (keyword.value if keyword.arg is None else keyword), scope

    def _global(self, node: ast.expr, scope: Scope) -> tuple[str, str] | None:
        """The module and the name of a global."""
        imports = self.modules[scope.module].imports
        match node:
            case ast.Name(id=name) if name in imports:
                full = imports[name]
            case ast.Name(id=name):
                full = f"{scope.module}.{name}"
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in imports:
                full = f"{imports[module]}.{name}"
            case _:
                return None
        module, _, name = full.rpartition(".")
        return (module, name) if module in self.modules else None

    def _function(self, node: ast.expr, scope: Scope) -> tuple[Function, str] | None:
        """The function that is called, and its module; a method of another object only if its name is unique."""
        if (definition := self._global(node, scope)) and definition[1] in self.modules[definition[0]].functions:
            return self.modules[definition[0]].functions[definition[1]], definition[0]
        if isinstance(node, ast.Attribute):
            own = self.modules[scope.module].functions
            if _name(node.value) == "self" and node.attr in own:
                return own[node.attr], scope.module
            if len(self._defined[node.attr]) == 1:
                return self._defined[node.attr][0]
        return None

    def _kind(self, node: ast.expr, scope: Scope, outer: tuple[ast.expr, ...] = ()) -> str | None:
        """The row type of an expression, as far as annotations tell."""
        match node:
            case ast.Name(id=name):
                for function in scope.functions:
                    for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
                        if arg.arg == name:
                            return _row_of(arg.annotation)
                bindings = self._bindings(node, scope)
                values = [(value, where) for value, where, at in bindings if at is None and isinstance(value, ast.expr)]
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                nodes = (one for one in ast.walk(self.modules[scope.module].tree) if isinstance(one, ast.AnnAssign))
                return _only({_row_of(one.annotation) for one in nodes if _name(one.target) == name})
            case ast.BoolOp(values=alternatives):
                values = [(value, scope) for value in alternatives]
            case ast.Call(func=func, args=args):
                if _name(func) in ROWS:
                    return _name(func)
                if called := self._function(func, scope):
                    return _row_of(called[0].returns)
                values = [(args[0], scope)] if _name(func) == "replace" and args else []
            case _:
                return None
        outer += (node,)
        return _only({self._kind(value, where, outer) for value, where in values if value not in outer})


def _only(kinds: set[str | None]) -> str | None:
    return kinds.pop() if len(kinds) == 1 else None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _row_of(annotation: ast.expr | None) -> str | None:
    """`Execution` of `Execution`, `Execution[Draft]` or `Execution | None`."""
    match annotation:
        case ast.BinOp(left=left, right=ast.Constant(value=None)):
            return _row_of(left)
        case ast.Subscript(value=value):
            return _row_of(value)
        case ast.Name(id=name) if name in ROWS:
            return name
    return None


def _argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    if 0 <= position < len(call.args) and not any(isinstance(arg, ast.Starred) for arg in call.args[: position + 1]):
        return call.args[position]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _returned(function: Function) -> list[ast.expr]:
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield))
    return [node.value for node in nodes if node.value is not None]


def _assigned(name: str, tree: ast.AST, *, nested: bool = True) -> Iterator[tuple[ast.expr | ast.keyword, int | None]]:
    """What is assigned or added to a name: values, items of values, and columns with their values."""
    for node in ast.walk(tree) if nested else ast.iter_child_nodes(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _bound(name, target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from _bound(name, target, value)
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                yield from _bound(name, target, value)
            case ast.For(target=ast.Name() as target, iter=value):
                yield from _bound(name, target, value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="update" | "append")) if owner == name:
                yield from ((value, None) for value in node.args)
                yield from ((keyword, None) for keyword in node.keywords if keyword.arg)


def _bound(name: str, target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr | ast.keyword, int | None]]:
    match target:
        case ast.Name(id=bound) if bound == name:
            yield value, None
        case ast.Tuple(elts=items):
            yield from ((value, at) for at, item in enumerate(items) if isinstance(item, ast.Name) and item.id == name)
        case ast.Subscript(value=ast.Name(id=bound), slice=ast.Constant(value=str(column))) if bound == name:
            yield ast.keyword(column, value, lineno=target.lineno), None


def mistakes(source: Source) -> list[str]:
    """What is wrong with the columns that the source names."""
    return sorted({mistake for found in source.found for mistake in _mistakes(found)})


def _mistakes(found: Found) -> Iterator[str]:
    if found.row == ANY_ROW:
        if not any(found.column in row.__struct_fields__ for row in TABLE):
            yield f"{found.line}: no row has a column {found.column!r} (in a {found.place})"
        return
    row = ROWS[found.row]
    columns = {column.name: column for column in TABLE[row].columns}
    if found.column not in columns:
        yield f"{found.line}: {found.row} has no column {found.column!r} (in a {found.place})"
    elif why := _misfit(found.value, columns[found.column], row):
        yield f"{found.line}: {found.row}.{found.column} does not hold {why} (in a {found.place})"


def _misfit(value: ast.expr | None, column: Column, row: type[msgspec.Struct]) -> str | None:
    """A value that the column cannot hold, as far as the expression tells."""
    match value:
        case ast.IfExp(body=body, orelse=orelse):
            return _misfit(body, column, row) or _misfit(orelse, column, row)
        case ast.Constant(value=None):
            return None if column.optional else "None"
        case ast.Constant(value=constant):
            return None if type(constant) is column.kind else repr(constant)
        case ast.Attribute(value=ast.Name(id=kind), attr=member) if kind in ENUMS:
            return None if column.kind.__name__ == kind else f"{kind}.{member}"
        case ast.Name(id="NOW") | ast.Call(func=ast.Name(id="FromNow")):
            hint = get_type_hints(row)[column.name]
            return None if Instant in (hint, *get_args(hint)) else "an instant"
    return None

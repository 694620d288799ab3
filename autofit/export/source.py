"""Changes the text of a training script at the places that a person would change."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import TypeGuard

STEP = "    "
"""One level of indentation."""
LIGHTNING = ("lightning", "pytorch_lightning")
"""The packages in which Lightning is published."""


@dataclass(frozen=True, slots=True)
class Made:
    """Where the script makes its optimizer."""

    call: ast.Call
    model: str | None
    """The variable or attribute with the model whose parameters the optimizer takes; ``None`` if
    the call does not show it."""
    statement: ast.stmt
    within: str | None
    """The class whose method makes it."""


class Source:
    """The text of a script and its syntax tree; each change parses the text again.

    Raises ``SyntaxError`` or ``ValueError`` if the text is not Python.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        """The text with all changes so far."""
        self._tree = ast.parse(text)

    # --- finding ------------------------------------------------------------------------------

    def call(self, name: str) -> ast.Call | None:
        """Return the script's only call of a function or class; ``None`` if there are several."""
        found = [each for each in self._calls() if _last_name(each.func) == name]
        return found[0] if len(found) == 1 else None

    def imports(self, *packages: str) -> bool:
        """Return whether the script imports one of the packages."""
        trees = list(ast.walk(self._tree))
        names = [a.name for each in trees if isinstance(each, ast.Import) for a in each.names]
        names += [each.module or "" for each in trees if isinstance(each, ast.ImportFrom)]
        return any(name.partition(".")[0] in packages for name in names)

    def optimizer(self, classes: Sequence[str]) -> Made | None:
        """Return where the script makes an optimizer of one of ``classes``, if it makes one only.

        ``None`` if the script does not show it.
        """
        found = [
            Made(each, _model_of(each), statement, self._class_around(statement))
            for statement in self._statements()
            for each in _calls_of(statement)
            if _last_name(each.func) in classes
        ]
        return found[0] if len(found) == 1 else None

    def lightning_trainer(self) -> ast.Call | None:
        """Return the only ``Trainer`` of a script that imports Lightning."""
        return self.call("Trainer") if self.imports(*LIGHTNING) else None

    def lightning_package(self) -> str:
        """Return the start of the names of Lightning's modules, with a dot at its end."""
        return "pytorch_lightning." if self.imports(LIGHTNING[1]) else "lightning.pytorch."

    def training_loader(self) -> ast.Call | None:
        """Return the call that makes the loader of the training data.

        It is the script's only ``DataLoader``; else that of a method ``train_dataloader``, or that
        of the variable which a method ``fit`` takes.
        """
        name = "DataLoader"
        methods = [
            each
            for each in ast.walk(self._tree)
            if isinstance(each, ast.FunctionDef) and each.name == "train_dataloader"
        ]
        fitted = {loader for each in self._calls() if (loader := _fitted(each))}
        assigned = [
            each.value
            for each in ast.walk(self._tree)
            if isinstance(each, ast.Assign) and fitted & set(_names(each.targets[0], ast.Store))
        ]
        for trees in ([self._tree], methods, assigned):
            calls = [c for tree in trees for c in _calls_of(tree) if _last_name(c.func) == name]
            if len(calls) == 1:
                return calls[0]
        return None

    def blocks(self, within: str | None = None) -> str | None:
        """Return the attribute that holds the model's blocks; ``None`` unless there is one.

        It is the script's only ``self.NAME = nn.ModuleList(...)``, in the class ``within`` if
        given.
        """
        names = [
            each.targets[0].attr
            for each in self._statements()
            if within in (None, self._class_around(each))
            and isinstance(each, ast.Assign)
            and isinstance(each.targets[0], ast.Attribute)
            and isinstance(each.value, ast.Call)
            and _last_name(each.value.func) == "ModuleList"
        ]
        return names[0] if len(names) == 1 else None

    # --- changing -----------------------------------------------------------------------------

    def set_keywords(
        self, call: ast.Call, given: Mapping[str, str], positional: Sequence[str] = ()
    ) -> None:
        """Give a call these keyword arguments, each as code; those that it has are replaced.

        ``positional``: names of the parameters that the call may pass by position, in order.
        """
        has = {each.arg: each.value for each in call.keywords if each.arg is not None}
        has |= dict(zip(positional, call.args, strict=False))
        edits = [(*self._span(has[name]), code) for name, code in given.items() if name in has]
        new = [f"{name}={code}" for name, code in given.items() if name not in has]
        last = max(
            [*call.args, *(each.value for each in call.keywords)],
            key=lambda each: (each.end_lineno or 0, each.end_col_offset or 0),
            default=None,
        )
        if new and last is None:
            _, end = self._span(call)
            edits.append((end - 1, end - 1, ", ".join(new)))
        elif new and last is not None:
            _, end = self._span(last)
            own_lines = last.lineno > call.func.lineno and last.end_lineno != call.end_lineno
            gap = f",\n{' ' * self._indent(last.end_lineno or 1)}" if own_lines else ", "
            edits.append((end, end, "".join(gap + each for each in new)))
        self._edit(edits)

    def import_(self, module: str) -> None:
        """Import a module among the script's imports, unless it does so already."""
        if module in self._imported():
            return
        tops = [each for each in self._tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
        tops = [each for each in tops if getattr(each, "module", None) != "__future__"]
        plain = [each for each in tops if isinstance(each, ast.Import)]
        after = next((each for each in plain if each.names[0].name > module), None)
        last = tops[-1] if tops else None
        line = after.lineno if after else (last.end_lineno or 0) + 1 if last else 1
        self._insert(line, f"import {module}\n")

    def before_optimizer(self, classes: Sequence[str], statements: str) -> None:
        """Insert statements above the one that makes the optimizer."""
        made = self.optimizer(classes)
        if made is not None and statements:
            self.import_("torch")
            made = self.optimizer(classes) or made
            pad = " " * made.statement.col_offset
            self._insert(made.statement.lineno, indent(statements, pad) + "\n")

    def train_in_chunks(self, model: str, size: int) -> bool:
        """Train on the batch in chunks of ``size`` samples.

        Returns whether the script shows the forward pass and backward, side by side. Its batch must
        be in variables that nothing reads after backward.
        """
        found = self._training_pass(model)
        lines = found.in_chunks(self, size) if found else None
        if found is None or lines is None:
            return False
        first, last = found.statements[0].lineno, found.statements[-1].end_lineno or 0
        pad = " " * found.statements[0].col_offset
        kept = self.text.splitlines(keepends=True)
        new = "".join(indent(line, pad) for line in lines)
        self._change("".join(kept[: first - 1]) + new + "".join(kept[last:]))
        return True

    def _training_pass(self, model: str) -> _Pass | None:
        passes = [
            found
            for body in self._bodies()
            for each in body
            if (loss := _backward_of(each)) is not None
            and (found := _pass(body, each, loss, model)) is not None
        ]
        return passes[0] if len(passes) == 1 else None

    def loop_around(self, statement: ast.stmt) -> ast.For | None:
        """Return the outermost ``for`` around a statement."""
        loops = (each for each in ast.walk(self._tree) if isinstance(each, ast.For))
        line = statement.lineno
        return next((e for e in loops if e.lineno < line <= (e.end_lineno or 0)), None)

    def code(self, statement: ast.stmt) -> str:
        """Return the text of a statement without its indentation."""
        lines = self.text.splitlines(keepends=True)
        pad = statement.col_offset
        own = lines[statement.lineno - 1 : statement.end_lineno]
        return "".join(line[pad:] if not line[:pad].strip() else line for line in own)

    def _statements(self) -> Iterator[ast.stmt]:
        simple = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)
        return (each for each in ast.walk(self._tree) if isinstance(each, simple))

    def _calls(self) -> Iterator[ast.Call]:
        return (each for each in ast.walk(self._tree) if isinstance(each, ast.Call))

    def _bodies(self) -> Iterator[list[ast.stmt]]:
        for each in ast.walk(self._tree):
            for name in ("body", "orelse"):
                body = getattr(each, name, None)
                if isinstance(body, list):
                    yield body

    def _imported(self) -> Iterator[str]:
        for each in ast.walk(self._tree):
            if isinstance(each, ast.Import):
                yield from (alias.name for alias in each.names if alias.asname is None)
            elif isinstance(each, ast.ImportFrom) and each.module:
                yield each.module + "."  # its names are bound, but not the module itself

    def _class_around(self, statement: ast.stmt) -> str | None:
        """Return the name of the innermost class around a statement."""
        classes = [each for each in ast.walk(self._tree) if isinstance(each, ast.ClassDef)]
        around = [e for e in classes if any(inner is statement for inner in ast.walk(e))]
        return around[-1].name if around else None

    def _indent(self, line: int) -> int:
        text = self.text.splitlines()[line - 1]
        return len(text) - len(text.lstrip())

    def _span(self, node: ast.expr) -> tuple[int, int]:
        """Return where a node begins and ends in the text, in characters."""
        lines = self.text.splitlines(keepends=True)

        def place(line: int, column: int) -> int:
            before = lines[line - 1].encode()[:column].decode()  # columns count bytes of UTF-8
            return sum(map(len, lines[: line - 1])) + len(before)

        end = place(node.end_lineno or node.lineno, node.end_col_offset or 0)
        return place(node.lineno, node.col_offset), end

    def _edit(self, edits: Iterable[tuple[int, int, str]]) -> None:
        text = self.text
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new + text[end:]
        self._change(text)

    def _insert(self, line: int, text: str) -> None:
        lines = self.text.splitlines(keepends=True)
        self._change("".join([*lines[: line - 1], text, *lines[line - 1 :]]))

    def _change(self, text: str) -> None:
        self.text, self._tree = text, ast.parse(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Statements from the model's call to ``loss.backward()``."""

    statements: list[ast.stmt]
    forward: list[ast.stmt]
    """Those up to the loss."""
    loss: str

    def in_chunks(self, source: Source, size: int) -> list[str] | None:
        """Return a loop over chunks of the batch; ``None`` if the batch is not in variables."""
        loop = source.loop_around(self.statements[0])
        if loop is None:
            return None
        batch = self._batch(loop)
        made = {name for each in self.statements for name in _names(each, ast.Store)}
        after = [e for e in ast.walk(loop) if isinstance(e, ast.Name) and e.lineno > self._last]
        read = {each.id for each in after if isinstance(each.ctx, ast.Load)}
        if not batch or read & ({*batch} | made - {self.loss}):
            return None
        zeroes = [
            each
            for each in self.statements
            if isinstance(each, ast.Expr) and _is_method(each.value, "zero_grad")
        ]
        forward = [each for each in self.forward if each not in zeroes]
        after_loss = [e for e in self.statements[len(self.forward) : -1] if e not in zeroes]
        split = [f"{name}.split({size})" for name in batch]
        head = (
            f"{batch[0]} in {split[0]}"
            if len(batch) == 1
            else (f"{', '.join(batch)} in zip({', '.join(split)}, strict=True)")
        )
        inside = [
            *map(source.code, forward),
            *map(source.code, after_loss),
            f"{self.loss} = {self.loss} * (len({batch[0]}) / whole_batch)\n",
            f"{self.loss}.backward()\n",
            f"mean_loss += {self.loss}.detach()\n",
        ]
        return [
            *map(source.code, zeroes),
            f"whole_batch, mean_loss = len({batch[0]}), 0.0\n",
            f"for {head}:\n",
            *(indent(each, STEP) for each in inside),
            f"{self.loss} = mean_loss\n",
        ]

    @property
    def _last(self) -> int:
        return self.statements[-1].end_lineno or 0

    def _batch(self, loop: ast.For) -> list[str]:
        """Return the variables with the batch: made by the loop and read by the forward pass."""
        made = {name for name in _names(loop.target, ast.Store)}
        for each in ast.walk(loop):
            if isinstance(each, ast.For):
                made |= set(_names(each.target, ast.Store)) if _yields_data(each) else set()
            elif isinstance(each, ast.Assign) and each.lineno < self.statements[0].lineno:
                made |= set(_names(each.targets[0], ast.Store))
        own = {name for each in self.statements for name in _names(each, ast.Store)}
        read = [name for each in self.forward for name in _names(each, ast.Load)]
        return [name for name in dict.fromkeys(read) if name in made - own]


def _pass(body: list[ast.stmt], end: ast.stmt, loss: str, model: str) -> _Pass | None:
    """Return the training pass that ends with ``end`` in a body of statements."""
    stop = body.index(end)
    calls = [
        i
        for i, each in enumerate(body[:stop])
        if any(ast.unparse(call.func) == model for call in _calls_of(each))
    ]
    makes = [i for i, each in enumerate(body[:stop]) if loss in _names(each, ast.Store)]
    if not calls or not makes or makes[-1] < calls[0]:
        return None
    first, made = calls[0], next(i for i in makes if i >= calls[0])
    return _Pass(statements=body[first : stop + 1], forward=body[first : made + 1], loss=loss)


def _yields_data(loop: ast.For) -> bool:
    """Return whether a ``for`` is over more than numbers."""
    call = loop.iter
    return not (isinstance(call, ast.Call) and _last_name(call.func) == "range")


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _calls_of(node: ast.AST) -> Iterator[ast.Call]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Call))


def _model_of(call: ast.Call) -> str | None:
    """Return ``MODEL`` for a call with the first argument ``MODEL.parameters()``."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute):
        owner = first.func.value
        if first.func.attr == "parameters" and isinstance(owner, ast.Name | ast.Attribute):
            return ast.unparse(owner)
    return None


def _fitted(call: ast.Call) -> str | None:
    """Return the variable with the training data in a call of a method ``fit``."""
    if not _is_method(call, "fit"):
        return None
    given = [each.value for each in call.keywords if each.arg == "train_dataloaders"]
    given += call.args[1:2]
    return given[0].id if given and isinstance(given[0], ast.Name) else None


def _backward_of(node: ast.stmt) -> str | None:
    """Return ``NAME`` for the statement ``NAME.backward()``."""
    if not (isinstance(node, ast.Expr) and _is_method(node.value, "backward")):
        return None
    owner = node.value.func.value
    return owner.id if isinstance(owner, ast.Name) else None


class _Method(ast.Call):
    func: ast.Attribute


def _is_method(node: ast.expr, name: str) -> TypeGuard[_Method]:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
    )


def _names(node: ast.AST, context: type[ast.expr_context]) -> list[str]:
    """Return the variables that a node reads or writes, in the order of the text."""
    found = [e for e in ast.walk(node) if isinstance(e, ast.Name) and isinstance(e.ctx, context)]
    return [each.id for each in sorted(found, key=lambda e: (e.lineno, e.col_offset))]

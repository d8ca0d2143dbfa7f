"""Lay plain tables (TOML, command line) over a tree of dataclass objects, checking every key and every value.

Knows nothing of torchtitan. The objects decide what is allowed: their fields are the keys, their type hints the
values, their ``__post_init__`` the ranges. Nothing is changed in place: every object is rebuilt by
``dataclasses.replace``, so the checks in ``__post_init__`` run once, bottom up, on the final values.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

COMMAND_LINE = "command line"


class ConfigError(ValueError):
    """A configuration that cannot be used. Its text is one line: source, key, found, allowed, nearest."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def one_line(error: Exception) -> str:
    """An error's text on one line, its parts divided as this module's own."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


class FieldError(ValueError):
    """Raised by a section's ``__post_init__``: says which of its fields is out of range."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class CommandLineText(str):
    """A value as typed in a shell: the field's type decides whether it is a number, a list or plain text."""

    __slots__ = ()

    def typed(self) -> Any:
        """The text read as a TOML number, flag, list or table; any other text as it was typed, quotes included."""
        try:
            table = tomllib.loads(f"value = {self}")
        except (ValueError, RecursionError):  # ValueError: also of numbers with thousands of digits
            return str(self)
        value = table["value"]
        return str(self) if len(table) > 1 or isinstance(value, str) else value


@dataclass(frozen=True)
class Setting:
    """One value and the place it was read from (a file name, or the command line)."""

    value: Any
    source: str


# A table of settings: keys lead to settings or to further tables.
Tree = dict[str, "Setting | Tree"]

# Fields whose class is chosen by a key: {field path: (key, {name: object to start from})}
Variants = Mapping[str, tuple[str, Mapping[str, Any]]]

_REJECTED = object()
_UNIONS = (typing.Union, types.UnionType)


def tree_from_table(table: Mapping[str, Any], source: str) -> Tree:
    """Note the source beside every value; an array of tables becomes a table with keys "0", "1", ..."""
    tree: Tree = {}
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        tree[key] = tree_from_table(value, source) if isinstance(value, dict) else Setting(value, source)
    return tree


def tree_from_arguments(arguments: Sequence[str]) -> Tree:
    """Read ``--section.key value``, ``--section.key=value`` and ``--section.flag`` (true).

    Raises:
        ConfigError: a value without a key, two values for a key, or a key below another key's value.
    """
    tree: Tree = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise ConfigError(
                f"{COMMAND_LINE}: found {word!r} where a key must stand; expected --section.key value"
                " (a list is written as one word: '[0, 1]')"
            )
        value: Any = CommandLineText(text)
        if not equals:
            value = CommandLineText(rest.pop(0)) if rest and not rest[0].startswith("--") else True
        _plant(tree, name.split("."), Setting(value, COMMAND_LINE))
    return tree


def _plant(tree: Tree, keys: Sequence[str], setting: Setting) -> None:
    for depth, key in enumerate(keys[:-1]):
        branch = tree.setdefault(key, {})
        if isinstance(branch, Setting):
            path = ".".join(keys[: depth + 1])
            raise ConfigError(f"{branch.source}: {path}: found {_show(branch.value)}; allowed: a table")
        tree = branch
    tree[keys[-1]] = setting


def merge(base: Tree, over: Tree) -> Tree:
    """Both trees in one; where both have a value, ``over`` wins."""
    merged = dict(base)
    for key, value in over.items():
        current = merged.get(key)
        if isinstance(value, dict) and isinstance(current, dict):
            merged[key] = merge(current, value)
        elif isinstance(value, dict) and isinstance(current, Setting):
            raise ConfigError(f"{current.source}: {key}: found {_show(current.value)}; allowed: a table")
        else:
            merged[key] = value
    return merged


def overlay(
    target: Any, tree: Tree, *, file: str, where: str = "", hidden: Sequence[str] = (), variants: Variants | None = None
) -> Any:
    """Rebuild a dataclass object with the tree's values in place of its own.

    Args:
        target: the object that holds the defaults; it is not changed.
        tree: what to change, from ``tree_from_table``, ``tree_from_arguments`` or ``merge``.
        file: the source to name for a section that no single setting is to blame for.
        where: the dotted path of ``target``, empty for the root.
        hidden: names of root fields that no setting may touch.
        variants: fields whose class a key chooses.

    Raises:
        ConfigError: unknown key, wrong type, value out of range: always one line.
    """
    hints = typing.get_type_hints(type(target), include_extras=True)
    names = [f.name for f in dataclasses.fields(target) if f.init and not (f.name in hidden and not where)]
    changes: dict[str, Any] = {}
    for key, branch in tree.items():
        path = f"{where}.{key}" if where else key
        if key not in names:
            raise ConfigError(_unknown(path, key, branch, names))
        current = getattr(target, key)
        if isinstance(branch, dict):
            if variants and path in variants:
                current, branch = _choose_variant(current, branch, path, variants[path])
                if current is None:
                    changes[key] = _lay_nothing(branch, path, variants[path][0])
                    continue
            changes[key] = _lay_table(current, branch, hints[key], path, file, variants)
        else:
            changes[key] = _lay_value(current, branch, hints[key], path)
    return _rebuild(target, changes, tree, where, file)


def _lay_table(current: Any, tree: Tree, hint: Any, path: str, file: str, variants: Variants | None) -> Any:
    """The new value of a field that a table was given for."""
    if dataclasses.is_dataclass(current):
        return overlay(current, tree, file=file, where=path, variants=variants)
    if isinstance(current, list) and _holds_dataclasses(current):
        return _lay_list(current, tree, path, file, variants)
    found = plain(tree)
    converted = convert(hint, {**current, **found} if isinstance(current, dict) else found)
    if converted is _REJECTED:
        raise ConfigError(f"{source_of(tree, file)}: {path}: found a table; allowed: {describe(hint)}")
    return converted


def _lay_nothing(tree: Tree, path: str, variant_key: str) -> None:
    """The value of a field whose variant is "none": it has no keys of its own."""
    for key, branch in tree.items():
        raise ConfigError(_unknown(f"{path}.{key}", key, branch, [variant_key]))


def _lay_list(current: list[Any], tree: Tree, path: str, file: str, variants: Variants | None) -> list[Any]:
    items = list(current)
    for key, branch in tree.items():
        known = [str(index) for index in range(len(items))]
        if key not in known:
            raise ConfigError(_unknown(f"{path}.{key}", key, branch, known))
        if isinstance(branch, Setting):
            raise ConfigError(f"{branch.source}: {path}.{key}: found {_show(branch.value)}; allowed: a table")
        items[int(key)] = overlay(items[int(key)], branch, file=file, where=f"{path}.{key}", variants=variants)
    return items


def _lay_value(current: Any, setting: Setting, hint: Any, path: str) -> Any:
    """The new value of a field that a plain value was given for."""
    table = dataclasses.is_dataclass(current) or (isinstance(current, list) and _holds_dataclasses(current))
    converted = _REJECTED if table else convert(hint, setting.value)
    if converted is not _REJECTED:
        return converted
    allowed = "a table" if table else describe(hint)
    nearest = nearest_name(str(setting.value), [v for v in _literals(hint) if isinstance(v, str)])
    raise ConfigError(
        f"{setting.source}: {path}: found {_show(setting.value)}; allowed: {allowed}"
        + (f"; nearest: {nearest!r}" if nearest and isinstance(setting.value, str) else "")
    )


def _choose_variant(current: Any, tree: Tree, path: str, variant: tuple[str, Mapping[str, Any]]) -> tuple[Any, Tree]:
    key, choices = variant
    rest = dict(tree)
    chosen = rest.pop(key, None)
    if chosen is None:
        return current, rest
    name = chosen.value if isinstance(chosen, Setting) else "a table"
    source = chosen.source if isinstance(chosen, Setting) else source_of(chosen, path)
    if not isinstance(name, str) or name not in choices:
        nearest = nearest_name(str(name), list(choices))
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(
            f"{source}: {path}.{key}: found {_show(name)}; allowed: {allowed}"
            + (f"; nearest: {nearest!r}" if nearest else "")
        )
    return choices[name], rest


def _rebuild(target: Any, changes: dict[str, Any], tree: Tree, where: str, file: str) -> Any:
    try:
        return dataclasses.replace(target, **changes)
    except FieldError as error:
        path = f"{where}.{error.field}" if where else error.field
        source = source_of(_branch_of(tree, error.field), file)
        raise ConfigError(f"{source}: {path}: {error}") from None
    except (ValueError, TypeError, AssertionError, RuntimeError, NotImplementedError) as error:
        # torchtitan's own checks: they name the fields in their text.
        path = f"[{where}]" if where else f"[{', '.join(tree)}]"
        raise ConfigError(
            f"{source_of(tree, file)}: {path}: refused by {type(target).__qualname__}: {error}"
        ) from error


def _branch_of(tree: Tree, field: str) -> Setting | Tree:
    """The setting at a dotted path, or the nearest table above it."""
    branch: Setting | Tree = tree
    for key in field.split("."):
        if isinstance(branch, Setting) or key not in branch:
            break
        branch = branch[key]
    return branch


def convert(hint: Any, value: Any) -> Any:
    """The value as the hint's type, or the module's rejection mark. ``bool`` is no ``int``; ``int`` is a ``float``."""
    if isinstance(value, CommandLineText):
        return _convert_text(hint, value)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is typing.Annotated:
        return convert(args[0], value)
    if origin is Literal:
        return value if any(type(value) is type(arg) and value == arg for arg in args) else _REJECTED
    if origin in _UNIONS:
        if value == "none" and types.NoneType in args:
            return None
        exact = [arg for arg in args if type(value) is arg]
        return next((c for arg in (*exact, *args) if (c := convert(arg, value)) is not _REJECTED), _REJECTED)
    if origin in (list, tuple):
        return _convert_sequence(origin, args, value)
    if origin is dict or hint is dict:
        return value if type(value) is dict else _REJECTED
    if hint is types.NoneType:
        return None if value == "none" else _REJECTED
    if hint is float and type(value) is int:
        return float(value)
    return value if hint in (int, float, str, bool) and type(value) is hint else _REJECTED


def _convert_text(hint: Any, text: CommandLineText) -> Any:
    candidates: list[Any] = ["none"] if text == "none" else []
    candidates += [text.typed(), str(text)]
    if "[" not in text and any(_is_sequence(h) for h in _alternatives(hint)):
        candidates.append([CommandLineText(part.strip()) for part in text.split(",")])
    return next((c for candidate in candidates if (c := convert(hint, candidate)) is not _REJECTED), _REJECTED)


def _convert_sequence(origin: type, args: tuple[Any, ...], value: Any) -> Any:
    if type(value) is not list:
        return _REJECTED
    fixed = origin is tuple and Ellipsis not in args
    kinds = list(args) if fixed else [args[0] if args else Any] * len(value)
    if len(kinds) != len(value):
        return _REJECTED
    items = [convert(kind, item) for kind, item in zip(kinds, value, strict=True)]
    return _REJECTED if any(item is _REJECTED for item in items) else origin(items)


def describe(hint: Any) -> str:
    """A hint in words a user of TOML knows: ``int``, ``'a', 'b'``, ``list of str``, ``int or 'none'``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return describe(args[0])
    if origin is Literal:
        return ", ".join(repr(arg) for arg in args)
    if origin in _UNIONS:
        return " or ".join(describe(arg) for arg in args)
    if origin in (list, tuple):
        return f"list of {describe(args[0])}" if args else "list"
    if origin is dict or hint is dict or dataclasses.is_dataclass(hint):
        return "a table"
    if hint is types.NoneType:
        return "'none'"
    return hint.__name__ if hint in (int, float, str, bool) else "nothing that TOML can express"


def flatten(target: Any, where: str = "", hidden: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf of a dataclass tree as (dotted key, value), in field order."""
    for field in dataclasses.fields(target):
        if field.name in hidden:
            continue
        value, path = getattr(target, field.name), f"{where}.{field.name}" if where else field.name
        if dataclasses.is_dataclass(value):
            yield from flatten(value, path)
        elif isinstance(value, list) and _holds_dataclasses(value):
            for index, item in enumerate(value):
                yield from flatten(item, f"{path}.{index}")
        else:
            yield path, value


def plain(tree: Tree) -> dict[str, Any]:
    """The tree without its sources."""
    return {
        key: plain(branch) if isinstance(branch, dict) else convert(Any, branch.value) for key, branch in tree.items()
    }


def source_of(branch: Setting | Tree, default: str) -> str:
    """The one source of a branch; ``default`` (and the command line, if it took part) where it has several."""
    if isinstance(branch, Setting):
        return branch.source
    sources = {source_of(child, default) for child in branch.values()}
    if len(sources) == 1:
        return sources.pop()
    return f"{default} and {COMMAND_LINE}" if COMMAND_LINE in sources else default


def _unknown(path: str, key: str, branch: Setting | Tree, names: Sequence[str]) -> str:
    kind = "table" if isinstance(branch, dict) else "key"
    nearest = nearest_name(key, names)
    parent = path.removesuffix(key)
    return f"{source_of(branch, path)}: {path}: unknown {kind}; allowed: {', '.join(sorted(names))}" + (
        f"; nearest: {parent}{nearest}" if nearest else ""
    )


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """The name most like ``name``, if any is alike at all."""
    return next(iter(difflib.get_close_matches(name.lower(), names, 1, 0.5)), None)


def _show(value: Any) -> str:
    text = repr(str(value)) if isinstance(value, str) else repr(value)
    return (
        text if len(text) <= 80 else f"{text[:76]}..."
    ) + f" ({'str' if isinstance(value, str) else type(value).__name__})"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) is typing.Annotated:
        return _alternatives(typing.get_args(hint)[0])
    return typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)


def _is_sequence(hint: Any) -> bool:
    return typing.get_origin(hint) in (list, tuple)


def _literals(hint: Any) -> list[Any]:
    return [v for h in _alternatives(hint) if typing.get_origin(h) is Literal for v in typing.get_args(h)]


def _holds_dataclasses(items: list[Any]) -> bool:
    return bool(items) and all(dataclasses.is_dataclass(item) for item in items)

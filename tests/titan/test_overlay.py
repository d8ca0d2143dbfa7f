"""Laying tables over dataclasses, on small dataclasses: what is taken, what is refused, and in which words."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_symm.titan.overlay import (
    ConfigError,
    FieldError,
    flatten,
    merge,
    overlay,
    tree_from_arguments,
    tree_from_table,
)


@dataclass
class Group:
    pattern: str = ".*"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1, "eps": 1e-8})


@dataclass
class Inner:
    steps: int = 10
    rate: float = 0.5
    mode: Literal["fast", "slow"] = "fast"
    flag: bool = False
    names: list[str] = field(default_factory=list)
    ranks: tuple[int, ...] = ()
    limit: int | None = None
    title: str | None = "x"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise FieldError("steps", f"found {self.steps}; allowed: 1 or more")
        if self.rate > 1:
            raise ValueError("rate must not\nexceed 1")


@dataclass
class Outer:
    folder: str = "out"
    inner: Inner = field(default_factory=Inner)
    groups: list[Group] = field(default_factory=lambda: [Group()])
    policy: Group | None = None
    secret: int = 0


def lay(toml: str = "", *arguments: str) -> Outer:
    tree = merge(tree_from_table(tomllib.loads(toml), "x.toml"), tree_from_arguments(arguments))
    variants = {"policy": ("mode", {"none": None, "all": Group(pattern="all")})}
    return overlay(Outer(), tree, file="x.toml", hidden=("secret",), variants=variants)


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--inner.steps", "3"], "inner.steps", 3),
        (["--inner.steps=3"], "inner.steps", 3),
        (["--inner.rate", "1"], "inner.rate", 1.0),
        (["--inner.rate", "-1e-3"], "inner.rate", -1e-3),
        (["--inner.flag"], "inner.flag", True),
        (["--inner.flag", "--inner.steps", "4"], "inner.flag", True),
        (["--inner.flag", "false"], "inner.flag", False),
        (["--inner.mode", "slow"], "inner.mode", "slow"),
        (["--inner.names", "a,b"], "inner.names", ["a", "b"]),
        (["--inner.names", '["a", "b"]'], "inner.names", ["a", "b"]),
        (["--inner.names", "7"], "inner.names", ["7"]),
        (["--inner.ranks", "0,2"], "inner.ranks", (0, 2)),
        (["--inner.ranks", "[]"], "inner.ranks", ()),
        (["--inner.limit", "none"], "inner.limit", None),
        (["--inner.limit", "5"], "inner.limit", 5),
        (["--inner.title", "none"], "inner.title", None),
        (["--folder", "5"], "folder", "5"),
        (["--folder", "a=b"], "folder", "a=b"),
        (["--folder", '"quoted"'], "folder", '"quoted"'),
        (["--folder", "none"], "folder", "none"),
        (["--groups.0.options.lr", "1e-3"], "groups.0.options", {"lr": 1e-3, "eps": 1e-8}),
    ],
)
def test_arguments_take_the_type_of_their_field(arguments: list[str], key: str, value: Any) -> None:
    found = dict(flatten(lay("", *arguments)))[key]
    assert found == value
    assert type(found) is type(value)


def test_arguments_win_over_the_file_and_leave_the_rest() -> None:
    config = lay("[inner]\nsteps = 7\nflag = true", "--inner.steps", "8")
    assert (config.inner.steps, config.inner.flag, config.inner.rate) == (8, True, 0.5)


def test_an_argument_repairs_a_value_that_the_file_has_out_of_range() -> None:
    assert lay("[inner]\nsteps = 0", "--inner.steps", "1").inner.steps == 1


def test_array_of_tables_and_dictionaries_are_merged() -> None:
    config = lay("[[groups]]\noptions = {lr = 0.2}")
    assert config.groups == [Group(options={"lr": 0.2, "eps": 1e-8})]


def test_a_variant_key_chooses_the_class() -> None:
    assert lay('[policy]\nmode = "all"\noptions = {a = 1}').policy == Group(
        pattern="all", options={"lr": 0.1, "eps": 1e-8, "a": 1}
    )
    assert lay('[policy]\nmode = "none"').policy is None


def test_the_defaults_are_not_changed() -> None:
    defaults = Outer()
    overlay(defaults, tree_from_table({"inner": {"steps": 3}}, "x.toml"), file="x.toml")
    assert defaults == Outer()


@pytest.mark.parametrize(
    ("toml", "arguments", "message"),
    [
        (
            "[inner]\nstepz = 1",
            [],
            "x.toml: inner.stepz: unknown key; allowed: flag, limit, mode, names, ranks, rate,"
            " steps, title; nearest: inner.steps",
        ),
        (
            "[iner]\nsteps = 1",
            [],
            "x.toml: iner: unknown table; allowed: folder, groups, inner, policy; nearest: inner",
        ),
        ("secret = 1", [], "x.toml: secret: unknown key; allowed: folder, groups, inner, policy"),
        ("inner = 3", [], "x.toml: inner: found 3 (int); allowed: a table"),
        ("folder = {a = 1}", [], "x.toml: folder: found a table; allowed: str"),
        ("[inner]\nsteps = 'ten'", [], "x.toml: inner.steps: found 'ten' (str); allowed: int"),
        ("[inner]\nsteps = true", [], "x.toml: inner.steps: found True (bool); allowed: int"),
        ("[inner]\nsteps = 1.0", [], "x.toml: inner.steps: found 1.0 (float); allowed: int"),
        ("[inner]\nflag = 1", [], "x.toml: inner.flag: found 1 (int); allowed: bool"),
        ("[inner]\nrate = true", [], "x.toml: inner.rate: found True (bool); allowed: float"),
        (
            "[inner]\nmode = 'fats'",
            [],
            "x.toml: inner.mode: found 'fats' (str); allowed: 'fast', 'slow'; nearest: 'fast'",
        ),
        ("[inner]\nnames = [1]", [], "x.toml: inner.names: found [1] (list); allowed: list of str"),
        ("[inner]\nranks = [true]", [], "x.toml: inner.ranks: found [True] (list); allowed: list of int"),
        ("[inner]\nlimit = 'x'", [], "x.toml: inner.limit: found 'x' (str); allowed: int or 'none'"),
        ("[inner]\nsteps = 0", [], "x.toml: inner.steps: found 0; allowed: 1 or more"),
        ("[inner]\nrate = 2", [], "x.toml: [inner]: refused by Inner: rate must not exceed 1"),
        ("[policy]\nmode = 'al'", [], "x.toml: policy.mode: found 'al' (str); allowed: 'none', 'all'; nearest: 'all'"),
        ("[policy]\nmode = 'none'\npattern = 'x'", [], "x.toml: policy.pattern: unknown key; allowed: mode"),
        ("[inner]\nlimit = {}", [], "x.toml: inner.limit: found a table; allowed: int or 'none'"),
        ("[groups.1]\npattern = 'x'", [], "x.toml: groups.1: unknown table; allowed: 0"),
        ("", ["--inner.steps", "ten"], "command line: inner.steps: found 'ten' (str); allowed: int"),
        ("", ["--inner.steps"], "command line: inner.steps: found True (bool); allowed: int"),
        (
            "",
            ["--inner.stps", "1"],
            "command line: inner.stps: unknown key; allowed: flag, limit, mode, names, ranks,"
            " rate, steps, title; nearest: inner.steps",
        ),
        (
            "",
            ["inner.steps", "1"],
            "command line: found 'inner.steps' where a key must stand; expected --section.key"
            " value (a list is written as one word: '[0, 1]')",
        ),
        ("[inner]\nsteps = 0", ["--inner.rate", "0"], "x.toml: inner.steps: found 0; allowed: 1 or more"),
        (
            "[inner]\nrate = 2",
            ["--inner.steps", "1"],
            "x.toml and command line: [inner]: refused by Inner: rate must not exceed 1",
        ),
        ("inner = 1", ["--inner.steps", "1"], "x.toml: inner: found 1 (int); allowed: a table"),
        ("", ["--inner", "1", "--inner.steps", "1"], "command line: inner: found '1' (str); allowed: a table"),
    ],
)
def test_refusals_are_one_line_with_file_key_found_and_allowed(toml: str, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        lay(toml, *arguments)
    assert str(refused.value) == message


plain_values = st.recursive(
    st.one_of(st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
GOOD: dict[str, Any] = {
    "steps": lambda v: type(v) is int and v >= 1,
    "rate": lambda v: type(v) in (int, float) and v <= 1,
    "mode": lambda v: v in ("fast", "slow"),
    "flag": lambda v: type(v) is bool,
    "names": lambda v: type(v) is list and all(type(item) is str for item in v),
    "ranks": lambda v: type(v) is list and all(type(item) is int for item in v),
    "limit": lambda v: type(v) is int or v == "none",
    "title": lambda v: type(v) is str,  # "none" included
}


@given(key=st.sampled_from(sorted(GOOD)), value=plain_values)
def test_any_value_is_either_taken_with_its_type_or_refused_in_one_line(key: str, value: Any) -> None:
    tree = tree_from_table({"inner": {key: value}}, "x.toml")
    if GOOD[key](value):
        found = getattr(overlay(Outer(), tree, file="x.toml").inner, key)
        assert found == (None if value == "none" else tuple(value) if key == "ranks" else value)
        return
    with pytest.raises(ConfigError) as refused:
        overlay(Outer(), tree, file="x.toml")
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("x.toml: ")
    assert "inner" in str(refused.value)


@given(text=st.text(max_size=12) | st.sampled_from(['""', "1 # x", "'a'", "1\nb = 2", "[1]", "true"]))
def test_any_text_on_the_command_line_ends_as_a_string_field(text: str) -> None:
    assert lay("", f"--folder={text}").folder == text

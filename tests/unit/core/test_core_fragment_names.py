"""Which parameters are in which fragment: every one in exactly one, strided, sequential or by hand."""

import pytest

from diloco.core.config import SyncConfig
from diloco.core.fragments import assign
from diloco.errors import ConfigError

NAMES = ["wte.weight", *[f"model.layers.{i}.{n}.weight" for i in range(6) for n in ("attn", "mlp")], "norm.weight"]


def blocks(group: list[str]) -> list[int]:
    return sorted({int(name.split(".")[2]) for name in group})


def test_one_fragment_is_the_whole_model() -> None:
    assert assign(NAMES, SyncConfig()) == [NAMES]


@pytest.mark.parametrize("count", [2, 3, 6])
def test_blocks_are_strided_and_everything_outside_them_is_one_more_fragment(count: int) -> None:
    groups = assign(NAMES, SyncConfig(fragments=count))
    assert len(groups) == count + 1
    assert groups[-1] == ["wte.weight", "norm.weight"]
    for p, group in enumerate(groups[:-1]):
        assert {block % count for block in blocks(group)} == {p}
    assert sorted(name for group in groups for name in group) == sorted(NAMES)


@pytest.mark.parametrize(("count", "expected"), [(2, [[0, 1, 2], [3, 4, 5]]), (4, [[0, 1], [2], [3, 4], [5]])])
def test_sequential_fragments_are_runs_of_neighbouring_blocks(count: int, expected: list[list[int]]) -> None:
    groups = assign(NAMES, SyncConfig(fragments=count, fragment_order="sequential"))
    assert [blocks(group) for group in groups[:-1]] == expected
    assert groups[-1] == ["wte.weight", "norm.weight"]


def test_a_model_of_blocks_alone_has_no_empty_fragment() -> None:
    assert assign(["0.weight", "1.weight", "1.bias"], SyncConfig(fragments=2)) == [
        ["0.weight"],
        ["1.weight", "1.bias"],
    ]


@pytest.mark.parametrize(("names", "count"), [(NAMES, 7), (["a.weight", "b.weight"], 2), (["0.weight"], 2)])
def test_more_fragments_than_blocks_are_refused(names: list[str], count: int) -> None:
    with pytest.raises(ConfigError, match=f"fragments = {count}, but the model has"):
        assign(names, SyncConfig(fragments=count))


def test_no_fragment_is_refused() -> None:
    with pytest.raises(ConfigError, match="fragments = 0"):
        SyncConfig(fragments=0)


def test_fragments_by_hand_are_what_their_patterns_match() -> None:
    groups = assign(NAMES, SyncConfig(fragments_by_hand="wte.*, norm.*; *.attn.*; *.mlp.*"))
    assert groups[0] == ["wte.weight", "norm.weight"]
    assert [len(group) for group in groups] == [2, 6, 6]
    assert all(".mlp." in name for name in groups[2])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("*.attn.*; *.mlp.*, norm.*", r"'wte\.weight' into no fragment"),
        ("*; *.mlp.*", r"layers\.0\.mlp\.weight' into the fragments 1, 2"),
        ("*; lm_head.*", r"'lm_head\.\*' matches no parameter"),
        ("*;", "a fragment without a pattern"),
    ],
)
def test_patterns_that_do_not_cover_the_model_once_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        assign(NAMES, SyncConfig(fragments_by_hand=text))


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of the two"):
        SyncConfig(fragments=2, fragments_by_hand="*")
    with pytest.raises(ConfigError, match="no effect"):
        SyncConfig(fragment_order="sequential")

"""`Regexes` finds exactly the patterns that `re.fullmatch` finds."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_dist.layout.rule_matching import Regexes, required_texts

WORDS = ["a", "ab", "kernel", "bias", "block_1", "block_12", "dense", "x.y", ""]
PIECES = [
    *WORDS,
    *(
        "/",
        ".*",
        ".+",
        ".",
        "[0-9]+",
        "[^/]+",
        r"\d",
        r"\.",
        r"\w*",
        "(a|ab)",
        "(kernel)?",
        "(?:b)*",
        "b*",
        "/?",
        "a+",
        "^",
    ),
    *("$", "|", "{2}", "a{0,1}", "(?i)A", "(?=a)", "(?P<n>b)", "((a)b)+", "[]/]", r"[\]a]", r"\x61", r"(a)\1", "b??"),
]


def is_regex(pattern):
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


patterns = st.lists(st.sampled_from(PIECES), min_size=1, max_size=7).map("".join).filter(is_regex)
paths = st.lists(st.sampled_from([*WORDS, "b", "abb", "aa", "A", "ab]", "1"]), min_size=1, max_size=4).map("/".join)


@settings(max_examples=500, deadline=None)
@given(st.lists(patterns, max_size=12, unique=True), st.lists(paths, min_size=1, max_size=12))
def test_it_finds_what_trying_all_of_them_finds(found_patterns, some_paths):
    regexes = Regexes({pattern: re.compile(pattern) for pattern in found_patterns})
    for path in some_paths:
        assert regexes.full_matches(path) == [pattern for pattern in found_patterns if re.fullmatch(pattern, path)]


@settings(max_examples=500, deadline=None)
@given(patterns, paths)
def test_every_match_contains_the_required_texts_in_their_order(pattern, path):
    if re.fullmatch(pattern, path):
        position = 0
        for text in required_texts(pattern):
            assert text in path[position:]
            position = path.index(text, position) + len(text)


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("decoder/block_[0-9]+/.*kernel", ["decoder/block_", "/", "kernel"]),
        (r"layers\.3/(q|k)_proj/kernel", ["layers.3/", "_proj/kernel"]),
        ("dense.*|conv.*", ["", ""]),
        ("(?i)dense", [""] * 6),
        ("dense(_1)?/kernel", ["dense", "/kernel"]),
    ],
)
def test_required_texts_of_usual_rules(pattern, texts):
    assert required_texts(pattern) == texts


def test_a_changed_rule_is_found_at_once():
    regexes = Regexes({"a/kernel": re.compile("a/kernel")})
    assert regexes.full_matches("b/kernel") == []
    regexes["b/.*"] = re.compile("b/.*")
    assert regexes.full_matches("b/kernel") == ["b/.*"]
    regexes["misspelled/.*"] = re.compile("b/.*")  # a name that is not the pattern
    assert regexes.full_matches("b/kernel") == ["b/.*", "misspelled/.*"]
    del regexes["b/.*"], regexes["misspelled/.*"]
    assert regexes.full_matches("b/kernel") == []

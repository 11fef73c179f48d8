"""Rounds in which devices exchange pieces. What arrays become is tested with `layout_change`."""

import collections

import hypothesis
from hypothesis import strategies as st

from keras_dist.variables.piece_exchange import _messages, _rounds

MESSAGES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40)


@hypothesis.given(MESSAGES)
def test_rounds_are_as_few_as_possible(pairs):
    messages = [(*pair, (number,)) for number, pair in enumerate(pairs)]
    rounds = _rounds(messages)
    assert sorted(message for each in rounds for message in each) == sorted(messages)
    for each in rounds:
        assert all(len({message[end] for message in each}) == len(each) for end in (0, 1))
    most = [max(collections.Counter(message[end] for message in messages).values(), default=0) for end in (0, 1)]
    assert len(rounds) == max(most)


def test_devices_send_equally_much():
    """The example of the module, and four devices that need what two others hold."""
    rows = [[(row,)] for row in range(4)]
    messages = _messages(rows, [[*rows[a], *rows[b]] for a, b in ((0, 1), (2, 3), (2, 3), (0, 1))])
    assert len(messages) == 6
    assert len(_rounds(messages)) == 2
    copies = [[(0,)], [(0,)], [(1,)], [(1,)], [(2,)], [(2,)], [(3,)], [(3,)]]
    everything = [[(piece,) for piece in range(4)]] * 8
    senders = collections.Counter(sender for sender, *_ in _messages(copies, everything))
    assert set(senders.values()) == {3}

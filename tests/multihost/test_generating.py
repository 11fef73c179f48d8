"""`generate()` of several processes: each gets all tokens, those of one process."""

import pytest
from multihost.programs import generating
from support.keras_scenarios import assert_same_numbers
from support.run_processes import run_processes

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_two_processes_generate_the_tokens_of_one():
    rows = [8, 3]
    expected = generating.tokens(rows)
    completed = run_processes(generating.tokens, rows, processes=2, devices=2, tensorflow=True)
    assert [process.result for process in completed] == [expected] * 2


@pytest.mark.slow
def test_two_processes_train_under_one_layout_and_generate_under_another():
    """Each process searches for the moves that change a layout. With different ones, programs would hang."""
    expected = generating.rounds()
    for process in run_processes(generating.rounds, processes=2, devices=4, tensorflow=True):
        assert_same_numbers(process.result, expected)

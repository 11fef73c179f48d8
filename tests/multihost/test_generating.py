"""`generate()` of several processes: each gets all tokens, those of one process."""

import pytest
from multihost.programs import generating
from support.run_processes import run_processes

pytestmark = pytest.mark.multiprocess


def test_two_processes_generate_the_tokens_of_one():
    rows = [8, 3]
    expected = generating.tokens(rows)
    completed = run_processes(generating.tokens, rows, processes=2, devices=2, tensorflow=True)
    assert [process.result for process in completed] == [expected] * 2

"""Sequences that are sharded over devices of one process, or of several, give the numbers of one process."""

import numpy as np
import pytest
from support import sequence_program
from support.run_processes import run_processes
from support.strategy_models import assert_same_numbers

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one():
    expected = sequence_program.everything()
    completed = run_processes(sequence_program.everything, processes=2, devices=4, timeout=600)
    for case, numbers in expected.items():
        of_processes = [process.result[case] for process in completed]
        predicted = [each.pop("predict") for each in of_processes]
        if "parts" in case:  # each process is given the predictions of its own rows
            batches = [np.concatenate(parts) for parts in zip(*predicted, strict=True)]
        else:
            assert_same_numbers(predicted[0], predicted[1], 1e-6)
            batches = list(map(np.asarray, predicted[0]))
        assert_same_numbers(batches, list(map(np.asarray, numbers.pop("predict"))), 1e-5)
        for each in of_processes:
            assert_same_numbers(each, numbers, 1e-5)

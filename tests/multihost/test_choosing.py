"""`kd.auto` with several processes: each makes the same choice, and it trains as one process does."""

import keras
import pytest
from multihost.programs import choosing
from support.run_processes import run_processes
from support.strategy_models import assert_same_numbers

pytestmark = pytest.mark.multiprocess


def test_processes_agree_and_train_as_one():
    first, second = (each.result for each in run_processes(choosing.chosen, processes=2, devices=4))
    assert first["source"] == second["source"]
    assert first["outcomes"] == second["outcomes"]
    assert first["memory"] == first["planned"] == second["planned"]
    assert first["most of a process"] == 4  # these axes do not leave a host
    keras.utils.set_random_seed(0)
    options = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
    expected = choosing.build().fit(choosing.TOKENS, choosing.TARGETS, **options).history["loss"]
    for process in (first, second):
        assert_same_numbers(process["losses"], expected, 1e-5)

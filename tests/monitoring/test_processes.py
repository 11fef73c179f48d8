"""Several processes: one line, with the slowest process named."""

import pytest
from support import monitored_training
from support.run_processes import run_processes

from keras_dist.monitoring.process_lines import summary_of_all
from keras_dist.monitoring.summary import Summary


def test_the_slowest_process_is_the_one_whose_devices_wait_for_it():
    fast = Summary(8, 8, median=0.1, host_wait=0.01, peak_memory=2)
    slow = Summary(8, 8, median=0.1, host_wait=0.4, data_wait=0.3, peak_memory=3)
    summary, text = summary_of_all({0: fast, 2: slow}, 4)
    assert summary.peak_memory == 3
    assert text.startswith("slowest process 2 of 4")
    assert "processes 1, 3" in text
    assert summary_of_all({0: Summary(1, 0)}, 1)[1] == ""


@pytest.mark.multiprocess
def test_one_process_prints_a_line_for_all():
    first, second = run_processes(monitored_training.train, processes=2, devices=1, timeout=120)
    lines = [line for line in first.stdout.splitlines() if " step " in line]
    assert [line.split(" loss ")[0] for line in lines] == ["epoch 1/1 step 4/8", "epoch 1/1 step 8/8"]
    # Each process waits until both have read their batches, and process 1 is the one that takes time for that.
    assert all("slowest process 1 of 2" in line for line in lines), lines
    assert "step 4/8" not in second.stdout
    assert first.result["samples_per_second"][0] > 0

"""Several processes, of which one or all are asked to stop: all save the same step, and end."""

import pytest
from multihost.programs import preempted
from support.run_processes import output_of, run_processes
from support.slow_cases import slow

pytestmark = pytest.mark.multiprocess

MOMENTS = [
    (1, "epoch", 1),  # before the first step
    (0, "batch", 2),
    (1, "batch", 4),  # after which a checkpoint is written
    (1, "batch", 6),  # the last of an epoch
    (0, "test", 1),
    (1, "test", 3),
    ("all", "batch", 9),
    (1, "test", 9),  # the last of all
]


@pytest.mark.parametrize(
    ("processes", "moments"), [(2, MOMENTS[1:2]), slow(2, MOMENTS), slow(4, [(3, "batch", 4), (2, "test", 3)])]
)
def test_all_processes_stop_at_the_same_batch_and_continue(processes, moments, tmp_path):
    done = run_processes(preempted.stop_and_continue, str(tmp_path), moments, processes=processes)
    undisturbed, found = done[0].result
    for process in done:
        assert process.result == done[0].result
    for moment, (losses, rest) in zip(moments, found, strict=True):
        assert losses | rest == undisturbed, moment
        assert len(losses) + len(rest) <= len(undisturbed) + 1, moment  # validation repeats the last loss
        _, kind, number = moment
        expected = {"epoch": 0, "batch": number, "test": -(-number // 3) * 6}[kind]
        assert len(losses) in (expected, expected + 1), moment


@pytest.mark.parametrize("process", [slow(0), 1])
def test_all_processes_end_with_the_same_status(process, tmp_path):
    done = run_processes(preempted.stop_and_exit, str(tmp_path), process, check=False)
    assert [each.returncode for each in done] == [75, 75], output_of(done)
    assert "batches are saved" in done[0].stderr

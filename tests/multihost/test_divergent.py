"""What differs among processes and should not is found on all of them, and said in words, before devices wait."""

import pytest
from multihost.programs.divergent import divergent
from support.run_processes import run_processes

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def said():
    """What each of two processes said of each case, process 1 being the one that is given something else."""
    return [process.result for process in run_processes(divergent, processes=2, devices=2, timeout=300)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("seed", ["ValueError", "random seed", "0 on process 0, 1 on process 1", "set_random_seed"]),
        ("values", ["ValueError", "'sequential", "bias", "on process 1"]),
        ("model", ["ValueError", "'sequential", "kernel (4, 8)", "kernel (4, 16)"]),
        ("rows", ["ValueError", "auto_shard_dataset=True", "batch 0", "process 1"]),
        ("a late row", ["ValueError", "auto_shard_dataset=True", "batch 3"]),
        ("shuffled", ["ValueError", "batch 0", "set_random_seed"]),
        ("batch size", ["ValueError", "batch 0", "[7, 7] on process 0, [6, 6] on process 1"]),
        ("one batch fewer", ["ValueError", "batch 2|after 3 batches"]),
        ("one batch fewer of a PyDataset", ["ValueError", "rocess 1", "after 3 batches"]),
        ("one batch fewer of a generator", ["ValueError", "rocess 1", "after 3 batches"]),
        ("shapes", ["Error"]),
        ("dtypes", ["ValueError", "batch 0", "float32[..., 4]", "int32[..., 4]"]),
        ("steps", ["ValueError", "steps_per_epoch", "3 on process 0, 2 on process 1"]),
        ("method", ["ValueError", "train on process 0, test on process 1"]),
        ("single batches", ["ValueError", "batch 0", "[7, 7] on process 0, [6, 6] on process 1"]),
    ],
)
def test_what_differs_is_said_on_all_processes(said, case, words):
    for of_process in said:
        for word in words:
            assert any(part in of_process[case] for part in word.split("|")), of_process[case]


def test_an_error_in_the_source_of_one_process_ends_all(said):
    assert said[1]["an error in a source"] == "OSError: the disk is gone"
    assert "OSError: the disk is gone" in said[0]["an error in a source"]
    assert "Process 1 (" in said[0]["an error in a source"]


def test_an_epoch_of_unequal_parts_ends_for_all_with_a_warning(said):
    for steps, words in (of_process["unequal parts"] for of_process in said):
        assert steps == 3
        assert "rocess 1" in words
        assert "after 3 batches" in words


def test_parts_that_are_equal_are_warned_of(said):
    for _, words in (of_process["equal parts"] for of_process in said):
        assert "processes 0 and 1" in words.lower()


def test_after_all_errors_training_still_works(said):
    assert said[0]["goes on"] == said[1]["goes on"]

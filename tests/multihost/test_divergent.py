"""What differs among processes and should not is found on all of them, and said in words, before devices wait."""

import pytest
from multihost.programs.divergent import divergent
from support.run_processes import run_processes

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def said():
    """What each of two processes said of each case, process 1 being the one that is given something else."""
    return [process.result for process in run_processes(divergent, processes=2, devices=2, timeout=300)]


DIFFERENT_PROGRAMS = [
    ("activation", ["custom_jvp_call", "tanh"]),
    ("dropout rate", ["0.5", "0.75"]),
    ("dtype policy", ["bf16"]),
    ("loss", ["square", "abs"]),
    ("loss weights", ["2.0"]),
    ("beta_1", []),
    ("weight decay", ["0.1", "0.2"]),
    ("clipnorm", ["1.0", "2.0"]),
    ("schedule", ["10.0", "20.0"]),
    ("prediction", ["custom_jvp_call", "tanh"]),
]


@pytest.mark.parametrize(("case", "instructions"), DIFFERENT_PROGRAMS)
def test_different_programs_are_an_error_on_all_processes(said, case, instructions):
    for of_process in said:
        assert of_process[case].startswith("ValueError: The step of 'sequential"), of_process[case]
        for instruction in instructions:
            assert instruction in of_process[case]


def test_equal_programs_are_compared_without_tracing_again(said):
    assert said[0]["same program"] == said[1]["same program"]
    assert said[0]["traces"] == said[1]["traces"] == 2  # with symbolic inputs when fit builds metrics, and in the step


@pytest.mark.parametrize(
    ("case", "values"),
    [
        ("seed", ["0 on process 0", "1 on process 1", "set_random_seed"]),
        ("values", ["bias", "on process 1"]),
        ("learning rate", ["learning_rate", "on process 1"]),
        ("jit_compile", ["True on process 0", "False on process 1"]),
        ("steps_per_execution", ["1 on process 0", "2 on process 1"]),
        ("auto_shard_dataset", ["True on process 0", "False on process 1"]),
        ("model", ["kernel (4, 8)", "kernel (4, 16)"]),
        ("rows", ["batch 0", "process 1"]),
        ("a late row", ["batch 3"]),
        ("shuffled", ["batch 0", "set_random_seed"]),
        ("batch size", ["[7, 7] on process 0", "[6, 6] on process 1"]),
        ("one batch fewer", ["batch 2|after 3 batches"]),
        ("one batch fewer of a PyDataset", ["rocess 1", "after 3 batches"]),
        ("one batch fewer of a generator", ["rocess 1", "after 3 batches"]),
        ("dtypes", ["float32[..., 4]", "int32[..., 4]"]),
        ("steps", ["3 on process 0", "2 on process 1"]),
        ("method", ["train on process 0", "test on process 1"]),
        ("single batches", ["[7, 7] on process 0", "[6, 6] on process 1"]),
    ],
)
def test_a_difference_is_an_error_on_all_processes(said, case, values):
    for of_process in said:
        assert of_process[case].startswith("ValueError: "), of_process[case]
        for value in values:
            assert any(part in of_process[case] for part in value.split("|")), of_process[case]


def test_different_shapes_are_an_error_on_all_processes(said):
    for of_process in said:
        assert "Error" in of_process["shapes"]


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

"""A difference between processes that must not exist is an error on all of them, before devices wait."""

import itertools

import pytest
from multihost.programs.divergent import divergent
from support.run_processes import run_processes

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def results():
    """The messages of two processes, of which process 1 is given something else in each case."""
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


# The cases are not parameters of tests, which several workers would run, each with processes of its own.
def test_different_programs_are_an_error_on_all_processes(results):
    for of_process, (case, instructions) in itertools.product(results, DIFFERENT_PROGRAMS):
        assert of_process[case].startswith("ValueError: The step of 'sequential"), (case, of_process[case])
        for instruction in instructions:
            assert instruction in of_process[case], case


def test_equal_programs_are_compared_without_tracing_again(results):
    assert results[0]["same program"] == results[1]["same program"]
    assert results[0]["traces"] == results[1]["traces"] == 2  # as fit builds metrics, and in the step


DIFFERENT_CALLS = [
    ("seed", ["0 on process 0", "1 on process 1", "set_random_seed"]),
    ("values", ["bias", "checksum", "on process 1"]),
    ("learning rate", ["learning_rate () float32 () 0.1' on process 0", "() 0.2' on process 1"]),
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
    ("method", ["fit on process 0", "evaluate on process 1"]),
    ("rate of an epoch", ["learning_rate' (0.03 on process 0 and 0.2 on process 1)"]),
    (
        "values between fits",
        ["rate' (0.01 on process 0 and 0.5 on process 1)", "kernel' (on process 0 and on process 1)"],
    ),
    ("values of shards", ["first/kernel' (on process 0 and on process 1)"]),
    ("host values of shards", ["own/kernel", "on process 0", "made of a host value with checksum", "on process 1"]),
    ("host values between fits", ["own/kernel' (on process 0 and on process 1)"]),
    ("values at the end", ["bias' (on process 0 and on process 1)"]),
    ("values in an epoch", ["bias' (on process 0 and on process 1)"]),
    ("epochs", ["process 0 is at the end of fit, process 1 at the start of an epoch"]),
    (
        "order of devices",
        ["[0, 1, ", "on process 0, [3, 2, 1, 0] on process 1|on process 0, [2049, 2048, 1, 0] on process 1"],
    ),
    ("lengths", ["[..., 5, 4]", "[..., 6, 4]", "Pad sequences"]),
    ("single batches", ["[7, 7] on process 0", "[6, 6] on process 1"]),
    ("later single batches", ["rows of a single batch"]),
]


def test_a_difference_is_an_error_on_all_processes(results):
    for of_process, (case, values) in itertools.product(results, DIFFERENT_CALLS):
        assert of_process[case].startswith("ValueError: "), (case, of_process[case])
        for value in values:
            assert any(part in of_process[case] for part in value.split("|")), (case, of_process[case])


def test_values_are_compared_before_callbacks_see_the_end_of_an_epoch(results):
    """Only the two epochs that "epochs" has on both processes have ended, and none of "values in an epoch"."""
    assert results[0]["epochs that ended"] == results[1]["epochs that ended"] == [0, 1]


def test_different_shapes_are_an_error_on_all_processes(results):
    for of_process in results:
        assert "Error" in of_process["shapes"]


def test_an_error_in_the_source_of_one_process_ends_all(results):
    assert results[1]["an error in a source"] == "OSError: the disk is gone"
    assert "OSError: the disk is gone" in results[0]["an error in a source"]
    assert "Process 1 (" in results[0]["an error in a source"]


def test_the_epoch_ends_with_a_warning_when_one_process_has_no_more_data(results):
    for steps, warning in (of_process["unequal parts"] for of_process in results):
        assert steps == 3
        assert "rocess 1" in warning
        assert "after 3 batches" in warning


def test_processes_may_have_different_numbers_of_batches(results):
    assert results[0]["unequal parts of known length"] == results[1]["unequal parts of known length"]
    assert len(results[0]["unequal parts of known length"]) == 2


def test_equal_rows_on_all_processes_are_a_warning(results):
    for _, warning in (of_process["equal parts"] for of_process in results):
        assert "processes 0 and 1" in warning.lower()


def test_after_all_errors_training_still_works(results):
    assert results[0]["goes on"] == results[1]["goes on"]

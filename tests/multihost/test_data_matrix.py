"""Several processes give the numbers of one: every distribution, every source of data, every method."""

import importlib.util
import itertools

import numpy as np
import pytest
from support import process_matrix
from support.run_processes import run_processes
from support.slow_cases import slow

# Relative to the largest value of an array, and absolute for arrays that are all below 1. Adam divides a gradient by
# its size, and so enlarges the rounding of one that nearly cancels.
TOLERANCE, TOLERANCE_OF_WEIGHTS = 1e-6, 5e-6

NEEDED = {"tf_data": "tensorflow", "grain_dataset": "grain", "torch_loader": "torch"}
MISSING = {source for source, package in NEEDED.items() if importlib.util.find_spec(package) is None}

# Every source where rows lie on devices of several processes in turn, and two under the other distributions.
SOURCES = dict.fromkeys(process_matrix.DISTRIBUTIONS, ("numpy_arrays", "generator"))
SOURCES["model_parallel_across"] = tuple(s for s in process_matrix.SOURCES if s not in {*MISSING, "torch_loader"})
# Arrays are passed by cases that all sources share.
MANY = {2: SOURCES, 4: dict.fromkeys(SOURCES, ("generator",))}
FEW = {2: {"model_parallel_across": ("numpy_arrays",)}}

# Keras says so where it finds the end of a source without a length, on one device too.
pytestmark = [pytest.mark.filterwarnings("ignore:Your input ran out of data"), pytest.mark.multiprocess]


def in_order(parts):
    """Puts the predictions of the processes, of their own rows, into the order of the whole dataset."""
    parts, rows = list(map(list, parts)), []
    for start in process_matrix.STARTS:
        size = min(process_matrix.BATCH, process_matrix.ROWS - start)
        ends = [size * rank // len(parts) for rank in range(len(parts) + 1)]
        for part, first, last in zip(parts, ends, ends[1:], strict=False):
            rows += part[: last - first]
            del part[: last - first]
    return rows


def assert_same(actual, expected, what, tolerance=TOLERANCE):
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), what
        for key in expected:
            assert_same(actual[key], expected[key], f"{what}, {key}")
    elif what.endswith("weights"):
        for number, (got, want) in enumerate(zip(actual, expected, strict=True)):
            assert_same(got, want, f"{what} {number}", TOLERANCE_OF_WEIGHTS)
    else:
        got, want = np.asarray(actual, "float64"), np.asarray(expected, "float64")
        limit = tolerance * max(1, np.abs(want).max(initial=0))
        np.testing.assert_allclose(got, want, rtol=0, atol=limit, err_msg=what)


def assert_same_on_all(expected, completed):
    for case, of_case in expected.items():
        of_processes = [process.result[case] for process in completed]
        if case.endswith("parts"):  # each process is given the predictions of its own rows
            predicted = [of_process.pop("predict") for of_process in of_processes]
            of_single = "single batches" in case
            predicted = list(itertools.chain(*predicted)) if of_single else in_order(predicted)
            assert_same(predicted, of_case["predict"], f"{case}, predict")
            of_case = {key: value for key, value in of_case.items() if key != "predict"}
        for rank, of_process in enumerate(of_processes):
            assert_same(of_process, of_case, f"{case}, process {rank}")


@pytest.mark.parametrize("sources_by_processes", [FEW, slow(MANY)], ids=["few", "many"])
def test_several_processes_give_the_numbers_of_one(sources_by_processes, tmp_path_factory):
    """In one test, since the numbers of one process, which all compare with, take long to compute."""
    of_one = process_matrix.everything(sources_by_processes[2], str(tmp_path_factory.mktemp("one")))
    for processes, sources in sources_by_processes.items():
        folder = str(tmp_path_factory.mktemp(f"{processes}"))
        completed = run_processes(
            process_matrix.everything,
            sources,
            folder,
            processes=processes,
            devices=8 // processes,
            timeout=900,
            tensorflow="tf_data" in sources["model_parallel_across"],
        )
        left_out = [
            f"{name}, {source}, "
            for name in sources
            for source in process_matrix.SOURCES
            if source not in sources[name]
        ]
        expected = {case: numbers for case, numbers in of_one.items() if not case.startswith(tuple(left_out))}
        assert all(process.result.keys() == expected.keys() for process in completed)
        assert_same_on_all(expected, completed)
        if "data_parallel" in sources:
            of_batch, of_a_row_each = completed[0].result["data_parallel, flops"]
            assert 0 < of_batch <= 1.1 * of_a_row_each


@pytest.mark.skipif("torch_loader" in MISSING, reason="needs PyTorch, the package 'torch'")
def test_torch_loader_in_several_processes_gives_the_numbers_of_one():
    """Alone, since PyTorch is in no extra: its usual build brings CUDA."""
    case = "model_parallel_across", ("torch_loader",)
    completed = run_processes(process_matrix.of_sources, *case, processes=2, devices=4)
    assert_same_on_all(process_matrix.of_sources(*case), completed)


@pytest.mark.skipif(bool(MISSING - {"torch_loader"}), reason=f"packages are not installed for {sorted(MISSING)}")
def test_no_source_is_left_out():
    assert {*SOURCES["model_parallel_across"], "torch_loader"} == set(process_matrix.SOURCES)

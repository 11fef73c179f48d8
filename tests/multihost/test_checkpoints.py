"""Checkpoints of one and of several processes, and training whose processes are killed at any moment."""

import json
import shutil

import pytest
from multihost.programs import checkpoints
from support.run_processes import output_of, run_processes

pytestmark = pytest.mark.multiprocess


def losses_in(file):
    found = {}
    for line in file.read_text().splitlines():
        epoch, batch, loss = json.loads(line)
        assert found.setdefault((epoch, batch), loss) == loss, (epoch, batch)
    return found


def test_killed_training_goes_on_as_if_it_had_not_been(tmp_path):
    # Of its own, since a process may be killed while it writes there too.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    many = {"processes": 2, "devices": 4, "timeout": 240, "wait_seconds": 20, "grace": 60} | cache

    def run(directory, notes, *arguments, check):
        files = [str(tmp_path / directory), str(tmp_path / notes)]
        return run_processes(checkpoints.train, *files, *arguments, **many, check=check)

    whole = run("whole", "whole.txt", check=True)
    for who, after, delay in [("all", 4, 0.0), (1, 5, 0.03), (0, 4, 0.1), ("all", 7, 0.3), (1, 6, 0.0)]:
        done = run("cut", "cut.txt", who, after, delay, check=False)
        for process in done:
            is_killed = who in (process.rank, "all")
            # Process 0 holds the coordination service, without which JAX aborts the other.
            statuses, name = ({1, -6}, "leader task") if who == 0 else ({1, 70}, f"process {who}")
            assert process.returncode in ({-9} if is_killed else statuses), output_of(done)
            assert is_killed or name in process.stderr.lower(), output_of(done)
        if who == "all" and delay == 0.0:  # right after a save had begun, which is found unfinished
            assert list((tmp_path / "cut").glob("*orbax-checkpoint-tmp*"))
    last = run("cut", "cut.txt", check=True)
    assert [process.result for process in last] == [process.result for process in whole]
    assert losses_in(tmp_path / "cut.txt") == losses_in(tmp_path / "whole.txt")


def test_sources_of_several_processes_go_on_where_they_stood(tmp_path):
    pytest.importorskip("grain")
    cases = [
        ("model_parallel_across", "PyDataset"),
        ("model_parallel_across", "grain"),
        ("fully_sharded", "grain, own rows"),
    ]
    of_whole_data = [case for case in cases if case[1] != "grain, own rows"]

    def run(directory, processes, cases, stop_after=None):
        arguments = [str(tmp_path / directory), cases, stop_after]
        many = {"processes": processes, "devices": 8 // processes, "initialize": processes > 1}
        return [process.result for process in run_processes(checkpoints.go_on, *arguments, **many)]

    whole = run("whole", 2, cases)
    assert whole[0] == whole[1]
    cut = run("cut", 2, cases, 6)  # of 12 batches, four in an epoch
    shutil.copytree(tmp_path / "cut", tmp_path / "elsewhere")
    rest = run("cut", 2, cases)
    for case, losses in whole[0].items():
        assert len(losses) == 12
        assert cut[0][case] == dict(list(losses.items())[:6]), case
        assert rest[0][case] == rest[1][case] == dict(list(losses.items())[6:]), case
    for case, losses in run("elsewhere", 1, of_whole_data)[0].items():
        assert losses == pytest.approx(rest[0][case], rel=1e-6), case


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_checkpoint_of_keras_is_read_by_another_number_of_processes(before, after, tmp_path):
    def run(processes, *arguments):
        many = {"processes": processes, "devices": 8 // processes, "initialize": processes > 1, "timeout": 180}
        return [done.result for done in run_processes(checkpoints.save_and_load, str(tmp_path), *arguments, **many)]

    ((_, values),) = run(before, "fully sharded", True)[0]
    for strategy in ("ZeRO-1", "fully sharded"):
        for (sharded, first), (_, second) in run(after, strategy, False):
            assert first == second == values
            assert sharded > 0

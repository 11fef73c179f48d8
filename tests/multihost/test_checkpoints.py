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


@pytest.mark.slow
def test_killed_training_continues_with_the_losses_of_uninterrupted_training(tmp_path):
    # A compilation cache of its own, since a process may be killed while it writes there too.
    options = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"), "heartbeat_timeout": 10, "end_grace": 4}
    options["grace"] = 60  # seconds that the other process has to end
    interrupted, uninterrupted = tmp_path / "interrupted", tmp_path / "uninterrupted"
    for who, after, delay in [("all", 4, 0.0), (1, 5, 0.03), (0, 4, 0.1)]:
        done = run_processes(checkpoints.train, str(interrupted), who, after, delay, check=False, **options)
        for process in done:
            is_killed = who in (process.rank, "all")
            # Process 0 holds the coordination service, without which JAX aborts the other.
            statuses, name = ({1, -6}, "leader task") if who == 0 else ({1, 70}, f"process {who}")
            statuses = {-9} if is_killed else statuses
            if who == "all" and process.rank == 1:
                statuses = {-9, -6}  # -6 if process 0 was killed before
            assert process.returncode in statuses, output_of(done)
            assert is_killed or name in process.stderr.lower(), output_of(done)
        if who == "all" and delay == 0.0:  # right after a save had begun, which is found unfinished
            assert list((interrupted / "checkpoints").glob("*orbax-checkpoint-tmp*"))
    for process in run_processes(checkpoints.train_both, str(interrupted), str(uninterrupted), **options):
        assert process.result[0] == process.result[1]
    assert losses_in(interrupted / "losses.txt") == losses_in(uninterrupted / "losses.txt")


@pytest.mark.slow
def test_sources_of_several_processes_continue_at_their_position(tmp_path):
    pytest.importorskip("grain")
    cases = [
        ("model_parallel_across", "PyDataset"),
        ("model_parallel_across", "grain"),
        ("fully_sharded", "grain, own rows"),
    ]
    full, stopped, copied = (str(tmp_path / name) for name in ("full", "stopped", "copied"))

    def run(*call):
        return [process.result for process in run_processes(*call, devices=4)]

    # Six of twelve batches, four in an epoch.
    (expected, first), others = run(checkpoints.train_without_and_with_a_stop, full, stopped, cases, 6)
    assert others == [expected, first]
    shutil.copytree(stopped, copied)
    rest, other_rest = run(checkpoints.train_cases, stopped, cases)
    assert rest == other_rest
    for case, losses in expected.items():
        assert len(losses) == 12
        assert first[case] == dict(list(losses.items())[:6]), case
        assert rest[case] == dict(list(losses.items())[6:]), case
    for case, losses in checkpoints.train_cases(copied, cases).items():  # in one process
        assert losses == pytest.approx(rest[case], rel=1e-6), case


def test_processes_agree_on_the_newest_undamaged_checkpoint(tmp_path):
    one, other = (
        process.result for process in run_processes(checkpoints.resume_from_a_damaged_checkpoint, str(tmp_path))
    )
    for (epochs, losses, texts), (other_epochs, other_losses, other_texts) in zip(one, other, strict=True):
        assert (epochs, losses) == (other_epochs, other_losses)
        assert texts == other_texts
    (_, uninterrupted, _), *resumed = one
    for process, (epochs, losses, texts) in enumerate(resumed):  # that wrote the damaged file
        assert epochs == [2]
        assert losses == pytest.approx(uninterrupted[2:], rel=1e-6)
        assert f"12 is damaged: file pytree/ocdbt.process_{process}/d/" in texts[0]
    names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert names == {"4", "8", "12", "12.damaged", "12.1.damaged"}


@pytest.mark.slow
def test_a_checkpoint_of_keras_is_read_by_another_number_of_processes(tmp_path):
    directories = [str(tmp_path / name) for name in ("of one", "of two")]
    values = [checkpoints.save(directories[0])]
    [both, other] = run_processes(checkpoints.save_and_load, directories[1], directories[0], devices=4)
    assert both.result == other.result
    of_two, loaded_by_two = both.result
    values.append(of_two)
    for loaded, expected in zip([loaded_by_two, checkpoints.load(directories[1])], values, strict=True):
        for sharded, first, second in loaded:
            assert sharded > 0
            assert first == second == expected

"""Where one process fails, the others end in bounded time, with words that name it."""

import pytest
from support.run_processes import in_words, run_processes

WAIT = 12  # seconds for one another, once all have started

# What process `who` does while the other waits for it.
PROGRAM = """
import signal, time
from keras_dist.multihost import messaging

def together(number):
    import jax, numpy as np
    if "DEVICES" in os.environ:  # a sum over all devices, which no message of ours is needed for
        mesh = jax.sharding.Mesh(jax.devices(), "x")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        ones = jax.make_array_from_callback((jax.device_count(),), sharding, lambda index: np.ones(1))
        float(jax.jit(lambda x: x.sum())(ones))
    else:
        assert messaging.exchange("steps", number) == [number, number]

for number in range(3):
    together(number)
messaging.set_timeout({wait})
if messaging.index() == int(os.environ["WHO"]):
    {act}
together(3)
"""


def run(act, who, **options):
    program = PROGRAM.format(act=act, wait=WAIT)
    done = run_processes(program, processes=2, devices=1, check=False, WHO=str(who), **options)
    words = in_words(done)
    assert done[1 - who].returncode not in (0, 124, -9, -15, -6), words  # it ended by itself
    assert "terminate called" not in words
    assert "Check failure stack trace" not in words
    return done[who], done[1 - who], words


@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_process_is_named_at_once(who):
    dead, other, words = run("os.kill(os.getpid(), signal.SIGKILL)", who)
    assert dead.returncode == -9, words
    assert f"Process {who} (" in other.stderr, words
    assert "died or does not answer" in other.stderr, words


def test_a_killed_process_is_named_by_one_that_waits_for_its_devices():
    dead, other, words = run("os.kill(os.getpid(), signal.SIGKILL)", 1, DEVICES="1")
    assert dead.returncode == -9, words
    assert "Process 1 (" in other.stderr, words
    assert "died or does not answer" in other.stderr, words


@pytest.mark.parametrize("who", [0, 1])
def test_an_error_of_one_process_is_that_of_all(who):
    failed, other, words = run("raise KeyError('the reason')", who)
    assert failed.returncode == 1, words
    assert "KeyError: 'the reason'" in failed.stderr, words
    assert f"Process {who} (" in other.stderr, words
    assert "failed: KeyError: 'the reason'" in other.stderr, words


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_ends_early_is_named(who):
    ended, other, words = run("sys.exit(0)", who)
    assert ended.returncode == 0, words
    assert f"process {who} (" in other.stderr, words
    assert "ended while process" in other.stderr, words


def test_a_stopped_process_is_named():
    _, other, words = run("os.kill(os.getpid(), signal.SIGSTOP)", 0, grace=1)
    assert "process 0 (" in other.stderr, words


def test_a_stopped_process_is_named_by_one_that_waits_for_its_devices():
    _, other, words = run("os.kill(os.getpid(), signal.SIGSTOP)", 1, grace=1, wait_seconds=40, DEVICES="1")
    assert "Process 1 (" in other.stderr, words
    assert "died or does not answer" in other.stderr, words
    assert other.returncode == 70, words


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_does_something_else_is_named_and_ends_too(who):
    late, other, words = run("time.sleep(1000)", who)
    assert f"process {who} (" in other.stderr, words
    assert "wait for one another for 12 seconds" in other.stderr, words
    assert late.returncode == 70, words
    assert "wait for one another for 12 seconds" in late.stderr, words


IN_FIT = """
import signal, time
import keras, numpy as np
from keras_dist.multihost import messaging

class Act(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])  # for which the devices of all are waited for
        if batch == 3:
            messaging.set_timeout({wait})
            if messaging.index() == 1:
                {act}

kd.set_distribution(kd.DataParallel())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=4, verbose=0, callbacks=[Act()])
"""


@pytest.mark.parametrize(
    ("act", "words"),
    [("time.sleep(1000)", "wait for one another for 12 seconds"), ("sys.exit(0)", "ended while")],
    ids=["stalls", "ends early"],
)
def test_a_process_whose_devices_wait_ends_too(act, words):
    done = run_processes(IN_FIT.format(act=act, wait=WAIT), processes=2, devices=1, check=False)
    assert words in done[0].stderr, in_words(done)
    assert "process 1 (" in done[0].stderr.lower(), in_words(done)
    assert 0 < done[0].returncode != 124, in_words(done)
    assert done[1].returncode == (0 if "exit" in act else 70), in_words(done)

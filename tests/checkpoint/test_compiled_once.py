"""A job that is started again reads its programs from JAX's compilation cache and compiles nothing."""

import json

import pytest
from support.new_process import run

pytest.importorskip("orbax.checkpoint")

JOB = """
import collections, json, os, sys
sys.modules |= dict.fromkeys(("pandas", "sklearn", "matplotlib"))  # Keras starts sooner without them
import keras_dist as kd
kd.simulate_devices(4)
import jax, keras, numpy as np

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
options = kd.StepOptions(microbatches=2, remat="full", offload="optimizer", optimizer_state_dtype="bfloat16")
kd.set_distribution(kd.FullyShardedDataParallel(min_shard_bytes=0, step_options=options))
block = lambda: (keras.layers.Dense(256, "relu"), keras.layers.LayerNormalization())
model = keras.Sequential([keras.Input((256,)), *block(), *block(), keras.layers.Dropout(0.1)])
model.compile("adam", "mse", metrics=["mae"])
x, checkpoint = np.ones((20, 256), "float32"), kd.TrainingCheckpoint(os.environ["CHECKPOINTS"], save_freq=2)
epochs = model.fit(x, x, 8, int(os.environ["EPOCHS"]), validation_data=(x, x), callbacks=[checkpoint], verbose=0).epoch
requests, hits = (events["/jax/compilation_cache/" + name] for name in ("compile_requests_use_cache", "cache_hits"))
print(json.dumps([requests, hits, epochs]))
"""


@pytest.mark.multiprocess
def test_a_job_that_is_started_again_compiles_nothing(tmp_path):
    def job(epochs, seed):
        completed = run(
            JOB,
            CHECKPOINTS=str(tmp_path / "checkpoints"),
            EPOCHS=str(epochs),
            JAX_COMPILATION_CACHE_DIR=str(tmp_path / "compiled"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            PYTHONHASHSEED=seed,  # sets have another order
        )
        assert completed.returncode == 0, completed.stderr
        return json.loads(completed.stdout.splitlines()[-1])

    programs, found, trained = job(epochs=1, seed="1")
    assert found < programs
    assert trained == [0]
    programs, found, trained = job(epochs=2, seed="2")
    assert found == programs > 0
    assert trained == [1]

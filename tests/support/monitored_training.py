"""Training with a monitor in several processes, of which one is slow to read its data."""

import time

import keras
import numpy as np

import keras_dist as kd
from keras_dist.multihost import coordination


class Data(keras.utils.PyDataset):
    """Eight batches. Process 1 takes 0.2 seconds to read one."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(0.2 * coordination.process_index())
        return np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


def train():
    """Returns the history of an epoch."""
    kd.set_distribution(kd.DataParallel(auto_shard_dataset=False))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model.fit(Data(), verbose=0, callbacks=[kd.StepMonitor(log_every=4)]).history

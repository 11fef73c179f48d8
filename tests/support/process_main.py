"""The main program of each process that `run_processes` starts. It takes the arguments that `run_processes` passes."""

import importlib
import json
import os
import sys


def main():
    module, function, arguments, initialize, heartbeat_timeout, end_grace, tensorflow, directory = sys.argv[1:]
    # Keras imports these if it can; without them it starts sooner.
    for optional in ("pandas", "sklearn", "matplotlib", *(("tensorflow",) if tensorflow == "0" else ())):
        sys.modules[optional] = None  # pyright: ignore[reportArgumentType]
    import keras_dist as kd
    from keras_dist.multihost import coordination, failure_watch

    coordination.HEARTBEAT_TIMEOUT = float(heartbeat_timeout)
    failure_watch.END_GRACE = float(end_grace)
    if initialize == "1":
        kd.initialize()
    result = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    # A file for each process, since libraries print to standard output in the middle of lines of others.
    with open(os.path.join(directory, os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] + ".json"), "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()

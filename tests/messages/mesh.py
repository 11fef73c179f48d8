"""Texts of `keras_dist/mesh`."""

import keras_dist as kd

CASES = {
    "axes that need more devices than there are": lambda: kd.create_device_mesh("data:3,model:4"),
}

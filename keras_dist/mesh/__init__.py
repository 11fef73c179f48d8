"""Devices, their topology, and meshes of them.

* `axes.py`: parses the names and sizes of mesh axes, in every form.
* `devices.py`: the devices of the program, attached or simulated.
* `mock_devices.py`: mock devices, for meshes of clusters that are not attached.
* `tpu_generations.py`: the device kinds, slices and tori of TPU generations.
* `topology.py`: the links between devices, and the order of devices in a mesh.
* `device_mesh.py`: `DeviceMesh` and `create_device_mesh`.
* `render.py`: the device at each position of a mesh, as text and HTML.
* `compat.py`: the mesh APIs of datarax, artifex and eformer.
"""

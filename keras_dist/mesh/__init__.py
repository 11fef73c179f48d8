"""Devices, their topology, and meshes of them.

* `axes.py`: names and sizes of mesh axes, in every form in which they can be given.
* `devices.py`: the devices of this process, and simulated ones.
* `tpu_generations.py`: the generations of TPUs: device kinds, and sizes and dimensions of their slices.
* `cpu_threads.py`: the number of threads for simulated CPU devices.
* `mock_devices.py`: devices that are described only, for meshes of absent hardware.
* `topology.py`: the links between devices, and the order of devices that suits them.
* `device_mesh.py`: `DeviceMesh`, and the ways to make one.
* `render.py`: which device is where in a mesh, as text and HTML.
* `compat.py`: the mesh APIs of datarax, artifex and eformer.
"""

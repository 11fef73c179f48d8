"""Devices to compile for, from mock compilers and, where they are installed, from real ones."""

import dataclasses
import os
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from support.compilers import needs_cuda, needs_libtpu
from support.new_process import run

import keras_dist as kd
from keras_dist._report import install_advice
from keras_dist._report.install_advice import install_command
from keras_dist.planning.hardware.registry import hardware
from keras_dist.planning.targets import target as module
from keras_dist.planning.targets.target import Target, target


@pytest.fixture
def registered():
    """Registers hardware for one test."""
    before = dict(hardware._entries)
    yield lambda name, of, replace=False, **changes: hardware.register(
        dataclasses.replace(hardware[of], name=name, **changes), replace=replace
    )
    hardware._entries.clear()
    hardware._entries.update(before)


@pytest.fixture
def compilers(monkeypatch):
    """Mocks both compilers for one test: they answer what the test sets, and record requests."""
    module._compile_only_target.cache_clear()
    asked = SimpleNamespace(answer=None, calls=[], environments=[])

    def get_topology_desc(**options):
        asked.calls.append(options)
        asked.environments.append(dict(os.environ))
        if isinstance(asked.answer, Exception):
            raise asked.answer
        return SimpleNamespace(devices=kd.mock_gpus(1, 2))

    monkeypatch.setattr(module.topologies, "get_topology_desc", get_topology_desc)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: "0.1")
    for name in module._LIBTPU_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    yield asked
    module._compile_only_target.cache_clear()


class TestCpu:
    @pytest.mark.multiprocess
    def test_jax_starts_with_as_many_devices_as_the_target_has(self):
        done = run("import keras_dist as kd, jax; print(len(kd.target('cpu:6')), jax.device_count('cpu'))")
        assert done.stdout == "6 6\n", done.stderr

    @pytest.mark.multiprocess
    def test_simulated_devices_are_kept(self):
        code = (
            "import keras_dist as kd, jax; kd.simulate_devices(5); print(len(kd.target('cpu:2')), jax.device_count())"
        )
        assert run(code).stdout == "2 5\n"

    def test_target_is_the_first_devices_of_this_process(self):
        four = target("cpu:4")
        assert list(four) == jax.devices("cpu")[:4]
        assert four == target("cpu:4")
        assert four.hardware.name == "cpu"

    def test_devices_share_the_memory_of_this_machine(self):
        memory = target("cpu:1").hardware.memory_bytes
        assert memory == target("cpu:8").hardware.memory_bytes
        assert memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8

    def test_more_than_jax_started_with_are_refused(self):
        with pytest.raises(ValueError, match=r"'cpu:9' needs 9 CPU devices.* with 8\."):
            target("cpu:9")

    def test_a_shape_is_refused(self):
        with pytest.raises(ValueError, match="'cpu:2x4'"):
            target("cpu:2x4")

    def test_mesh_accepts_a_target_as_devices(self):
        mesh = kd.create_device_mesh("data:2,model:2", devices=target("cpu:4"))
        assert mesh == kd.create_device_mesh("data:2,model:2", devices=jax.devices("cpu")[:4])
        assert kd.DeviceMesh((4,), ["data"], devices=target("cpu:4")).devices.size == 4


def test_target_is_a_sequence_with_a_short_repr():
    devices = tuple(kd.mock_tpus("v5e:2x2", slices=2))
    made = Target("v5e:2x2", hardware["v5e"], devices, 2)
    assert len(made) == 8
    assert made[-1] is devices[-1]
    assert made[:2] == devices[:2]
    assert repr(made) == "<Target v5e:2x2 x 2 slices: 8 TPU v5 lite devices, 15.75 GiB each>"
    assert repr(Target("cpu:1", hardware["cpu"], devices[:1])) == "<Target cpu:1: 1 TPU v5 lite device>"


def test_pickled_target_has_the_devices_of_the_process_that_loads_it():
    assert pickle.loads(pickle.dumps(target("cpu:4"))) == target("cpu:4")


@pytest.mark.parametrize("name", ["v5e", "v5e:", "v5e:0x4", "v5e:4x", "v5e:axb", "v5e:2x2x2x2", "h100:-1", "", "4x4"])
def test_names_of_another_form_are_refused(name):
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        target(name)


def test_unknown_hardware_lists_the_known():
    with pytest.raises(ValueError, match=r"'v9' in target 'v9:2x2'. Use one of v2, .*b200, .*cpu"):
        target("v9:2x2")


@pytest.mark.parametrize(
    ("name", "slices", "message"),
    [
        ("v5e:4x4", 0, "slices=0"),
        ("h100:8", 2, r"slices=2 for target 'h100:8'"),
        ("cpu:8", 2, "slices=2 for target 'cpu:8'"),
        ("v5e:6", 1, "6 chips"),
        ("v5litepod-12", 1, "12 chips"),
        ("v6e:2x2x2", 1, "'v6e:2x2x2'"),
        ("v5e:3x5", 1, "no slice 'v5e:3x5'.*'v5e:4x4'"),
        ("v5p:2x3x4", 1, "no slice 'v5p:2x3x4'.*'v5p:2x2x4'"),
        ("v5e:32x8", 1, "16x16 chips"),
        ("v5p:16x24x24", 1, "8960 chips"),
        ("h100:2x2x2", 1, "3 sizes"),
    ],
)
def test_unavailable_shapes_are_refused_before_a_compiler_is_asked(name, slices, message, compilers):
    with pytest.raises(ValueError, match=message):
        target(name, slices)
    assert compilers.calls == []


def test_arguments_of_other_types_are_refused():
    with pytest.raises(TypeError, match="got 5"):
        target(5)
    for slices in (2.0, True):
        with pytest.raises(TypeError, match=f"got {slices}"):
            target("v5e:4x4", slices)


class TestCompilers:
    """Requests to the compilers and their answers, with mock compilers."""

    def test_missing_compiler_names_the_extra_to_install(self, compilers, monkeypatch, tmp_path):
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
        monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
        monkeypatch.setattr(install_advice, "_DRIVER_FILE", tmp_path / "absent")
        for name, extra in {"v5e:2x4": "tpu", "h100:3": "cuda13", "v100:2": "cuda12"}.items():
            with pytest.raises(ValueError, match=re.escape(install_command(extra))):
                target(name)

    def test_plugin_of_another_version_is_named(self, compilers):
        compilers.answer = NotImplementedError("topology not implemented for cuda")
        with pytest.raises(ValueError, match=r"'h100:8'.* jax_cuda12_plugin 0\.1 "):
            target("h100:8")

    def test_refusal_of_the_compiler_has_the_target_and_the_reason(self, compilers):
        compilers.answer = jax.errors.JaxRuntimeError("INVALID_ARGUMENT: not divisible\nmore")
        with pytest.raises(ValueError, match="'v5e:4x4': INVALID_ARGUMENT: not divisible"):
            target("v5e:4x4")

    def test_lock_of_another_process_names_the_variable(self, compilers):
        compilers.answer = jax.errors.JaxRuntimeError("ABORTED: accessing libtpu multi-process lockfile")
        with pytest.raises(ValueError, match="ALLOW_MULTIPLE_LIBTPU_LOAD=1"):
            target("v5e:2x2")

    def test_requests_to_libtpu(self, compilers):
        target("v5e:1x4", slices=3)
        target("v4:4x4x4")
        target("v5p:2x2x2")
        assert [{**call, "platform": None} for call in compilers.calls] == [
            {"platform": None, "topology_name": "v5e:1x4", "chips_per_host_bounds": (1, 2, 1), "num_slices": 3},
            {"platform": None, "topology_name": "v4:4x4x4", "chip_config_name": "megacore"},
            {"platform": None, "topology_name": "v5p:2x2x2"},
        ]

    def test_gpu_hosts_are_slices_of_one_host(self, compilers):
        target("h100:2x8")
        target("h100:4")
        assert [call["topology"] for call in compilers.calls] == ["2x1x8", "1x1x4"]
        assert "device_memory_size: 84942979072" in compilers.calls[0]["target_config"]

    def test_many_gpus_without_a_number_of_hosts_cause_a_warning(self, compilers):
        with pytest.warns(UserWarning, match=r"'h100:16' .*'h100:1x16'.*'h100:2x8'"):
            target("h100:16")
        target("h100:1x16")
        assert [call["topology"] for call in compilers.calls] == ["1x1x16", "1x1x16"]
        with pytest.warns(UserWarning, match=r"'l4:9' .*PCIe"):
            target("l4:9")

    def test_nvlink_joins_the_gpus_of_a_rack(self, compilers):
        target("gb200:72")
        with pytest.warns(UserWarning, match=r"'gb200:144' .*'gb200:2x72'"):
            target("gb200:144")

    def test_bridges_join_pairs_only(self, compilers):
        target("h100-nvl:2")
        target("a100-pcie:4x2")
        with pytest.warns(UserWarning, match=r"'a100-pcie:4' .*pairs"):
            target("Standard_NC96ads_A100_v4")

    @pytest.mark.parametrize(
        ("name", "capability", "threads", "links"),
        [
            ("t4", "major: 7 minor: 5 }", 1024, 0),
            ("a100-40gb", "major: 8 minor: 0 }", 2048, 12),
            ("l4", "major: 8 minor: 9 }", 1536, 0),
            ("h100", "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }", 2048, 18),
            ("rtx-pro-6000", "major: 12 minor: 0 feature_extension: ACCELERATED_FEATURES }", 1536, 0),
        ],
    )
    def test_description_of_a_gpu_follows_its_generation(self, name, capability, threads, links, compilers):
        target(f"{name}:2")
        text = " ".join(compilers.calls[0]["target_config"].split())
        assert f"cuda_compute_capability {{ {capability}" in text
        assert f"threads_per_core_limit: {threads} " in text
        assert f"active_links: {links} " in text

    def test_assemblers_that_are_too_new_are_named(self, compilers, monkeypatch):
        def refused(*_, **__):
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: /usr/bin/ptxas ptxas too old.")

        monkeypatch.setattr(module.jax, "jit", refused)
        monkeypatch.setattr(module.jax.sharding, "SingleDeviceSharding", lambda device: None)
        target("t4:2")
        with pytest.raises(ValueError, match=r"'v100:2': XLA uses /usr/bin/ptxas.* 7\.0 .*nvidia-cuda-nvcc-cu12"):
            target("v100:2")

    def test_registered_tpus_are_compiled_for_like_their_device_kind(self, compilers, registered):
        slow = registered("v5e-slow", "v5e", network_bytes_per_second=1e9)
        assert target("v5e-slow:2x2").hardware is slow
        assert compilers.calls[0]["topology_name"] == "v5e:2x2"

    def test_targets_are_cached_until_their_figures_change(self, compilers, registered):
        first = target("h100:8")
        assert target("h100:8") is first
        assert target("h100:4") is not first
        registered("h100", "h100", replace=True, memory_bytes=2**30)
        assert target("h100:8").hardware.memory_bytes == 2**30
        assert "device_memory_size: 1073741824" in compilers.calls[-1]["target_config"]

    def test_libtpu_loads_in_its_own_environment(self, compilers, monkeypatch):
        monkeypatch.setattr(module.glob, "glob", lambda pattern: [])
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "of the user")
        before = dict(os.environ)
        target("v5e:2x2")
        assert dict(os.environ) == before
        ours = {name: compilers.environments[0].get(name) for name in module._LIBTPU_ENVIRONMENT}
        assert ours == module._LIBTPU_ENVIRONMENT | {"TPU_WORKER_HOSTNAMES": "of the user"}

    def test_environment_is_restored_after_a_refusal(self, compilers, monkeypatch):
        monkeypatch.setattr(module.glob, "glob", lambda pattern: [])
        compilers.answer = jax.errors.JaxRuntimeError("INVALID_ARGUMENT")
        before = dict(os.environ)
        with pytest.raises(ValueError, match="INVALID_ARGUMENT"):
            target("v5e:2x2")
        assert dict(os.environ) == before

    def test_environment_is_unchanged_if_tpus_are_attached(self, compilers, monkeypatch):
        monkeypatch.setattr(module.glob, "glob", lambda pattern: ["/dev/accel0"])
        before = dict(os.environ)
        target("v5e:2x2")
        assert compilers.environments == [before]

    def test_device_kinds_unknown_to_libtpu_are_refused(self, compilers, registered):
        registered("v99", "v5e", device_kind="TPU v99")
        with pytest.raises(ValueError, match=r"'TPU v99' of target 'v99:2x2'.*TPU v2, "):
            target("v99:2x2")

    def test_gpus_without_compiler_target_are_refused(self, compilers, registered):
        registered("mystery", "h100", compiler_target=None)
        with pytest.raises(ValueError, match=r"'mystery:8'.*compiler_target"):
            target("mystery:8")


@pytest.mark.compiler
@needs_libtpu
class TestLibtpu:
    @pytest.mark.parametrize(
        ("name", "slices", "devices", "hosts"),
        [
            ("v5e:4x4", 1, 16, 4),
            ("v5e:4x4", 2, 32, 8),
            ("v5p:2x2x2", 1, 8, 2),
            ("v6e:4x4", 1, 16, 4),
            ("v2:2x2", 1, 8, 1),
            ("v3:4x4", 1, 32, 4),
            ("v4:2x2x1", 1, 4, 1),
            ("tpu7x:2x2x1", 1, 8, 1),
            ("v5e:1x1", 1, 1, 1),
            ("v5p:1x1x1", 1, 1, 1),
            ("v6e:1x2", 1, 2, 1),
        ],
    )
    def test_every_tpu_generation_is_available(self, name, slices, devices, hosts):
        made = target(name, slices)
        assert len(made) == devices
        assert len({device.process_index for device in made}) == hosts
        assert {hardware.of_device(device) for device in made} == {made.hardware}
        assert target(name, slices) is made

    def test_devices_have_the_coordinates_of_mock_devices(self):
        attributes = ("id", "platform", "device_kind", "process_index", "coords", "core_on_chip")
        for name, slices in (("v4:4x4x4", 1), ("v5e:4x4", 2)):
            real, described = target(name, slices), kd.mock_tpus(name, slices)
            for attribute in attributes:
                convert = list if attribute == "coords" else lambda value: value
                expected = [convert(getattr(device, attribute)) for device in described]
                assert [getattr(device, attribute) for device in real] == expected

    def test_meshes_of_the_same_target_are_equal(self):
        meshes = [kd.create_device_mesh("data:4,model:4", devices=target("v5e:4x4")) for _ in range(2)]
        assert meshes[0] == meshes[1]
        assert meshes[0].backend_mesh == meshes[1].backend_mesh

    def test_axes_across_slices_cross_the_network(self):
        info = kd.create_device_mesh("data:2,model:16", devices=target("v5e:4x4", 2)).info()
        assert info["longest_link"]["data"].dcn
        assert not info["longest_link"]["model"].dcn

    @pytest.mark.parametrize("name", ["v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"])
    def test_registered_memory_is_what_the_compiler_allots(self, name):
        made = target(f"{name}:2x2")
        sharding = jax.sharding.SingleDeviceSharding(made[0])
        large = jax.ShapeDtypeStruct((2**20, 2**10), "float32", sharding=sharding)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Ran out of memory") as raised:
            jax.jit(lambda *parts: [part + 1 for part in parts]).lower(*[large] * 48).compile()
        allotted = float(re.search(r"(?:available HBM \(| of )([\d.]+)G", str(raised.value))[1])
        # Which libtpu it is makes a difference in the last digit that it prints.
        assert allotted == pytest.approx(made.hardware.memory_bytes / 2**30, abs=0.011)

    def test_two_processes_can_compile_at_once(self):
        code = (
            "from keras_dist.planning.targets.target import target\n"
            "import os, sys\n"
            "before = dict(os.environ)\n"
            "print(len(target('v5e:2x2')), flush=True)\n"
            "sys.stdin.read()\n"
            "assert {**os.environ, 'TPU_LIBRARY_PATH': ''} == {**before, 'TPU_LIBRARY_PATH': ''}\n"
        )
        environment = {key: value for key, value in os.environ.items() if key not in module._LIBTPU_ENVIRONMENT}
        environment["JAX_PLATFORMS"] = "cpu"
        both = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        lines = [process.stdout.readline() for process in both]  # each has loaded libtpu, and neither has ended
        errors = [process.communicate("")[1] for process in both]
        assert lines == ["4\n", "4\n"], errors
        assert [process.returncode for process in both] == [0, 0], errors


@pytest.mark.compiler
@needs_cuda
class TestCuda:
    @pytest.mark.parametrize(
        ("name", "devices", "hosts"),
        [
            ("h100:2x8", 16, 2),
            ("h100:1", 1, 1),
            *(
                (f"{name}:2", 2, 1)
                for name, entry in hardware.items()
                if entry.platform == "gpu" and entry.compiler_target.compute_capability >= (7, 5)
            ),
        ],
    )
    def test_every_gpu_is_available(self, name, devices, hosts):
        made = target(name)
        assert len(made) == devices
        assert len({device.process_index for device in made}) == hosts
        assert {device.device_kind for device in made} == {made.hardware.device_kind}
        assert hardware.of_device(made[0]) is made.hardware
        assert target(name) is made

    def test_registered_gpus_are_identified_by_their_devices(self, registered):
        more = registered("my-h100", "h100", memory_bytes=96 * 2**30)
        made = target("my-h100:4")
        assert made.hardware is more
        assert hardware.of_device(made[0]) is more
        assert hardware.of_device(target("h100:8")[0]) is hardware["h100"]
        assert repr(made).startswith("<Target my-h100:4: 4 NVIDIA H100 80GB HBM3 (my-h100) devices, 96.00 GiB")

    def test_replaced_figures_are_used(self, registered):
        less = registered("h100", "h100", replace=True, memory_bytes=2**30)
        assert hardware.of_device(target("h100:8")[0]) is less

    # One of each compute capability, in CUDA's order: 7.5, 8.0, 8.6, 8.9, 9.0, 10.0, 10.3, 12.0.
    @pytest.mark.parametrize("name", ["t4", "a100", "a10g", "l4", "h100", "b200", "b300", "rtx-pro-6000"])
    def test_a_program_compiles(self, name):
        mesh = jax.sharding.Mesh(list(target(f"{name}:8")), ("data",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        x = jax.ShapeDtypeStruct((1024, 1024), "bfloat16", sharding=sharding)
        compiled = jax.jit(lambda x: (x @ x.T).sum()).lower(x).compile()
        assert "all-reduce" in compiled.as_text()

    @pytest.mark.parametrize("name", ["p100:1", "v100:1"])
    def test_old_gpus_need_the_assembler_of_cuda_12(self, name):
        try:
            device = target(name)[0]
        except ValueError as error:
            assert "ptxas knows compute capability" in str(error)  # noqa: PT017 (which CUDA is installed decides)
            return
        x = jax.ShapeDtypeStruct((64, 64), "float16", sharding=jax.sharding.SingleDeviceSharding(device))
        assert "matmul" in jax.jit(lambda x: x @ x).lower(x).compile().as_text()

    @pytest.mark.parametrize("before", ["", "jax.devices(); "], ids=["first", "after JAX started"])
    def test_cuda_itself_is_not_needed(self, before):
        """The plugin refuses to load without CUDA's libraries, unless a variable is set while it loads."""
        after = "print(len(kd.target('h100:8')), 'JAX_SKIP_CUDA_CONSTRAINTS_CHECK' in os.environ)"
        done = run(f"import os, jax, keras_dist as kd; {before}{after}", JAX_PLATFORMS="")
        assert (done.returncode, done.stdout) == (0, "8 False\n"), done.stderr

    def test_two_hosts_are_joined_by_the_network(self):
        info = kd.create_device_mesh("data:2,model:8", devices=target("h100:2x8")).info()
        assert info["longest_link"]["data"].dcn
        assert not info["longest_link"]["model"].dcn

"""Tables show the device at each position, in a terminal and in a notebook."""

import html.parser

import pytest

import keras_dist as kd


def test_columns_are_along_the_innermost_axis_and_rows_along_all_others():
    assert kd.create_device_mesh("data:2,fsdp:2,model:2").picture() == (
        "data:2 x fsdp:2 x model:2, 8 cpu devices\n"
        "               model=0  model=1\n"
        "data=0 fsdp=0  cpu:0    cpu:1\n"
        "data=0 fsdp=1  cpu:2    cpu:3\n"
        "data=1 fsdp=0  cpu:4    cpu:5\n"
        "data=1 fsdp=1  cpu:6    cpu:7"
    )


def test_a_mesh_of_one_axis_is_one_row():
    assert kd.create_device_mesh("data:2", devices=2).picture() == (
        "data:2, 2 cpu devices\n  data=0  data=1\n  cpu:0   cpu:1"
    )


def test_coordinates_cores_hosts_and_slices_are_shown():
    picture = kd.create_device_mesh("data:2,model:4", kd.mock_tpus("v5e:2x2", slices=2)).picture()
    assert picture.splitlines()[0] == "data:2 x model:4, 8 TPU v5 lite devices, 2 slices, 2 hosts"
    assert "tpu:100000 (0,0,0) host 0 slice 0" in picture
    assert "tpu:200003 (1,1,0) host 1 slice 1" in picture
    cores = kd.create_device_mesh("data:8", kd.mock_tpus("v3:2x2")).picture()
    assert "tpu:0 (0,0,0)/0" in cores
    assert "tpu:1 (0,0,0)/1" in cores
    assert "host" not in cores.splitlines()[2]
    assert "gpu:9 host 1" in kd.create_device_mesh("data:16", kd.mock_gpus(2, 8)).picture()


def test_a_large_mesh_shows_its_first_and_last_devices():
    mesh = kd.create_device_mesh("data:64,model:32", kd.mock_gpus(256, 8))
    table = mesh.picture().splitlines()
    assert len(table) == 2 + 9
    assert table[1].split() == [*(f"model={i}" for i in range(4)), "...", *(f"model={i}" for i in range(28, 32))]
    assert [line.split()[0] for line in table[2:]] == [
        *(f"data={i}" for i in range(4)),
        "...",
        *(f"data={i}" for i in range(60, 64)),
    ]
    assert "gpu:2047 host 255" in table[-1]


class Cells(html.parser.HTMLParser):
    """The text and the background color of each cell of a table."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.color = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        _, _, self.color = (dict(attrs).get("style") or "").partition("background: ")

    def handle_data(self, data):
        if data.strip() and self.lasttag in ("td", "th"):
            self.cells.append((data, self.color))


def test_a_notebook_shows_a_table_with_one_color_per_host_or_slice():
    mesh = kd.create_device_mesh({"a<b": 4, "model": 4}, kd.mock_gpus(4, 4))
    cells = Cells(mesh._repr_html_()).cells
    assert ("a<b=0", "") in cells
    assert len([cell for cell in cells if cell[0].startswith("gpu:")]) == 16
    assert len({color for _, color in cells if color}) == 4
    slices = Cells(kd.create_device_mesh("data:4,model:4", kd.mock_tpus("v5e:2x4", slices=2))._repr_html_()).cells
    assert len({color for _, color in slices if color}) == 2
    large = Cells(kd.create_device_mesh("data:64,model:32", kd.mock_gpus(256, 8))._repr_html_()).cells
    assert ("...", "") in large


def test_devices_that_are_not_available_cannot_be_shown():
    with pytest.raises(ValueError, match="No devices of type 'tpu'"):
        kd.DeviceMesh("data:2", devices=["tpu:0", "tpu:1"]).picture()

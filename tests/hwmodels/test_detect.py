"""What the system says becomes a proposal, and what it does not say is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tierplan.cli import main
from tierplan.hwmodels import detect, load_description
from tierplan.hwmodels.catalog import catalog_names
from tierplan.hwmodels.detect import ask_system, pci_devices, propose
from tierplan.hwmodels.importers.nvidia_smi import known_part, read_nvidia_topo, switch_groups
from tierplan.hwmodels.importers.reading import ImportedFileError

TOPO = """
	GPU0	GPU1	GPU2	GPU3	CPU Affinity	NUMA Affinity
GPU0	 X 	PIX	SYS	SYS	0-15	0
GPU1	PIX	 X 	SYS	SYS	0-15	0
GPU2	SYS	SYS	 X 	PXB	16-31	1
GPU3	SYS	SYS	PXB	 X 	16-31	1

Legend:
  X    = Self
"""
DESKTOP = {
    "lspci": "00:02.0 VGA compatible controller: Intel Corporation UHD Graphics 770\n"
    "01:00.0 VGA compatible controller: NVIDIA Corporation AD102 [GeForce RTX 4090] (rev a1)\n",
    "lsblk": json.dumps(
        {"blockdevices": [{"name": "nvme0n1", "model": "Samsung SSD 990 PRO 2TB", "size": 2e12, "tran": "nvme"},
                          {"name": "sda", "model": "WDC", "size": 1, "tran": "sata"}]}
    ),
    "lscpu": "Core(s) per socket:  16\nSocket(s):  1\n",
    "meminfo": "MemTotal:       65536000 kB\n",
}  # fmt: skip


def test_a_desktop_is_found_in_the_catalog() -> None:
    found = propose(DESKTOP)
    assert found.base == "desktop-4090"
    said = {name: quantity.value for name, quantity in found.values.items()}
    assert (said["gpu.part"], said["nvme.part"], said["nvme.drives"]) == ("rtx-4090", "990-pro", 1.0)
    assert (said["host.cores"], said["host.capacity"]) == (16.0, 65536000 * 1024.0)
    unknown = "\n".join(found.unknown)
    assert "nvidia-smi: not installed" in unknown
    assert "host.adam: the optimizer on the host; run: tierplan machine measure" in unknown


def test_a_server_is_proposed_for_a_servers_cards() -> None:
    smi = "name, memory.total [MiB]\n" + 8 * "NVIDIA H100 80GB HBM3, 81559 MiB\n"
    found = propose({"nvidia-smi": smi, "nvidia-smi topo": TOPO, "meminfo": "MemTotal: 2000000000 kB\n"})
    assert found.base == "server-8xh100"
    assert found.values["link.p2p_path"].value == "pcie"
    assert "limit of the [[switch]] with GPU 0, GPU 1" in found.unknown


def device(kind: str, node: str, *links: tuple[str, str, str]) -> dict[str, object]:
    return {"kind": kind, "node": node, "links": links}


def test_slots_shared_links_and_numa_nodes_come_from_the_kernel() -> None:
    root, up, down = ("0000:00:02.1", "32.0", "4"), ("02:00.0", "16.0", "4"), ("03:00.0", "16.0", "4")
    drives = [device("nvme", "0", ("04:00.0", "16.0", "4"), down, up, root) for _ in range(2)]
    gpu = device("gpu", "1", ("01:00.0", "16.0", "16"), ("0000:00:01.0", "32.0", "16"))
    found = propose({"pci": json.dumps([gpu, *drives])})
    assert [(s.members, s.limit) for s in found.switches] == [(("nvme",), pytest.approx(0.8 * 4 * 1.969e9))]
    assert "nvme.slot" not in found.values
    assert any("NUMA nodes have nvme on 0; gpu0 on 1" in text for text in found.unknown)
    slow = device("nvme", "0", ("04:00.0", "16.0", "4"), ("0000:00:1b.0", "8.0", "4"))
    found = propose({"pci": json.dumps([slow])})
    assert found.values["nvme.slot"].value == pytest.approx(0.8 * 4 * 0.985e9)
    assert "limit of the [[switch]] chipset with nvme" in found.unknown


@pytest.mark.parametrize("port", [("00:01.0", "Unknown", "255"), ("00:01.0", "16.0", "0"), ("00:01.0", "Unknown", "4")])
def test_a_virtual_machines_ports_say_nothing_of_links(port: tuple[str, str, str]) -> None:
    drives = [device("nvme", "0", ("04:00.0", "16.0", "4"), port, port, port) for _ in range(2)]
    found = propose({"pci": json.dumps(drives)})
    assert "nvme.slot" not in found.values
    assert not found.switches
    assert "limit of the [[switch]] 00:01.0 with nvme, nvme" in found.unknown


def test_devices_are_read_as_the_kernel_lists_them(tmp_path: Path) -> None:
    says = {"class": "0x010802", "vendor": "0x144d", "numa_node": "0", "max_link_speed": "16.0 GT/s PCIe"}
    port = tmp_path / "pci0000:00" / "0000:00:01.0"
    listed = tmp_path / "devices"
    for at in (port, port / "0000:01:00.0", listed):
        at.mkdir(parents=True)
    for at in (port, port / "0000:01:00.0"):
        for name, text in {**says, "max_link_width": "4", "class": "0x060400" if at == port else "0x010802"}.items():
            (at / name).write_text(f"{text}\n")
        (listed / at.name).symlink_to(at)
    assert json.loads(pci_devices(listed)) == [
        {"kind": "nvme", "node": "0", "links": [["0000:01:00.0", "16.0", "4"], ["0000:00:01.0", "16.0", "4"]]}
    ]
    (port / "0000:01:00.0" / "numa_node").unlink()
    assert json.loads(pci_devices(listed))[0]["node"] == "-1", "a kernel without NUMA has no such file"


def test_a_command_that_hangs_is_as_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = r"""[ "$LC_ALL" = C ] && printf 'Socket(s): 1\n\377\n' || echo 'Sockel: 1'"""
    for name, text in {"nvidia-smi": "exec sleep 60", "lscpu": says}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "lspci").write_text("no program")
    (tmp_path / "lspci").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(detect, "MOST_S", 0.5)
    said = ask_system()
    assert not {"nvidia-smi", "nvidia-smi topo", "lspci"} & said.keys()
    assert said["lscpu"].startswith("Socket(s): 1")


def test_an_unknown_drive_and_no_gpu_are_said() -> None:
    disks = {"blockdevices": [{"name": "nvme0n1", "model": "ACME Fast", "size": 1e12, "tran": "nvme"}]}
    assert "host.cores: cores of the CPUs; run: tierplan machine measure" in propose({}).unknown
    unknown = "\n".join(propose({"lsblk": json.dumps(disks)}).unknown)
    assert "gpu.part: no GPU of the catalog" in unknown
    assert "nvme.part: ACME Fast is not in the catalog" in unknown
    assert "nvme.write: the drives' writes" in unknown
    assert not any(key.startswith("nvme.") for key in propose({"lsblk": '{"blockdevices": []}'}).unknown), "it has none"


def test_the_drives_are_those_of_which_there_are_most() -> None:
    """The system's own may come first."""
    models = ["ACME Boot", "Samsung SSD 990 PRO 2TB", "Samsung SSD 990 PRO 2TB"]
    disks = [{"name": f"nvme{k}n1", "model": model, "size": (k + 1) * 1e12} for k, model in enumerate(models)]
    found = propose({"lsblk": json.dumps({"blockdevices": disks})})
    said = [found.values[f"nvme.{key}"].value for key in ("drives", "capacity", "part")]
    assert said == [2.0, 2e12, "990-pro"]
    assert "1 drives of other models: a machine's drives are alike" in found.unknown


@pytest.mark.parametrize(
    "text",
    [
        "name\nNVIDIA GeForce RTX 4090\nNVIDIA GeForce RTX 3060\n",
        "Unable to determine the device handle: GPU is lost\n",
    ],
)
def test_gpus_that_cannot_be_read_leave_the_rest_of_the_machine(text: str) -> None:
    found = propose({**DESKTOP, "nvidia-smi": text})
    assert found.values["nvme.part"].value == "990-pro"
    assert "gpu.count" not in found.values
    assert any(line.startswith("GPUs: nvidia-smi has ") for line in found.unknown)


@pytest.mark.parametrize(
    ("limit", "capacity"), [("max\n", 65536000 * 1024), (f"{2**34}\n", 2**34), (f"{2**62}", 65536000 * 1024)]
)
def test_a_container_has_the_memory_that_it_was_given(limit: str, capacity: int) -> None:
    found = propose({**DESKTOP, str(detect.MEMORY_LIMITS[0]): limit})
    assert found.values["host.capacity"].value == capacity


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super"), ("NVIDIA GeForce RTX 4070 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("GeForce RTX 3090 Ti", "rtx-3090-ti"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"), ("NVIDIA L40S", "l40s"), ("NVIDIA L4", "l4"), ("NVIDIA A10G", "a10g"),
        ("NVIDIA RTX A6000", "rtx-a6000"), ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"), ("Tesla T4", "t4"),
        ("NVIDIA B200", "b200-sxm-180gb"), ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"), ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"), ("NVIDIA H200", "h200-sxm-141gb"), ("NVIDIA GH200 480GB", None),
    ],
)  # fmt: skip
def test_drivers_names_are_parts_of_the_catalog(name: str, part: str | None) -> None:
    assert known_part("gpus", name) == part
    assert part is None or part in catalog_names("gpus")


def test_topologies_say_how_gpus_are_connected() -> None:
    assert read_nvidia_topo(TOPO, where="t")["link.p2p_path"].value == "pcie"
    assert switch_groups(TOPO, where="t") == [(0, 1), (2, 3)]
    nvlink = "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"
    values = read_nvidia_topo(nvlink, where="t")
    assert values["link.p2p_path"].value == "own"
    assert values["link.p2p"].value == pytest.approx(0.8 * 18 * 25e9)
    with pytest.raises(ImportedFileError, match="no matrix of GPUs"):
        read_nvidia_topo("command not found", where="t")


def test_the_command_writes_a_machine_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "box.toml"
    assert main(["machine", "detect", "-o", str(target)]) == 0
    out = capsys.readouterr().out
    assert "nearest machine of the catalog" in out
    assert "could not be found out" in out
    assert load_description(str(target)).name == "box"

"""Other tools' results, one file each: pure functions from their text to values of a machine's description.

    read_fio            fio --output-format=json: drive reads, writes, and both at once
    read_nvbandwidth    nvbandwidth --format json: copies between host and GPU, and between GPUs
    read_nccl_tests     nccl-tests: collectives of several GPUs
    read_nvidia_smi     nvidia-smi --query-gpu=... --format=csv: which GPUs, their memory, power and link
    read_nvidia_topo    nvidia-smi topo -m: NVLink or PCIe between GPUs, and who shares a switch
    gpu_tables          tables of GPUs in public repositories: matmuls, attention and kernels over their size
    read_ds_io          DeepSpeed's ds_io and ds_nvme_tune: drive reads and writes (their GB are GiB)

A file that is damaged, incomplete or of another tool is an `ImportedFileError` that says what is wrong.
"""

from tierplan.hwmodels.importers.ds_io import read_ds_io
from tierplan.hwmodels.importers.fio import read_fio
from tierplan.hwmodels.importers.nccl_tests import read_nccl_tests
from tierplan.hwmodels.importers.nvbandwidth import read_nvbandwidth
from tierplan.hwmodels.importers.nvidia_smi import read_nvidia_smi
from tierplan.hwmodels.importers.nvidia_topo import read_nvidia_topo
from tierplan.hwmodels.importers.reading import ImportedFileError

__all__ = [
    "ImportedFileError",
    "read_ds_io",
    "read_fio",
    "read_nccl_tests",
    "read_nvbandwidth",
    "read_nvidia_smi",
    "read_nvidia_topo",
]

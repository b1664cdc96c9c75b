"""Other tools' results, one file each: pure functions from their text to values of a machine's description.

    fio          fio --output-format=json: drive reads, writes, and both at once
    nvbandwidth  nvbandwidth --format json: copies between host and GPU, and between GPUs
    nccl_tests   nccl-tests: collectives of several GPUs
    nvidia_smi   nvidia-smi: GPUs, their memory, power and link; topo -m: NVLink or PCIe between them, and switches
    ds_io        DeepSpeed's ds_io and ds_nvme_tune: drive reads and writes (their GB are GiB)
    reading      what they share: JSON that may be damaged, and numbers that must be there

A file that is damaged, incomplete or of another tool is an `ImportedFileError` that says what is wrong.
"""

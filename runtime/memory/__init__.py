"""Where bytes lie:

arena         host memory for file I/O and copies: page-aligned, pinned, reused
freed_memory  freed tensors on the CPU keep their pages; Python searches new objects alone
files         the operations on files that a run must not lose, each named when it fails
tier_file     the file in one folder of the NVMe tier: locked, reserved, marked as ours
store         the NVMe tier: extents of those files, checked by checksums
striping      one address space over several drives
"""

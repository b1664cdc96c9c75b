"""Where bytes lie:

arena         host memory for file I/O and copies: page-aligned, pinned, reused
freed_memory  freed tensors on the CPU keep their pages
store         the NVMe tier: extents of preallocated files, read and written with O_DIRECT
striping      one address space over several drives
"""

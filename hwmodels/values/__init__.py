"""What goes in and out, the same in every room, which is why it lies in the lowest one.

units      amounts with units as people write them: "256 GiB", "6.5 GB/s"
records    records in files, read strictly, with the place and the value in errors
arguments  arguments of public functions, checked against their annotations
extras     which extra of the installation brings a package that is not there
shown      how things show themselves in a notebook
"""

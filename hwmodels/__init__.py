"""Machines: what hardware can do, from a catalog, from other tools' output, or measured here. In reading order:

names        names of tiers and streams: made and parsed in one place
values       what goes in and out of every room: amounts, records and arguments are read and checked, results shown
machine      tiers, streams with rates, shared limits, and what an op costs: all that simulator and planner need
description  a machine's keys and the parts it has, every number with its source; read and written as TOML
build        turns a description into a machine
scaling      machines like a given one, with more memory or other rates
curves       what kernels reach: GPUs' by measured tables or a relative's, with errors; the host's by its cores
catalog      finds descriptions: in the catalog, in a file, or as measured here
detect       what this machine is, by what its system says
community    measured rates that people share: small anonymous files
importers    turn other tools' output into values of a description
"""

from tierplan.hwmodels.catalog import catalog_names, load_description, load_machine
from tierplan.hwmodels.description import Description, Quantity
from tierplan.hwmodels.machine import Machine, MachineError

__all__ = [
    "Description",
    "Machine",
    "MachineError",
    "Quantity",
    "catalog_names",
    "load_description",
    "load_machine",
]

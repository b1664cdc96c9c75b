"""Machines: what hardware can do, from a catalog, from other tools' output, or measured here. In reading order:

names        of tiers and streams: made and parsed in one place
machine      tiers, streams with rates, and shared limits: all that simulator and planner see
costs        what one op costs alone, and what it takes of shared limits
units        amounts with units as people write them: "256 GiB", "6.5 GB/s"
keys         what a machine file may say, as one table
description  the parts of a machine, every number with its source; read and written as TOML
build        from a description to the machine
    scaling      machines like a given one, with more memory or other rates
catalog      where descriptions are found
importers    other tools' results as values of a description
"""

from tierplan.hwmodels.catalog import catalog_names, load_description, load_machine
from tierplan.hwmodels.costs import Cost
from tierplan.hwmodels.description import Description, Quantity
from tierplan.hwmodels.machine import Machine, MachineError, Rate, SharedLimit, Stream, TierSpec

__all__ = [
    "Cost",
    "Description",
    "Machine",
    "MachineError",
    "Quantity",
    "Rate",
    "SharedLimit",
    "Stream",
    "TierSpec",
    "catalog_names",
    "load_description",
    "load_machine",
]

"""Machines: what hardware can do, from a catalog, from other tools' output, or measured here."""

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

"""Packages that not every installation has, and which extra of tierplan brings each.

except ImportError as error:
    raise RuntimeError(words_of_missing(error, "a table")) from error
"""

from __future__ import annotations

EXTRAS = {
    "torch": "runtime",
    "transformers": "runtime",
    "safetensors": "runtime",
    "xxhash": "runtime",
    "accelerate": "runtime",
    "peft": "adapters",
    "pandas": "notebook",
    "ipywidgets": "notebook",
    "distributed": "cluster",
}


def words_of_missing(error: ImportError, what: str = "this") -> str:
    """What the user asked for needs a package that is not installed, and the extra that brings it.

    Raises the error itself where it is about anything else.
    """
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in EXTRAS:
        raise error
    return what_brings(package, what)


def what_brings(package: str, what: str = "this") -> str:
    """The same of a package by its name."""
    return f"{what} needs {package}, which is not installed; install tierplan[{EXTRAS[package]}]"

"""The global norm of all gradients, from those of parameters or of what ranks have of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tierplan.runtime.optim.adam import NonFiniteGradientError
from tierplan.runtime.ranks.group import Ranks


def global_norm(
    own: Sequence[tuple[int, torch.Tensor]], num_parameters: int, ranks: Ranks | None, step: int, dtype: torch.dtype
) -> torch.Tensor:
    """Of norms (`dtype`) by position in the model; with `ranks`, of those of all, by parameter and then by rank.

    A rank that updates nothing has no norm of its own.
    """
    norms = dict(own)
    if ranks is None:
        parts = torch.stack([norms[k] for k in sorted(norms)])
    else:
        rows = ranks.share([norms[k].item() if k in norms else -1.0 for k in range(num_parameters)], "norms")
        each = [row[k] for k in range(num_parameters) for row in rows if row[k] != -1.0]
        parts = torch.tensor(each, dtype=dtype)
    total = torch.linalg.vector_norm(parts, 2.0)
    if not torch.isfinite(total):
        raise NonFiniteGradientError(
            f"the global norm of the gradients is {total.item()} in step {step}; no update was made and the "
            "last committed step is intact. Lower the learning rate, or look at the data of this step"
        )
    return total

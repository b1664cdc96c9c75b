"""What the process has loaded from which ranks of tests are forked (`pair`)."""

import sys

import torch  # noqa: F401

sys.modules["torchao"] = None  # type: ignore[assignment]  # transformers would load it where it is: two seconds
import transformers.modeling_utils  # noqa: E402, F401

import tierplan.runtime.trainer  # noqa: E402, F401

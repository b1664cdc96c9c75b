"""tierplan: plan, simulate and run the training of transformers that do not fit into memory."""

__version__ = "0.1.0"

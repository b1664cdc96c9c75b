"""Closed forms of model families. To add a family, write `embed`, `block` and `head` with a `Tape`'s operations.

slices  what a unit does, recorded, and the operations that lead to a dropped tensor
tape    records operations: amounts, saved tensors, live memory
ops     operations of transformers, as PyTorch runs them
units   from recorded tapes to the units of a workload
gpt2    GPT-2
opt     OPT
llama   Llama, Mistral, Qwen, Gemma, Phi and others of its kind
bert    BERT
qwen    Qwen, the first of its name
"""

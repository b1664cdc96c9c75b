"""Exact workloads from a model's own class, run on fake tensors:

models   from a config to a model and its inputs
backend  makes fake tensors take the operations of a real CPU or CUDA step
record   what one unit does: operations, saved tensors, live memory
trace    the workload
"""

"""The engine once more, compiled and on columns: what SimPy says, to the nanosecond, a hundred times faster.

For whoever asks about thousands of schedules and wants times, peaks and what is short, not traces. In reading order:

    graph_columns  a schedule in numbers: all that the four rules fix before time starts
    rules          the four rules, with shared limits: when each op starts and ends
    readiness      the order in which ops start when memory goes to any ready op, or are wanted at given moments
    simulation     what ops cost, and a schedule executed on a machine
    compiler       numba, or plain Python where it is missing
"""

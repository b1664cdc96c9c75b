"""The shared language and its simulator. The core has four files, to read first and in this order. What the four rules
fix before time starts is in the fields of `compiled.graph_columns.GraphColumns`; how they are derived can wait.

    schedule       the language: tiers, buffers, ops, and what makes a schedule valid
    sharing        how streams divide a limit that they share
    engine         SimPy executes the schedule
    trace          what happened: the same record from the simulator and from the runtime

Around it:

    schedule_file  the schedule as JSON
    step           what a schedule trains, for the runtime
    digest         the fingerprint (SHA-256) of a workload, machine or schedule
    builder        how lowerings write a schedule: names, versions, list order
    ranks          what one of several devices does, which do alike
    columns        a schedule as arrays, for whoever makes or executes thousands of them
    contents       what buffers hold and how ops are called, as records and as text
    pricing        what every op costs on a machine

The folders:

    workloads      one training step of a model as amounts: operations, bytes, saved tensors
    compiled       the engine once more, on columns and compiled, for those who ask about thousands of schedules
    analysis       what a simulation says: steady step time, completion, order, causes, variation
    output         how results are drawn and written
"""

"""The shared language and its simulator. The core, to read first and in this order, has under 1,000 lines:

    schedule        the language: tiers, buffers, ops, and what makes a schedule valid
    graph           a schedule in numbers: all that the four rules fix before time starts
    engine          SimPy executes it; `sharing` divides what streams share
    trace           what happened: the same record from the simulator and from the runtime

Around it:

    workload        one training step of a model as amounts; `models` makes it from a config by the closed forms of
                    `families`; `training_files` reads settings that people have
    pricing         what every op costs on a machine
    steady          the step time of steps in a row; `evaluator` without simulating; `variation` with drawn rates
    completion      whether a schedule completes, without time, and what is short if not
    ordering        a better list order, from a first simulation
    explain         why a step takes as long as it does; `plots` and `perfetto` draw it
    schedule_file   the schedule as JSON
    parts           how optimizer states are cut that travel piece by piece
"""

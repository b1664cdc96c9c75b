"""Golden results: what schedules, step times and losses were when `golden.json` was written.

    scenarios   what is scheduled and simulated: policies, plans made by hand, the planner
    trainings   what is trained: a tiny model, a few steps
    results     recomputes both as JSON values, and says how two sets of them differ
    regenerate  writes `golden.json`, or prints what a scenario's hash is taken over

A change that is to leave results as they are is checked by `tests/test_golden.py`. One that changes them on purpose
regenerates the file, and the diff shows which scenarios it touched.
"""

"""One run beside its prediction:

run_folder   what `tierplan plan` and `tierplan run` leave behind
same_plan    whether a trace is of the schedule that it is compared with
steps        a trace of several steps, cut into steps
compare      signed errors by step, stream and tier
causes       which ops the difference comes from, by simulating again with measured durations, and why they took longer
words        how slow the machine was in the run, the largest causes, and what to do next
"""

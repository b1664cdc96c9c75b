"""Questions to a schedule, each answered with the four rules:

completion  whether it completes, without time, and what is short if not
ordering    a better list order, from a first simulation
steady      the step time of steps in a row
explain     what each stream waited for, the critical path, and what would help
variation   how far the step time may be off, given how far measured rates scatter
"""

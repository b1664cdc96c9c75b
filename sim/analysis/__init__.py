"""Questions about a schedule, each answered with the four rules:

completion  does it complete, and what is short if not? without durations
ordering    a better list order, from a first simulation
steady      the step time in steady state
explain     what each stream waited for, the critical path, and what limits
phases      seconds of forward, backward and update, as training logs report them
variation   how far the step time may be off, given the spread of measured rates
"""

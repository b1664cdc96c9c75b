"""Is my slow step normal, and what should I change first?

measured   what somebody measured: seconds, a DeepSpeed log, a trace of PyTorch's profiler
setups     a setup of training, and what in it costs time
explain    what the step should take, where the difference lies, what the machine could do
text       the explanation for people
"""

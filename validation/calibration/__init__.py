"""What a machine does inside a training step, from short trainings of a small model on it. In reading order:

budgets       memory budgets for a plan, from roomy to tight
plans         the six plans of a calibration run
session       a calibration run: the calibration model, trained under six plans in turns
measurements  one plan's turns as figures: seconds by op, without outliers, and over those in the profile
dispatch      dispatch latency: how long after its inputs and its stream are free an op begins
rates         rates, latencies and contention of streams, fitted to measured ops
calibration   all of these as factors over the machine's description, and how far predictions from them are off
transfer      each model predicted from the calibrations of others
known         calibrations in files, and which of them suits a question
"""

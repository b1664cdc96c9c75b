"""Predictions beside what was measured, here or by others:

comparison   one run beside its prediction, op by op
report       the comparison as a page
calibration  rates and contention inside a training step, from short runs of a small model
campaign     many configurations, predicted and run
published    figures of publications beside predictions
demo         the whole chain in two minutes
"""

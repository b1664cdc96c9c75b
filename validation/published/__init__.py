"""Figures of publications beside predictions:

workloads  workloads from what a publication says of its model
reproduce  every row with its prediction and signed error
points     steps that others measured, on machines of one and of several GPUs
page       the rows as a page with pictures
"""

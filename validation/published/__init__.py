"""Figures of publications beside predictions:

workloads  workloads from what a publication says of its model
reproduce  every row with its prediction and signed error
page       the rows as a page with pictures
"""
